# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's splash attention: the mask info and the segment ids are arguments; batch and heads sharded."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from gallery._check import check_kernel
from gallery._support import V5E, needs_libtpu, normal
from haliax_kernels import Parallel, named_kernel

Batch, Heads, Pos, KPos, Head = Axis("batch", 2), Axis("heads", 4), Axis("pos", 256), Axis("k_pos", 256), Axis("d", 128)
WINDOW = 100


# The batch is a loop axis: JAX vmaps the kernel, whose mask info has no batch and so stays in scalar memory. The mask
# info is a PyTree of plain arrays without a place in the signature: each device gets the whole of it.
@named_kernel(
    "heads pos d, heads k_pos d, heads k_pos d, pos, k_pos -> heads pos d",
    policies={"heads": Parallel()},
)
def splash_attention(q, k, v, q_segment_ids, k_segment_ids, kernel):
    return kernel(q * q.shape[-1] ** -0.5, k, v, library.SegmentIds(q_segment_ids, k_segment_ids))


def mask_info():
    """The kernel for a window that no function describes, so that its mask blocks are arrays."""
    distance = jnp.arange(Pos.size)[:, None] - jnp.arange(KPos.size)
    window = masks.NumpyMask(jax.device_get((distance >= 0) & (distance < WINDOW)))
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    return library.make_splash_mha_single_device(
        masks.MultiHeadMask([window] * Heads.size),
        block_sizes=library.BlockSizes(**{f"block_{name}": 128 for name in names}),
    )


def reference(q, k, v, q_segment_ids, k_segment_ids, kernel):
    logits = jnp.einsum("bhqd,bhkd->bhqk", q.array, k.array, precision="highest") * Head.size**-0.5
    distance = jnp.arange(Pos.size)[:, None] - jnp.arange(KPos.size)
    visible = (distance >= 0) & (distance < WINDOW)
    visible &= q_segment_ids.array[:, :, None] == k_segment_ids.array[:, None, :]
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -1e30), axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v.array, precision="highest")


def arguments():
    ids = hax.named(jnp.tile(jnp.arange(Pos.size) // 150, (Batch.size, 1)), (Batch, Pos))
    keys = normal(1, Batch, Heads, KPos, Head), normal(2, Batch, Heads, KPos, Head)
    return normal(0, Batch, Heads, Pos, Head), *keys, ids, ids.rename({"pos": "k_pos"}), mask_info()


def test_values_and_gradients():
    check_kernel(splash_attention, *arguments(), reference=reference, samples=2)


@needs_libtpu
def test_compiles_for_tpu():
    check_kernel(splash_attention, *arguments(), topology=V5E, samples=4)
