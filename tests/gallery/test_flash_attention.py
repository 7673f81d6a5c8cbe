# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's TPU flash attention: batch and heads sharded."""

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from jax.experimental.pallas.ops.tpu import flash_attention as library

from gallery._support import compile_for_tpu, needs_libtpu, normal, plain
from haliax_kernels import Parallel, named_kernel
from haliax_kernels.testing import check_kernel

Batch, Heads, Head = Axis("batch", 2), Axis("heads", 2), Axis("d", 128)
Pos, KPos = Axis("pos", 128), Axis("k_pos", 128)


@named_kernel(
    "batch heads pos d, batch heads k_pos d, batch heads k_pos d, batch pos, batch k_pos -> batch heads pos d",
    policies={"batch": Parallel(), "heads": Parallel()},
)
def flash_attention(q, k, v, q_segment_ids, k_segment_ids):
    ids = library.SegmentIds(q_segment_ids, k_segment_ids)
    return library.flash_attention(q, k, v, segment_ids=ids, causal=True, sm_scale=q.shape[-1] ** -0.5)


@plain
def reference(q, k, v, q_segment_ids, k_segment_ids):
    logits = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") * Head.size**-0.5
    visible = q_segment_ids[:, :, None] == k_segment_ids[:, None, :]
    visible &= jnp.arange(Pos.size)[:, None] >= jnp.arange(KPos.size)
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -1e30), axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v, precision="highest")


def arguments():
    ids = hax.named(jnp.tile(jnp.arange(Pos.size) // 50, (Batch.size, 1)), (Batch, Pos))
    keys = normal(1, Batch, Heads, KPos, Head), normal(2, Batch, Heads, KPos, Head)
    return normal(0, Batch, Heads, Pos, Head), *keys, ids, ids.rename({"pos": "k_pos"})


@pytest.mark.slow
def test_values_and_gradients():
    check_kernel(flash_attention, *arguments(), reference=reference, mesh={"a": 2})


@needs_libtpu
def test_compiles_for_tpu():
    compile_for_tpu(flash_attention, *arguments(), mapping={"batch": "a", "heads": "b"}, kernels=3)
