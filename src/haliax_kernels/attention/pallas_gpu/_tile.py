# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the kernels share: which blocks are seen, and one tile of logits with all that hides or changes them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from haliax_kernels.attention import dropout
from haliax_kernels.attention.pallas_gpu._problem import Cut, Problem
from haliax_kernels.attention.soft_cap import tanh_slope
from haliax_kernels.pallas_triton import Index, positions, whole_block

LOG2_E = 1.4426950408889634
"""The hardware has an exponential to base 2 only."""

T = TypeVar("T")
Range = tuple[Index, Index, bool]


def dot(a: Float[Array, "..."], b: Float[Array, "..."], contract: tuple[int, int] = (1, 0)) -> Float32[Array, "m n"]:
    """The product over one dimension of each, accumulated in float32. float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(b.dtype), b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def load(ref: Any, head: Index | None, start: Index, count: int, keep: Bool[Array, " count"] | None) -> Array:
    """`count` entries of a vector from `start`; 0 where `keep` says no. Nothing outside the array may be kept."""
    at = ref.at[pl.ds(start, count)] if head is None else ref.at[head, pl.ds(start, count)]
    return plgpu.load(at) if keep is None else plgpu.load(at, mask=keep, other=0)


def load_rows(
    ref: Any, head: Index | None, start: Index, count: int, size: int, keep: Bool[Array, " count"] | None
) -> Float[Array, "count padded_size"]:
    """`count` rows of a matrix from `start`, padded with zeros; 0 where `keep` says no."""
    width = whole_block(size)
    mask = None if keep is None else keep[:, None]
    if width != size:
        columns = (positions(0, width) < size)[None, :]
        mask = columns if mask is None else mask & columns
    slices = (pl.ds(start, count), pl.ds(0, width))
    at = ref.at[slices] if head is None else ref.at[(head, *slices)]
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=jnp.broadcast_to(mask, (count, width)), other=0)


def store(ref: Any, head: Index, start: Index, value: Float[Array, " count"], length: int) -> None:
    """Write the entries that lie within `length`."""
    count = value.shape[0]
    plgpu.store(ref.at[head, pl.ds(start, count)], value.astype(ref.dtype), mask=positions(start, count) < length)


def store_rows(
    ref: Any, head: Index | None, start: Index, value: Float[Array, "count padded_size"], size: int, length: int
) -> None:
    """Write the rows that lie within `length`, without their padding."""
    count, width = value.shape
    keep = positions(start, count) < length
    mask = jnp.broadcast_to(keep[:, None] & (positions(0, width) < size)[None, :], value.shape)
    slices = (pl.ds(start, count), pl.ds(0, width))
    at = ref.at[slices] if head is None else ref.at[(head, *slices)]
    plgpu.store(at, value.astype(ref.dtype), mask=mask)


def store_block(
    ref: Any, head: Index, starts: tuple[Index, Index], value: Float[Array, "q k"], lengths: tuple[int, int]
) -> None:
    """Write the entries that lie within both lengths."""
    (q_start, k_start), (q, k) = starts, value.shape
    rows, columns = positions(q_start, q) < lengths[0], positions(k_start, k) < lengths[1]
    mask = jnp.broadcast_to(rows[:, None] & columns[None, :], value.shape)
    plgpu.store(ref.at[head, pl.ds(q_start, q), pl.ds(k_start, k)], value, mask=mask)


def keep_rows(x: Float[Array, "rows columns"], rows: Bool[Array, " rows"]) -> Float[Array, "rows columns"]:
    """x with other rows zero: a probability of 0 does not silence a NaN that it multiplies."""
    return jnp.where(rows[:, None], x, 0)


def fold(ranges: Sequence[Range], body: Callable[..., T], state: T) -> T:
    """Fold `body(j, state, masked=...)` over the blocks of the ranges."""
    for begin, end, masked in ranges:
        if isinstance(begin, int) and isinstance(end, int):
            if begin >= end:
                continue
            begin, end = np.int32(begin), np.int32(end)  # int64 under x64 else
        state = lax.fori_loop(begin, end, functools.partial(body, masked=masked), state)
    return state


@dataclass(frozen=True)
class Seen:
    """What a block of one sequence sees of the other one, by the window alone: `begin <= position < end`.

    All of the block sees `whole_begin <= position < whole_end`. The same holds from queries to keys and back.
    """

    begin: Index
    end: Index
    whole_begin: Index
    whole_end: Index
    bounded: tuple[bool, bool]

    @staticmethod
    def by(first: Index, count: Index, shift: Index, back: int | None, ahead: int | None, length: int) -> "Seen":
        """What `count` positions from `first` see, each `p` from `p + shift - back` to `p + shift + ahead`."""
        begin = whole_begin = 0
        end = whole_end = length
        # Subtracted within the comparison, lest a wide window overflow; and so the results are not negative.
        if back is not None:
            begin = jnp.maximum(first + shift, back) - back
            whole_begin = jnp.maximum(first + shift + (count - 1), back) - back
        if ahead is not None:
            end = jnp.maximum(jnp.minimum(first + shift + count, length - ahead) + ahead, 0)
            whole_end = jnp.maximum(jnp.minimum(first + shift + 1, length - ahead) + ahead, 0)
        return Seen(begin, end, whole_begin, whole_end, (back is not None, ahead is not None))

    def ranges(self, block: int, length: int, opaque: bool) -> list[Range]:
        """The ranges of blocks to visit; the last entry says whether something of them may be hidden."""
        first, last = _div(self.begin, block), _div(_plus(self.end, block - 1), block)
        if opaque:
            return [(first, last, True)]
        whole_first = _clip(_div(_plus(self.whole_begin, block - 1), block), first, last)
        whole_last = _clip(_div(self.whole_end, block), whole_first, last)
        back, ahead = self.bounded
        ranges: list[Range] = [(whole_first, whole_last, False)]
        if back:
            ranges.insert(0, (first, whole_first, True))
        if ahead or length % block:
            ranges.append((whole_last, last, True))
        return ranges

    def holds(self, position: Int32[Array, " n"]) -> Bool[Array, " n"]:
        """Whether something of the block sees each position."""
        return (position >= self.begin) & (position < self.end)


def _div(x: Index, by: int) -> Index:
    # `//` of traced integers minds the sign, which x does not have.
    return x // by if isinstance(x, int) else lax.div(x, np.int32(by))


def _plus(x: Index, y: int) -> Index:
    return x + y


def _clip(x: Index, low: Index, high: Index) -> Index:
    if isinstance(x, int) and isinstance(low, int) and isinstance(high, int):
        return min(max(x, low), high)
    return jnp.minimum(jnp.maximum(x, low), high)


@dataclass(frozen=True)
class Tile:
    """The logits of one block of queries and one of keys; as (q, k), or as (k, q) where `keys_first`."""

    problem: Problem
    cut: Cut
    refs: dict[str, Any]
    offsets: tuple[Index, Index]
    head: Index
    q_start: Index
    k_start: Index
    keys_first: bool = False

    @property
    def q_axis(self) -> int:
        return 1 if self.keys_first else 0

    def along_q(self, x: Array) -> Array:
        """A vector of one entry per query, to broadcast against the tile."""
        return x[None, :] if self.keys_first else x[:, None]

    def along_k(self, x: Array) -> Array:
        return x[:, None] if self.keys_first else x[None, :]

    @property
    def q_index(self) -> Int32[Array, " q"]:
        return positions(self.q_start, self.cut.q)

    @property
    def k_index(self) -> Int32[Array, " k"]:
        return positions(self.k_start, self.cut.k)

    def q_inside(self) -> Bool[Array, " q"] | None:
        """Which queries there are; None where the block is full."""
        return None if self.problem.q_len % self.cut.q == 0 else self.q_index < self.problem.q_len

    def k_inside(self) -> Bool[Array, " k"] | None:
        return None if self.problem.k_len % self.cut.k == 0 else self.k_index < self.problem.k_len

    def logits(
        self, q: Float[Array, "q size"], k: Float[Array, "k size"]
    ) -> tuple[Float32[Array, "..."], Float32[Array, "..."] | None]:
        """The logits times `unit`, and the derivative of the soft cap or None."""
        options, unit = self.problem.options, unit_of(self.problem)
        s = dot(k, q, (1, 1)) if self.keys_first else dot(q, k, (1, 1))
        if not self.problem.biased and options.soft_cap is None:
            return s * (options.scale * unit), None
        s = s * options.scale
        if self.problem.biased:
            s = s + self._block("bias").astype(jnp.float32)
        if options.soft_cap is None:
            return s, None
        s = s / options.soft_cap
        return jnp.tanh(s) * (options.soft_cap * unit), tanh_slope(s)

    def mask(self) -> Bool[Array, "..."]:
        """What is seen."""
        problem = self.problem
        q, k = self.along_q(self.q_index), self.along_k(self.k_index)
        parts = []
        if problem.left is not None or problem.right is not None:
            # The distance, not the window's ends: it cannot overflow.
            distance = k - (q + (self.offsets[0] - self.offsets[1]))
            if problem.left is not None:
                parts.append(distance >= -problem.left)
            if problem.right is not None:
                parts.append(distance <= problem.right)
        q_inside, k_inside = self.q_inside(), self.k_inside()
        if q_inside is not None:
            parts.append(self.along_q(q_inside))
        if k_inside is not None:
            parts.append(self.along_k(k_inside))
        if problem.segmented:
            q_ids = load(self.refs["q_segment_ids"], None, self.q_start, self.cut.q, q_inside)
            k_ids = load(self.refs["k_segment_ids"], None, self.k_start, self.cut.k, k_inside)
            parts.append(self.along_q(q_ids) == self.along_k(k_ids))
        if problem.masked:
            parts.append(self._block("mask"))
        shape = (self.cut.k, self.cut.q) if self.keys_first else (self.cut.q, self.cut.k)
        seen = functools.reduce(jnp.logical_and, parts) if parts else jnp.ones((), bool)
        return jnp.broadcast_to(seen, shape)

    def keep(self) -> Bool[Array, "..."]:
        """Which probabilities dropout keeps."""
        return dropout.keep(
            self.refs["seed"][self.head],
            self.along_q(self.q_index + self.offsets[0]),
            self.along_k(self.k_index + self.offsets[1]),
            self.problem.options.dropout,
        )

    def some(self, mask: Bool[Array, "..."], axis: int) -> Bool[Array, " n"]:
        """`any`, which Pallas does not lower for Triton."""
        return jnp.max(mask.astype(jnp.int32), axis) > 0

    def _block(self, name: str) -> Array:
        ref = self.refs[name]
        slices = (pl.ds(self.q_start, self.cut.q), pl.ds(self.k_start, self.cut.k))
        at = ref.at[slices] if len(ref.shape) == 2 else ref.at[(self.head, *slices)]
        inside = [x for x in (self._column(self.q_inside()), self._row(self.k_inside())) if x is not None]
        if inside:
            mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, inside), (self.cut.q, self.cut.k))
            block = plgpu.load(at, mask=mask, other=False if name == "mask" else 0)
        else:
            block = plgpu.load(at)
        return block.T if self.keys_first else block

    @staticmethod
    def _column(x: Array | None) -> Array | None:
        return None if x is None else x[:, None]

    @staticmethod
    def _row(x: Array | None) -> Array | None:
        return None if x is None else x[None, :]


def unit_of(problem: Problem) -> float:
    """What logits are kept times: log2(e), so that `exp2` needs no further product.

    A bias may be so large that its product overflows or, fused with the subtraction of the largest and thus not
    rounded as that is, leaves a difference: -1e9 and the least float are in use as masks. There it is 1.
    """
    return 1.0 if problem.biased else LOG2_E


def exp(problem: Problem, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """The exponential of differences of logits that are kept times `unit_of`."""
    return jnp.exp2(x * LOG2_E if problem.biased else x)


def offsets(problem: Problem, refs: dict[str, Any]) -> tuple[Index, Index]:
    """The positions of the first query and key."""
    if problem.offsets is not None:
        return problem.offsets
    return refs["offsets"][0], refs["offsets"][1]


def seen_keys(problem: Problem, cut: Cut, offsets: tuple[Index, Index], q_start: Index) -> Seen:
    """What a block of queries sees."""
    count = _count(q_start, cut.q, problem.q_len)
    return Seen.by(q_start, count, offsets[0] - offsets[1], problem.left, problem.right, problem.k_len)


def seeing_queries(problem: Problem, cut: Cut, offsets: tuple[Index, Index], k_start: Index) -> Seen:
    """What sees a block of keys."""
    count = _count(k_start, cut.k, problem.k_len)
    return Seen.by(k_start, count, offsets[1] - offsets[0], problem.right, problem.left, problem.q_len)


def _count(start: Index, block: int, length: int) -> Index:
    """How many positions a block has: what only those past the end would see may hold NaN."""
    return block if length % block == 0 else jnp.minimum(length - start, block)
