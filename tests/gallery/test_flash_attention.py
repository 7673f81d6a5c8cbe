# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's TPU flash attention: batch and heads sharded."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis
from jax.experimental.pallas.ops.tpu import flash_attention as library

from gallery._check import check_kernel
from gallery._support import V5E, needs_libtpu, normal
from haliax_kernels import Parallel, named_kernel

Batch, Heads, Pos, KPos, Head = Axis("batch", 4), Axis("heads", 2), Axis("pos", 128), Axis("k_pos", 128), Axis("d", 128)


@named_kernel(
    "batch heads pos d, batch heads k_pos d, batch heads k_pos d, batch pos, batch k_pos -> batch heads pos d",
    policies={"batch": Parallel(), "heads": Parallel()},
)
def flash_attention(q, k, v, q_segment_ids, k_segment_ids):
    ids = library.SegmentIds(q_segment_ids, k_segment_ids)
    return library.flash_attention(q, k, v, segment_ids=ids, causal=True, sm_scale=q.shape[-1] ** -0.5)


def reference(q, k, v, q_segment_ids, k_segment_ids):
    logits = jnp.einsum("bhqd,bhkd->bhqk", q.array, k.array, precision="highest") * Head.size**-0.5
    visible = q_segment_ids.array[:, :, None] == k_segment_ids.array[:, None, :]
    visible &= jnp.arange(Pos.size)[:, None] >= jnp.arange(KPos.size)
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -1e30), axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v.array, precision="highest")


def arguments():
    ids = hax.named(jnp.tile(jnp.arange(Pos.size) // 50, (Batch.size, 1)), (Batch, Pos))
    keys = normal(1, Batch, Heads, KPos, Head), normal(2, Batch, Heads, KPos, Head)
    return normal(0, Batch, Heads, Pos, Head), *keys, ids, ids.rename({"pos": "k_pos"})


def test_values_and_gradients():
    check_kernel(flash_attention, *arguments(), reference=reference, samples=2)


@needs_libtpu
def test_compiles_for_tpu():
    check_kernel(flash_attention, *arguments(), topology=V5E, samples=4)
