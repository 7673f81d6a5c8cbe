# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Linear attention over a sharded sequence on TPUs: states are on their way while the shard computes."""

import importlib.util

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels import linear_attention
from haliax_kernels.compiled.collectives import transfers
from haliax_kernels.compiled.program import Program
from haliax_kernels.testing import topology_mesh

Batch, Pos, Embed, Heads, HeadSize = hax.make_axes(batch=2, position=8192, embed=1024, heads=8, head_size=128)
MAPPING = {"batch": "data", "position": "context"}


def layer(x, wq, wk, wv, wo):
    q, k, v = (hax.dot(x, w, axis=Embed) for w in (wq, wk, wv))
    return x + hax.dot(linear_attention(Pos, HeadSize, q, k, v), wo, axis=(Heads, HeadSize))


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_states_travel_while_the_shard_computes():
    mesh = topology_mesh("v5e:2x4", {"data": 2, "context": 4})

    def abstract(*axes):
        spec = PartitionSpec(*(MAPPING.get(a.name) for a in axes))
        sharding = NamedSharding(mesh, spec)
        return NamedArray(jax.ShapeDtypeStruct([a.size for a in axes], jnp.bfloat16, sharding=sharding), axes)

    def loss(x, *weights):
        with hax.axis_mapping(MAPPING):
            return hax.sum(layer(x, *weights).astype(jnp.float32) ** 2).scalar()

    x, w = abstract(Batch, Pos, Embed), abstract(Embed, Heads, HeadSize)
    with jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).trace(x, w, w, w, abstract(Heads, HeadSize, Embed))
        program = Program(traced.lower().compile().as_text())
    computing = ("fusion", "custom-call", "convolution")
    found = [[i for i in between if i.opcode in computing] for between in transfers(program)]
    # Three steps for four shards, forward and backward.
    assert len(found) == 6
    assert sum(map(bool, found)) >= 3
    assert any("dot_general" in i.text for between in found for i in between)
