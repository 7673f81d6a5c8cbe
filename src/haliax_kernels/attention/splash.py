# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's splash attention for TPUs, under the contract of `haliax_kernels.attention.xla`."""

from typing import cast

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Bool, Float, Int32

from haliax_kernels.attention.block_sizes import BlockSizes, even_block

_LANES = splash.NUM_LANES
_DEFAULT = BlockSizes(q=512, k=512)


def attention(
    q: Float[Array, "group q_pos key"],
    k: Float[Array, "k_pos key"],
    v: Float[Array, "k_pos value"],
    q_segment_ids: Int32[Array, " q_pos"] | None = None,
    k_segment_ids: Int32[Array, " k_pos"] | None = None,
    *,
    causal: bool,
    scale: float,
    block_sizes: BlockSizes | None = None,
    interpret: bool = False,
) -> Float[Array, "group q_pos value"]:
    """`haliax_kernels.attention.xla.attention` by JAX's Pallas kernel for TPUs, without the logsumexp.

    The kernel cannot be differentiated when it returns its logsumexp, so this returns `o` alone. A query that sees no
    key has `o = 0` and sends no gradient; the kernel itself would return the mean of the values there. Hidden keys and
    queries must hold finite numbers: the kernel multiplies them by 0.

    Args:
        q: queries, float32 or bfloat16. The group is the query heads that share the key/value head.
        k: keys, in q's dtype.
        v: values, in q's dtype. Their size may differ from the keys'.
        q_segment_ids: int32 ids; a query sees the keys of its own id only. Given together with `k_segment_ids`.
        k_segment_ids: int32 ids of the keys.
        causal: whether query i sees keys j <= i only, both counted from the start, also if the lengths differ.
        scale: what the logits are multiplied by.
        block_sizes: the largest blocks to use, multiples of 128; by default 512. Lengths need not be multiples.
        interpret: run the kernel in Pallas' interpreter, on any platform.

    Returns:
        `o` in q's dtype. For `jax.checkpoint` policies the kernel's residuals are named `flash_attention_out`.

    Raises:
        NotImplementedError: naming the argument that the kernel cannot honour.
    """
    if (q_segment_ids is None) != (k_segment_ids is None):
        raise ValueError("q_segment_ids and k_segment_ids must be given together")
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"q: splash attention takes float32 or bfloat16, got {q.dtype}")
    largest = block_sizes or _DEFAULT
    if largest.q % _LANES or largest.k % _LANES:
        raise NotImplementedError(f"block_sizes: splash attention needs multiples of {_LANES}, got {largest}")
    group, q_len, _ = q.shape
    k_len, value_size = v.shape
    if q_len == 0 or k_len == 0:
        return jnp.zeros((group, q_len, value_size), q.dtype)
    if causal and q_len < k_len:
        # The mask hides the keys past the last query from all of them.
        k_len = q_len
        k, v = k[:k_len], v[:k_len]
        k_segment_ids = None if k_segment_ids is None else k_segment_ids[:k_len]

    block_q, block_k = even_block(q_len, largest.q, _LANES), even_block(k_len, largest.k, _LANES)
    q_pad, k_pad = -q_len % block_q, -k_len % block_k
    # The product in float32, so that only its result is rounded and not the scale.
    q_scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    kernel = _kernel(group, q_len + q_pad, k_len + k_pad, block_q, block_k, causal, interpret)
    padded = kernel(
        jnp.pad(q_scaled, ((0, 0), (0, q_pad), (0, 0))),
        jnp.pad(k, ((0, k_pad), (0, 0))),
        jnp.pad(v, ((0, k_pad), (0, 0))),
        _padded_segment_ids(q_segment_ids, k_segment_ids, q_len, k_len, q_pad, k_pad),
    )
    o = cast(Array, padded)[:, :q_len]  # a tuple only where residuals are asked for
    if q_segment_ids is None or k_segment_ids is None:
        return o
    return jnp.where(_sees_something(q_segment_ids, k_segment_ids, causal)[:, None], o, 0)


def _kernel(
    group: int, q_len: int, k_len: int, block_q: int, block_k: int, causal: bool, interpret: bool
) -> splash.SplashAttentionKernel:
    # Both masks are lazy: no array of q_len x k_len is made.
    mask = masks.CausalMask((q_len, k_len)) if causal else masks.FullMask((q_len, k_len))
    return splash.make_splash_mqa_single_device(
        masks.MultiHeadMask([mask] * group),
        block_sizes=splash.BlockSizes(
            block_q=block_q,
            block_kv=block_k,
            block_q_dkv=block_q,
            block_kv_dkv=block_k,
            block_q_dq=block_q,
            block_kv_dq=block_k,
        ),
        residual_checkpoint_name="flash_attention_out",
        interpret=interpret,
    )


def _padded_segment_ids(
    q_segment_ids: Int32[Array, " q_pos"] | None,
    k_segment_ids: Int32[Array, " k_pos"] | None,
    q_len: int,
    k_len: int,
    q_pad: int,
    k_pad: int,
) -> splash.SegmentIds | None:
    """Ids of the padded lengths under which no query sees a padded key; None where none are needed."""
    if q_segment_ids is None or k_segment_ids is None:
        if not k_pad:
            return None
        q_segment_ids, k_segment_ids = jnp.zeros(q_len, jnp.int32), jnp.zeros(k_len, jnp.int32)
    # Less than every query's id. At the least int32 it wraps round, to an id that is free unless both extremes occur.
    hidden = jnp.full(k_pad, q_segment_ids.min() - 1, jnp.int32)
    return splash.SegmentIds(
        q=jnp.pad(q_segment_ids, (0, q_pad), mode="edge"), kv=jnp.concatenate([k_segment_ids, hidden])
    )


def _sees_something(
    q_segment_ids: Int32[Array, " q_pos"], k_segment_ids: Int32[Array, " k_pos"], causal: bool
) -> Bool[Array, " q_pos"]:
    """Whether each query sees any key, in O(S log S): the first key of its segment decides."""
    order = jnp.argsort(k_segment_ids, stable=True)
    ids = k_segment_ids[order]
    place = jnp.minimum(jnp.searchsorted(ids, q_segment_ids), ids.shape[0] - 1)
    found = ids[place] == q_segment_ids
    return found & (order[place] <= jnp.arange(q_segment_ids.shape[0])) if causal else found
