# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's splash attention: the mask info and the segment ids are arguments; batch and heads sharded."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from gallery._support import compile_for_tpu, needs_libtpu, normal, plain
from haliax_kernels import Parallel, named_kernel
from haliax_kernels.testing import KernelCheckError, check_kernel

Batch, Heads, Head = Axis("batch", 2), Axis("heads", 2), Axis("d", 128)
Pos, KPos = Axis("pos", 256), Axis("k_pos", 256)
WINDOW = 100


# The batch is a loop axis: the mask info lacks it, and so stays in scalar memory when the kernel is vmapped. The mask
# info is a PyTree of plain arrays without a place in the signature: every device gets the whole of it.
@named_kernel("heads pos d, heads k_pos d, heads k_pos d, pos, k_pos -> heads pos d", policies={"heads": Parallel()})
def splash_attention(q, k, v, q_segment_ids, k_segment_ids, kernel):
    return kernel(q * q.shape[-1] ** -0.5, k, v, library.SegmentIds(q_segment_ids, k_segment_ids))


def make_kernel(interpret, windows=(WINDOW, WINDOW)):
    distance = np.arange(Pos.size)[:, None] - np.arange(KPos.size)
    # A mask without a function, so that its blocks are arrays.
    of_heads = [masks.NumpyMask((distance >= 0) & (distance < window)) for window in windows]
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    return library.make_splash_mha_single_device(
        masks.MultiHeadMask(of_heads),
        block_sizes=library.BlockSizes(**{f"block_{name}": 128 for name in names}),
        interpret=interpret,
    )


@plain
def reference(q, k, v, q_segment_ids, k_segment_ids, kernel):
    logits = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") * Head.size**-0.5
    distance = jnp.arange(Pos.size)[:, None] - jnp.arange(KPos.size)
    visible = (distance >= 0) & (distance < WINDOW) & (q_segment_ids[:, :, None] == k_segment_ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -1e30), axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v, precision="highest")


def arguments(interpret, **windows):
    ids = hax.named(jnp.tile(jnp.arange(Pos.size) // 150, (Batch.size, 1)), (Batch, Pos))
    keys = normal(1, Batch, Heads, KPos, Head), normal(2, Batch, Heads, KPos, Head)
    ids = ids, ids.rename({"pos": "k_pos"})
    return normal(0, Batch, Heads, Pos, Head), *keys, *ids, make_kernel(interpret, **windows)


@pytest.mark.slow
def test_values_and_gradients():
    check_kernel(splash_attention, *arguments(True), reference=reference, mesh={"a": 2})


def test_another_mask_for_each_head_is_caught():
    """Their mask info has a head axis, of which every device would take the first rows."""
    with pytest.raises(KernelCheckError, match="heads"):
        check_kernel(splash_attention, *arguments(True, windows=(WINDOW, 10)), gradients=False, mesh={"a": 2})


def test_why_it_is_run_with_its_own_interpreter():
    """JAX's interpreter for TPUs does not know that vmap adds a dimension to the grid."""
    with pltpu.force_tpu_interpret_mode(), pytest.raises(ValueError, match="argument 1 has length 3 but argument 0"):
        splash_attention(*arguments(False))


@needs_libtpu
def test_compiles_for_tpu():
    compile_for_tpu(splash_attention, *arguments(False), mapping={"batch": "a", "heads": "b"}, kernels=3)
