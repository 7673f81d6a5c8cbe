# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What only the Pallas kernels for TPUs have: blocks of heads, refusals, and that they compile for TPUs."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.linear import pallas_tpu
from haliax_kernels.linear.contract import LinearOperands, LinearOptions
from haliax_kernels.linear.pallas_tpu.plan import plan_for
from haliax_kernels.testing import topology_mesh
from haliax_kernels.testing.interpret import race_detection
from linear.cases import Case, compare


@pytest.mark.slow
@pytest.mark.parametrize("decay", [None, "token", "channel"])
def test_several_blocks_of_heads_and_of_chunks(decay):
    case = Case(length=150, group=11, decay=decay, normalize=True, state=True, segments=2)
    plan = plan_for(case.options, case.operands(), backward=True)
    assert plan.head_blocks == 11 and plan.blocks > 1
    compare("pallas_tpu", case)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [None, "token", "channel"])
def test_full_chunks(decay):
    """Of 128 tokens, and head sizes that fill the lanes or not."""
    for dtype in ("float32", "bfloat16"):
        compare("pallas_tpu", Case(length=300, group=1, key=128, value=40, decay=decay, state=True, normalize=True,
                                   chunk_size=None, dtype=dtype))  # fmt: skip


def test_blocks_fit_in_vector_memory():
    """By the plan's own estimate, also of the largest sizes; the compiler refuses what does not."""
    for group, key, value, dtype in (
        (1, 64, 64, jnp.bfloat16),
        (71, 256, 256, jnp.float32),
        (8, 128, 256, jnp.float32),
    ):
        shapes = ((group, 4096, key), (4096, key), (4096, value))
        x = LinearOperands(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
        plan = plan_for(LinearOptions(), x, backward=True)
        assert plan.group % plan.heads == 0 and 1 <= plan.n <= 4
        assert plan.n * plan.heads <= 8


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        ("q", {"q": jnp.zeros((1, 16, 16), jnp.float16)}, {}),
        ("k", {"k": jnp.zeros((16, 16), jnp.bfloat16)}, {}),
        ("chunk_size", {}, {"chunk_size": 8}),
    ],
)
def test_refusals_name_the_argument(name, change, options):
    x = LinearOperands(jnp.zeros((1, 16, 16)), jnp.zeros((16, 16)), jnp.zeros((16, 16)))._replace(**change)
    with pytest.raises(UnsupportedOptionError, match=name):
        pallas_tpu.forward(LinearOptions(**options), x)


def test_lengths_of_0():
    x = LinearOperands(jnp.ones((2, 0, 16)), jnp.ones((0, 16)), jnp.ones((0, 8)))
    y, state, residuals = pallas_tpu.forward(LinearOptions(normalize=True), x, residuals=True)
    assert y.shape == (2, 0, 8) and state.s.shape == (16, 8) and not state.z.any()
    gradients = pallas_tpu.backward(LinearOptions(normalize=True), x, residuals, y, state)
    assert gradients.k.shape == (0, 16)


@pytest.mark.slow
def test_no_races():
    case = Case(length=64, decay="token", group=2, key=16, value=16)
    x = jax.tree.map(jnp.asarray, case.operands())
    with race_detection() as races:
        y, state, residuals = pallas_tpu.forward(case.options, x, residuals=True, interpret=True)
        pallas_tpu.backward(case.options, x, residuals, y, state, interpret=True)
    assert races.watched and races.first is None


# --- compiled for TPUs -----------------------------------------------------------------------------------------------


def compile_for(topology, case):
    """The compiled text of forward and backward under two levels of vmap; segments are the batch's."""
    sharding = NamedSharding(topology_mesh(topology, {"x": 1}), PartitionSpec())
    x, (dy, dstate) = case.operands(), case.cotangents()
    ids, x = x.segment_ids, x._replace(segment_ids=None)

    def abstract(a, batch):
        return jax.ShapeDtypeStruct((*batch, *np.shape(a)), a.dtype, sharding=sharding)

    x, dy, dstate = jax.tree.map(lambda a: abstract(a, (2, 3)), (x, dy, dstate))
    ids = None if ids is None else abstract(ids, (2,))

    def both(x, ids, dy, dstate):
        x = x._replace(segment_ids=ids)
        y, last, residuals = pallas_tpu.forward(case.options, x, residuals=True)
        return y, last, pallas_tpu.backward(case.options, x, residuals, dy, dstate)

    ids_axis = None if ids is None else 0
    f = jax.vmap(jax.vmap(both, (0, None, 0, 0)), (0, ids_axis, 0, 0))
    return jax.jit(f).trace(x, ids, dy, dstate).lower().compile().as_text()


SIZES = (64, 128, 256)
EVERYTHING = {"normalize": True, "state": True, "segments": 3, "group": 4, "scale": 0.3}


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(
    "options",
    [pytest.param({"key": 128, "value": 128, "decay": d}, id=str(d)) for d in (None, "token", "channel")]
    + [pytest.param({"key": k, "value": v, "decay": d} | more, id=f"{k}, {v}, {d}{', everything' if more else ''}",
                    marks=pytest.mark.slow)
       for k in SIZES for v in SIZES for d in (None, "head", "token", "channel") for more in ({}, EVERYTHING)
       if k == v or (d == "channel" and more)]
    + [pytest.param({"key": 96, "value": 80, "decay": "channel", "dtype": "float32"} | EVERYTHING, id="float32",
                    marks=pytest.mark.slow),
       pytest.param({"key": 64, "value": 64, "decay": "token", "group": 71}, id="group 71", marks=pytest.mark.slow),
       pytest.param({"key": 64, "value": 64, "decay": "channel", "length": 5}, id="5 tokens", marks=pytest.mark.slow)],
)  # fmt: skip
def test_compiles_for_tpus(topology, options):
    case = Case(**({"length": 1000, "group": 1, "chunk_size": None, "dtype": "bfloat16"} | options))
    assert compile_for(topology, case).count('custom_call_target="tpu_custom_call"') >= 2
