# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Pallas kernels with neighbours' rows and with collectives of their own, compiled for TPU: only what is planned."""

import importlib.util

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis, NamedArray
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels import Halo, Manual, Parallel, named_kernel
from haliax_kernels.collectives import ring
from haliax_kernels.testing import topology_mesh
from support import collectives, planned

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]
Pos, KPos, C = Axis("pos", 1024), Axis("key_pos", 1024), Axis("channel", 128)
ROW = 128 * 4


@named_kernel("pos channel -> pos channel", policies={"pos": Halo(before=8), "channel": Parallel()})
def with_earlier(x):
    def body(source, target):
        target[...] = source[pl.ds(8, target.shape[0]), :] + 2 * source[pl.ds(0, target.shape[0]), :]

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((x.shape[0] - 8, x.shape[1]), x.dtype))(x)


def scores(q, k, total):
    """total + q k^T k, one block of keys at a time."""

    def body(q, k, total, target):
        s = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)
        target[...] = total[...] + jnp.dot(s, k[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype))(q, k, total)


@named_kernel(
    "q_pos channel, k_pos channel -> q_pos channel", policies={"q_pos": Manual(), "k_pos": Manual(reduces=True)}
)
def in_a_ring(q, k, *, shard):
    def step(total, visiting, source):
        return scores(q, visiting, total)

    return ring(step, jnp.zeros_like(q), k, shard["k_pos"].mesh_axes)


@pytest.mark.parametrize(
    "kernel, axes, moved",
    [
        (with_earlier, [(Pos, C)], (1, 8 * ROW)),
        (in_a_ring.bind(q_pos="pos", k_pos="key_pos"), [(Pos, C), (KPos, C)], (1, 256 * ROW)),
    ],
    ids=["halo", "ring"],
)
def test_only_what_is_planned_is_communicated(kernel, axes, moved):
    mesh = topology_mesh("v5e:2x2", {"context": 4})
    mapping = {"pos": "context", "key_pos": "context"}
    sharding = NamedSharding(mesh, PartitionSpec("context"))
    args = [
        NamedArray(jax.ShapeDtypeStruct([a.size for a in own], jnp.float32, sharding=sharding), own) for own in axes
    ]
    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        plan = kernel.plan(*args)
        text = jax.jit(lambda *xs: kernel(*xs).array).trace(*args).lower().compile().as_text()
    assert "tpu_custom_call" in text
    assert planned(plan, "forward") == {"collective-permute": moved}
    assert collectives(text) == planned(plan, "forward")
