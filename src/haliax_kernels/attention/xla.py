# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Blockwise attention in plain XLA operations, for every platform.

Forward: the online softmax of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691, algorithm 1). Backward:
algorithm 2 of the same, in one pass over the blocks, which recomputes the probabilities from the saved logsumexp.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from haliax_kernels.attention.block_sizes import BlockSizes, default_block_sizes

T = TypeVar("T")
_Q = Float[Array, "group q_pos key"]
_K = Float[Array, "k_pos key"]
_V = Float[Array, "k_pos value"]
_QIds = Int32[Array, " q_pos"] | None
_KIds = Int32[Array, " k_pos"] | None
_O = Float[Array, "group q_pos value"]
_Lse = Float32[Array, "group q_pos"]
_Residuals = tuple[_Q, _K, _V, _QIds, _KIds, _O, _Lse]


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
) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
    """Attention of a group of query heads to one key/value head, in memory linear in the lengths.

    `o = softmax(scale * q @ k.T, over the keys each query may see) @ v`, and `lse` the logsumexp of the same logits.
    Both are differentiable and may stand in one loss. Products of 16-bit inputs are accumulated in float32, and the
    softmax is float32. `jax.vmap` it over batch and key/value heads: what is not mapped is shared.

    A query that sees no key has `o = 0` and `lse = -inf` and sends no gradient. A NaN in a key or query that is hidden
    from everything in its block stays there; one that something sees can spoil its block, as in dense attention.

    Args:
        q: queries; float32, bfloat16 or float16. The group is the query heads that share the key/value head.
        k: keys, in q's dtype.
        v: values, in q's dtype. Their size may differ from the keys'.
        q_segment_ids: int32 ids; a query sees the keys of its own id only. Given together with `k_segment_ids`.
        k_segment_ids: int32 ids of the keys.
        causal: whether query i sees keys j <= i only, both counted from the start, also if the lengths differ.
        scale: what the logits are multiplied by.
        block_sizes: positions per block; by default what suits the platform. Lengths need not be multiples of them.

    Returns:
        `(o, lse)`, in q's dtype and float32. For `jax.checkpoint` policies they are named `flash_attention_out` and
        `flash_attention_lse`.
    """
    if (q_segment_ids is None) != (k_segment_ids is None):
        raise ValueError("q_segment_ids and k_segment_ids must be given together")
    q_len, k_len = q.shape[1], k.shape[0]
    if causal and q_len < k_len:
        # The mask hides the keys past the last query from all of them.
        k_len = q_len
        k, v = k[:k_len], v[:k_len]
        k_segment_ids = None if k_segment_ids is None else k_segment_ids[:k_len]
    if block_sizes is None:
        block_sizes = default_block_sizes(q_len, k_len)
    block_sizes = BlockSizes(q=min(block_sizes.q, max(q_len, 1)), k=min(block_sizes.k, max(k_len, 1)))
    blocks = _Blocks(q_len, k_len, block_sizes.q, block_sizes.k, causal, q_segment_ids is not None)
    return _attention(blocks, scale, q, k, v, q_segment_ids, k_segment_ids)


@dataclass(frozen=True)
class _Blocks:
    """How the lengths are cut, and which blocks need what; all static but the indices."""

    q_len: int
    k_len: int
    q: int
    k: int
    causal: bool
    segmented: bool

    @property
    def q_count(self) -> int:
        return -(-self.q_len // self.q)

    @property
    def k_count(self) -> int:
        return -(-self.k_len // self.k)

    def pad_q(self, x: Array, axis: int, fill: float = 0) -> Array:
        return _pad(x, axis, max(self.q_count, 1) * self.q, fill)

    def pad_k(self, x: Array, axis: int, fill: float = 0) -> Array:
        return _pad(x, axis, max(self.k_count, 1) * self.k, fill)

    def for_visible_k(self, i: Int[Array, ""], body: Callable[[Int[Array, ""], T, bool], T], init: T) -> T:
        """Fold `body(j, state, masked)` over the key blocks that query block `i` sees, those that need no mask first.

        The bounds depend on `i` alone, so that `jax.vmap` keeps them unbatched and hidden blocks cost nothing.
        """
        seen = jnp.minimum(((i + 1) * self.q + self.k - 1) // self.k, self.k_count) if self.causal else self.k_count
        full = self.k_len // self.k
        if self.segmented:
            full = 0
        elif self.causal:
            full = jnp.minimum((i * self.q + 1) // self.k, full)
        state = init
        if not self.segmented:
            state = lax.fori_loop(0, full, lambda j, s: body(j, s, False), state)
        if self.causal or self.segmented or self.k_len % self.k:
            state = lax.fori_loop(full, seen, lambda j, s: body(j, s, True), state)
        return state

    def mask(
        self,
        i: Int[Array, ""],
        j: Int[Array, ""],
        q_segment_ids: Int32[Array, " q_pos"] | None,
        k_segment_ids: Int32[Array, " k_pos"] | None,
    ) -> Bool[Array, "q_block k_block"]:
        """Which keys of block `j` the queries of block `i` see."""
        q_index = i * self.q + lax.broadcasted_iota(jnp.int32, (self.q, self.k), 0)
        k_index = j * self.k + lax.broadcasted_iota(jnp.int32, (self.q, self.k), 1)
        mask = k_index < self.k_len
        if self.causal:
            mask &= k_index <= q_index
        if q_segment_ids is not None and k_segment_ids is not None:
            q_ids = lax.dynamic_slice_in_dim(q_segment_ids, i * self.q, self.q)
            k_ids = lax.dynamic_slice_in_dim(k_segment_ids, j * self.k, self.k)
            mask &= q_ids[:, None] == k_ids[None, :]
        return mask


def _pad(x: Array, axis: int, length: int, fill: float) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill) if widths[axis][1] else x


def _dot(equation: str, a: Array, b: Array) -> Float32[Array, "..."]:
    """einsum of the operands in b's dtype, accumulated in float32."""
    return jnp.einsum(equation, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def _keep_rows(x: Array, rows: Bool[Array, " rows"]) -> Array:
    """x (..., rows, columns) with other rows zero: a probability of 0 does not silence a NaN that it multiplies."""
    return jnp.where(rows[:, None], x, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    blocks: _Blocks, scale: float, q: _Q, k: _K, v: _V, q_segment_ids: _QIds, k_segment_ids: _KIds
) -> tuple[_O, _Lse]:
    return _forward(blocks, scale, q, k, v, q_segment_ids, k_segment_ids)


def _forward(
    blocks: _Blocks, scale: float, q: _Q, k: _K, v: _V, q_segment_ids: _QIds, k_segment_ids: _KIds
) -> tuple[_O, _Lse]:
    group, value_size = q.shape[0], v.shape[1]
    q = blocks.pad_q(q, 1)
    k, v = blocks.pad_k(k, 0), blocks.pad_k(v, 0)
    if q_segment_ids is not None and k_segment_ids is not None:
        q_segment_ids, k_segment_ids = blocks.pad_q(q_segment_ids, 0), blocks.pad_k(k_segment_ids, 0)

    def q_block(i, outputs):
        q_i = lax.dynamic_slice_in_dim(q, i * blocks.q, blocks.q, 1)

        def k_block(j, state, masked):
            total, largest, acc = state
            k_j = lax.dynamic_slice_in_dim(k, j * blocks.k, blocks.k)
            v_j = lax.dynamic_slice_in_dim(v, j * blocks.k, blocks.k)
            logits = _dot("gqd,kd->gqk", q_i, k_j) * scale
            if masked:
                mask = blocks.mask(i, j, q_segment_ids, k_segment_ids)
                logits = jnp.where(mask, logits, -jnp.inf)
                if blocks.segmented:
                    v_j = _keep_rows(v_j, mask.any(0))
            new_largest = jnp.maximum(largest, logits.max(-1))
            # A row that has seen nothing yet has -inf here, and -inf - -inf is NaN.
            shift = jnp.where(new_largest == -jnp.inf, 0, new_largest)
            p = jnp.exp(logits - shift[..., None])
            shrink = jnp.exp(largest - shift)
            acc = acc * shrink[..., None] + _dot("gqk,kd->gqd", p, v_j)
            return total * shrink + p.sum(-1), new_largest, acc

        rows = (group, blocks.q)
        start = (
            jnp.zeros(rows, jnp.float32),
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros((*rows, value_size), jnp.float32),
        )
        total, largest, acc = blocks.for_visible_k(i, k_block, start)
        dead = total == 0
        total = jnp.where(dead, 1, total)
        o_i = (acc / total[..., None]).astype(q.dtype)
        lse_i = jnp.where(dead, -jnp.inf, largest + jnp.log(total))
        o, lse = outputs
        o = lax.dynamic_update_slice_in_dim(o, o_i, i * blocks.q, 1)
        return o, lax.dynamic_update_slice_in_dim(lse, lse_i, i * blocks.q, 1)

    o = jnp.zeros((*q.shape[:2], value_size), q.dtype)
    lse = jnp.zeros(q.shape[:2], jnp.float32)
    o, lse = lax.fori_loop(0, blocks.q_count, q_block, (o, lse))
    return o[:, : blocks.q_len], lse[:, : blocks.q_len]


def _attention_fwd(
    blocks: _Blocks, scale: float, q: _Q, k: _K, v: _V, q_segment_ids: _QIds, k_segment_ids: _KIds
) -> tuple[tuple[_O, _Lse], _Residuals]:
    o, lse = _forward(blocks, scale, q, k, v, q_segment_ids, k_segment_ids)
    o, lse = checkpoint_name(o, "flash_attention_out"), checkpoint_name(lse, "flash_attention_lse")
    return (o, lse), (q, k, v, q_segment_ids, k_segment_ids, o, lse)


def _attention_bwd(
    blocks: _Blocks, scale: float, residuals: _Residuals, cotangents: tuple[_O, _Lse]
) -> tuple[_Q, _K, _V, None, None]:
    q, k, v, q_segment_ids, k_segment_ids, o, lse = residuals
    do, dlse = cotangents
    group, key_size, value_size = q.shape[0], k.shape[1], v.shape[1]

    # lse = +inf makes the probabilities of a row exp(-inf) = 0: for rows that see nothing, and for the padding.
    dead = lse == -jnp.inf
    lse = blocks.pad_q(jnp.where(dead, jnp.inf, lse), 1, jnp.inf)
    do = jnp.where(dead[..., None], 0, do)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)
    # d loss / d logits = p * (do @ v.T - delta + dlse)
    offset = blocks.pad_q(jnp.where(dead, 0, dlse - delta), 1)
    do, q_padded = blocks.pad_q(do, 1), blocks.pad_q(q, 1)
    k_padded, v_padded = blocks.pad_k(k, 0), blocks.pad_k(v, 0)
    if q_segment_ids is not None and k_segment_ids is not None:
        q_segment_ids, k_segment_ids = blocks.pad_q(q_segment_ids, 0), blocks.pad_k(k_segment_ids, 0)

    def q_block(i, outputs):
        q_i, do_i, lse_i, offset_i = (
            lax.dynamic_slice_in_dim(x, i * blocks.q, blocks.q, 1) for x in (q_padded, do, lse, offset)
        )

        def k_block(j, state, masked):
            dq_i, dk, dv = state
            k_j = lax.dynamic_slice_in_dim(k_padded, j * blocks.k, blocks.k)
            v_j = lax.dynamic_slice_in_dim(v_padded, j * blocks.k, blocks.k)
            visible_q = q_i
            # Keys first: the two products summed over the group and the queries then need no transpose.
            logits = _dot("kd,gqd->kgq", k_j, q_i) * scale
            if masked:
                mask = blocks.mask(i, j, q_segment_ids, k_segment_ids)
                logits = jnp.where(mask.T[:, None], logits, -jnp.inf)
                if blocks.segmented:
                    k_j, v_j = _keep_rows(k_j, mask.any(0)), _keep_rows(v_j, mask.any(0))
                    visible_q = _keep_rows(q_i, mask.any(1))
            p = jnp.exp(logits - lse_i)
            ds = p * (_dot("kd,gqd->kgq", v_j, do_i) + offset_i)
            dq_i = dq_i + _dot("kgq,kd->gqd", ds, k_j)
            dk = _add_block(dk, _dot("kgq,gqd->kd", ds, visible_q), j * blocks.k)
            dv = _add_block(dv, _dot("kgq,gqd->kd", p, do_i), j * blocks.k)
            return dq_i, dk, dv

        dq, dk, dv = outputs
        start = jnp.zeros((group, blocks.q, key_size), jnp.float32)
        dq_i, dk, dv = blocks.for_visible_k(i, k_block, (start, dk, dv))
        return lax.dynamic_update_slice_in_dim(dq, (dq_i * scale).astype(q.dtype), i * blocks.q, 1), dk, dv

    start = (
        jnp.zeros(q_padded.shape, q.dtype),
        jnp.zeros((k_padded.shape[0], key_size), jnp.float32),
        jnp.zeros((v_padded.shape[0], value_size), jnp.float32),
    )
    dq, dk, dv = lax.fori_loop(0, blocks.q_count, q_block, start)
    dk, dv = (dk[: blocks.k_len] * scale).astype(k.dtype), dv[: blocks.k_len].astype(v.dtype)
    return dq[:, : blocks.q_len], dk, dv, None, None


def _add_block(x: Float32[Array, "k_pos size"], block: Float32[Array, "k_block size"], start: Int[Array, ""]) -> Array:
    old = lax.dynamic_slice_in_dim(x, start, block.shape[0])
    return lax.dynamic_update_slice_in_dim(x, old + block, start, 0)


_attention.defvjp(_attention_fwd, _attention_bwd)
