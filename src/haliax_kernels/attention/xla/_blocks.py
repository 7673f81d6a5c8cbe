# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""How a call's operands are cut into blocks, which blocks need what, and what a block of scores is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32

from haliax_kernels.attention.block_sizes import default_block_sizes
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.dropout import keep

T = TypeVar("T")
Index = Int[Array, ""]
# Of a block of scores. The backward pass has keys first, since its sums over group and queries then need no transpose.
GROUP_Q_K = (0, 1, 2)
K_GROUP_Q = (2, 0, 1)
# No position is further away; the sum with an offset stays in int32.
_FAR = 2**30


@dataclass(frozen=True)
class Blocks:
    """The operands padded to whole blocks. All but the arrays is static.

    Attributes:
        options: of the call.
        x: the operands, each position axis padded to whole blocks.
        q_len: the number of query positions without padding.
        k_len: likewise of the keys.
        q: query positions per block.
        k: key positions per block.
        order: the order of (group, q, k) in a block of scores.
    """

    options: AttentionOptions
    x: AttentionOperands
    q_len: int
    k_len: int
    q: int
    k: int
    order: tuple[int, int, int]

    @staticmethod
    def of(options: AttentionOptions, x: AttentionOperands, order: tuple[int, int, int]) -> "Blocks":
        """Cut a call's operands.

        Raises:
            ValueError: operands of which one is missing.
        """
        if (x.q_segment_ids is None) != (x.k_segment_ids is None):
            raise ValueError("q_segment_ids and k_segment_ids must be given together")
        if options.dropout and x.seed is None:
            raise ValueError("dropout needs a seed")
        q_len, k_len = x.q.shape[1], x.k.shape[0]
        sizes = options.block_sizes or default_block_sizes(q_len, k_len)
        q, k = min(sizes.q, max(q_len, 1)), min(sizes.k, max(k_len, 1))
        q_pad, k_pad = _padding(q_len, q), _padding(k_len, k)
        padded = x._replace(
            q=pad(x.q, {1: q_pad}),
            k=pad(x.k, {0: k_pad}),
            v=pad(x.v, {0: k_pad}),
            q_segment_ids=None if x.q_segment_ids is None else pad(x.q_segment_ids, {0: q_pad}),
            k_segment_ids=None if x.k_segment_ids is None else pad(x.k_segment_ids, {0: k_pad}),
            mask=None if x.mask is None else pad(x.mask, {1: q_pad, 2: k_pad}),
            bias=None if x.bias is None else pad(x.bias, {1: q_pad, 2: k_pad}),
        )
        return Blocks(options, padded, q_len, k_len, q, k, order)

    @property
    def q_count(self) -> int:
        return -(-self.q_len // self.q)

    @property
    def k_count(self) -> int:
        return -(-self.k_len // self.k)

    @property
    def q_padding(self) -> int:
        return _padding(self.q_len, self.q)

    @property
    def kept(self) -> float:
        """The fraction of probabilities that dropout leaves."""
        return 1 - self.options.dropout

    def q_block(self, x: Array, i: Index, axis: int = 1) -> Array:
        return lax.dynamic_slice_in_dim(x, i * self.q, self.q, axis)

    def k_block(self, x: Array, j: Index) -> Array:
        return lax.dynamic_slice_in_dim(x, j * self.k, self.k)

    def for_visible_k(self, i: Index, body: Callable[[Index, T, bool], T], init: T) -> T:
        """Fold `body(j, state, masked)` over the key blocks that query block `i` sees something of.

        The bounds depend on `i` and the offsets alone, so that `jax.vmap` keeps them unbatched and hidden blocks cost
        nothing.
        """
        left, right = self.options.left, self.options.right
        begin, end = 0, self.k_count
        # The blocks from full to full_end are seen whole by every query, and need no mask.
        full, full_end = 0, self.k_len // self.k
        # Where the keys of the first and the last query begin to count.
        first = self._shift + i * self.q
        last = self._shift + jnp.minimum((i + 1) * self.q, self.q_len) - 1
        if left is not None:
            begin = jnp.clip((first - min(left, _FAR)) // self.k, 0, end)
            full = (last - min(left, _FAR) + self.k - 1) // self.k
        if right is not None:
            end = jnp.clip((last + min(right, _FAR)) // self.k + 1, 0, end)
            full_end = jnp.minimum((first + min(right, _FAR) + 1) // self.k, full_end)

        def fold(lower, upper, state: T, masked: bool) -> T:
            return lax.fori_loop(lower, upper, lambda j, s: body(j, s, masked), state)

        # A window narrower than the blocks has no block that is seen whole.
        narrow = left is not None and right is not None and left + right < self.q + self.k - 2
        if narrow or self.x.mask is not None or self.x.q_segment_ids is not None:
            return fold(begin, end, init, True)
        if left is not None:
            full = jnp.clip(full, begin, end)
            init = fold(begin, full, init, True)
        if left is not None or right is not None:
            full_end = jnp.clip(full_end, full, end)
        state = fold(full, full_end, init, False)
        return fold(full_end, end, state, True) if right is not None or self.k_len % self.k else state

    def mask(self, i: Index, j: Index) -> Bool[Array, "*scores"]:
        """What the queries of block `i` see of the keys of block `j`, in this order, a group of 1 if all see the same.

        Padded queries see nothing.
        """
        row = self._rows(i)
        column = self._columns(j)
        mask = (row < self.q_len) & (column < self.k_len)
        # The distance of the key, counted from the query.
        distance = column - row - self._shift
        if self.options.left is not None:
            mask &= distance >= -self.options.left
        if self.options.right is not None:
            mask &= distance <= self.options.right
        if self.x.q_segment_ids is not None and self.x.k_segment_ids is not None:
            q_ids = self.q_block(self.x.q_segment_ids, i, 0)[None, :, None]
            k_ids = self.k_block(self.x.k_segment_ids, j)[None, None, :]
            mask &= q_ids.transpose(self.order) == k_ids.transpose(self.order)
        if self.x.mask is not None:
            mask &= self.scores_block(self.x.mask, i, j)
        return mask

    def logits(self, products: Float32[Array, "*scores"], i: Index, j: Index) -> Float32[Array, "*scores"]:
        """Scaled and biased, but neither capped nor masked."""
        logits = products * self.options.scale
        if self.x.bias is not None:
            logits = logits + self.scores_block(self.x.bias, i, j).astype(jnp.float32)
        return logits

    def capped(self, logits: Float32[Array, "*scores"]) -> Float32[Array, "*scores"]:
        cap = self.options.soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def keep(self, i: Index, j: Index) -> Bool[Array, "*scores"] | None:
        """The probabilities that dropout keeps; None if it keeps all."""
        if not self.options.dropout or self.x.seed is None:
            return None
        seed = self.x.seed[:, None, None].transpose(self.order)
        row, column = self._rows(i) + self.x.q_offset, self._columns(j) + self.x.k_offset
        return keep(seed, row, column, self.options.dropout)

    def scores_block(self, x: Array, i: Index, j: Index) -> Array:
        """A block of an array (group or 1, q_pos, k_pos), in the order of the scores."""
        block = lax.dynamic_slice(x, (0, i * self.q, j * self.k), (x.shape[0], self.q, self.k))
        return block.transpose(self.order)

    @property
    def _shift(self) -> Int32[Array, ""] | int:
        """How far the first query is ahead of the first key."""
        return self.x.q_offset - self.x.k_offset

    def _rows(self, i: Index) -> Int32[Array, "..."]:
        return i * self.q + jnp.arange(self.q, dtype=jnp.int32)[None, :, None].transpose(self.order)

    def _columns(self, j: Index) -> Int32[Array, "..."]:
        return j * self.k + jnp.arange(self.k, dtype=jnp.int32)[None, None, :].transpose(self.order)


def pad(x: Array, by: dict[int, int], fill: float = 0) -> Array:
    """x with `by[axis]` more elements at the end of each axis."""
    if not any(by.values()):
        return x
    return jnp.pad(x, [(0, by.get(axis, 0)) for axis in range(x.ndim)], constant_values=fill)


def _padding(length: int, block: int) -> int:
    """What is missing to whole blocks, of which there is at least one."""
    return max(-(-length // block), 1) * block - length


def dot(equation: str, a: Array, b: Array) -> Float32[Array, "..."]:
    """einsum of the operands in b's dtype, accumulated in float32."""
    return jnp.einsum(equation, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def keep_rows(x: Array, rows: Bool[Array, "*rows"]) -> Array:
    """x (*rows, columns) with other rows zero: a probability of 0 does not silence a NaN that it multiplies."""
    return jnp.where(rows[..., None], x, 0)
