# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The GPU kernels of linear attention: lowering for CUDA, and refusals. `test_contract.py` has their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.linear import pallas_gpu
from haliax_kernels.linear.contract import LinearOperands, LinearOptions
from linear.cases import Case, compare
from support import cuda_text

TRITON = "__gpu$xla.gpu.triton"


def lowered(case):
    """The program for an H200, forward and backward under two levels of vmap, on a machine without one: as text."""
    x, (dy, dstate) = case.operands(), case.cotangents()
    x, dy, dstate = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, 3, *np.shape(a)), a.dtype), (x, dy, dstate))

    def both(x, dy, dstate):
        y, last, residuals = pallas_gpu.forward(case.options, x, residuals=True)
        return y, last, pallas_gpu.backward(case.options, x, residuals, dy, dstate)

    return cuda_text(jax.vmap(jax.vmap(both)), x, dy, dstate)


EVERYTHING = {"normalize": True, "state": True, "segments": 3, "group": 4, "scale": 0.3}
OPTIONS = {
    "none": {},
    "head": {"decay": "head"},
    "token": {"decay": "token"},
    "channel": {"decay": "channel"},
    "all": {**EVERYTHING, "decay": "token"},
    "all, channel": {**EVERYTHING, "decay": "channel"},
}


def check_lowers(options, dtype, key, value):
    """The states, the results; the states again, their gradients, and the gradients by q, by k and by v."""
    case = Case(length=200, key=key, value=value, dtype=dtype, chunk_size=None, **options)
    assert lowered(case).count(TRITON) == 7


@pytest.mark.parametrize("options", [OPTIONS["none"], OPTIONS["all"]], ids=["none", "all"])
def test_lowers_for_cuda(options):
    check_lowers(options, "bfloat16", 64, 80)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("key", "value"), [(16, 128), (256, 80)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_everything_lowers_for_cuda(options, key, value, dtype):
    check_lowers(options, dtype, key, value)


def test_float16():
    """Sums over tokens leave its range; they are taken in float32."""
    compare("pallas_gpu", Case(dtype="float16", decay="token", normalize=True, state=True), tolerance=2e-2)


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        ("beta", {"beta": jnp.ones(16)}, {}),
        ("q", {"q": jnp.ones((1, 16, 16), jnp.bfloat16)}, {}),
        ("320", {"v": jnp.ones((16, 320))}, {}),
        ("chunk_size", {}, {"chunk_size": 256}),
    ],
)
def test_refusals_name_the_argument(name, change, options):
    x = LinearOperands(jnp.zeros((1, 16, 16)), jnp.zeros((16, 16)), jnp.zeros((16, 16)))._replace(**change)
    with pytest.raises(UnsupportedOptionError, match=name):
        pallas_gpu.forward(LinearOptions(**options), x)
