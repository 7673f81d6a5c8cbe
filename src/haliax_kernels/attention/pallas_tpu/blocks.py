# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What forward and backward share: how a call is cut, its operands in the layouts of the kernels, and the logits.

A query block holds the same positions of several heads of the group, so that short sequences still fill the matrix
units. What there is one number of per query (logsumexp, segment id, ...) comes as rows: an array (group block, query
block, 1, rows), where a row is a position of a head. Rows need no padding to 128 lanes, which columns would.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.dropout import keep_of_row, row_hash
from haliax_kernels.attention.pallas_tpu.schedule import MASKED, SPECIAL, Tiles, k_block, q_block

LANES = 128
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
_EDGE_CHUNK = 256


@dataclass(frozen=True)
class Piece:
    """Keys `start` to `stop` of a key block; `masked` if the window or the length may hide some from some rows."""

    start: int
    stop: int
    masked: bool


@dataclass(frozen=True)
class Chunk:
    """Rows of a query block that are computed together: positions `start` to `stop` of heads `g` to `g_stop`."""

    g: int
    g_stop: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return (self.g_stop - self.g) * (self.stop - self.start)


@dataclass(frozen=True)
class Plan:
    """The static part of a kernel.

    Attributes:
        options: of the call.
        tiles: how positions are cut.
        group: number of query heads.
        heads: how many of them a query block holds; a divisor of `group`.
        dtype: of q, k and v.
        segmented: whether there are segment ids.
        mask_heads: the mask's first dimension; 0 if there is none.
        bias_heads: likewise the bias'.
        chunk: rows that are computed together, at most.
        piece: keys that are computed together, at most.
    """

    options: AttentionOptions
    tiles: Tiles
    group: int
    heads: int
    dtype: Any
    segmented: bool
    mask_heads: int
    bias_heads: int
    chunk: int
    piece: int

    @property
    def rows(self) -> int:
        return self.heads * self.tiles.q

    @property
    def head_blocks(self) -> int:
        return self.group // self.heads

    @property
    def filtered(self) -> bool:
        """Whether more than the window hides keys."""
        return self.segmented or self.mask_heads > 0

    @property
    def precision(self) -> lax.Precision:
        return lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT

    @cached_property
    def natural(self) -> bool:
        """Whether the scale can be folded into the base of the exponential: nothing comes between the two."""
        return self.options.soft_cap is None and self.bias_heads == 0

    def chunks(self, body: int) -> Iterator[Chunk]:
        """The rows and keys that a body computes; of a special pair only those that are visible."""
        t = self.tiles
        if t.q < LANES:
            ranges = [(0, self.heads, 0, t.q)]
        else:
            # Smaller ones follow the edge of what is visible more closely.
            largest = self.chunk if body < SPECIAL else min(self.chunk, _EDGE_CHUNK)
            size = max(s for s in range(LANES, max(largest, LANES) + 1, LANES) if t.q % s == 0)
            ranges = [(g, g + 1, s, s + size) for g in range(self.heads) for s in range(0, t.q, size)]
        for g, g_stop, start, stop in ranges:
            first, last = 0, t.k
            if body >= SPECIAL:
                shift, limit = t.special[body - SPECIAL]
                if t.left is not None:
                    first = max(0, start - t.left - shift) // LANES * LANES
                hi = limit if t.right is None else min(limit, stop + t.right - shift)
                last = -(-max(hi, 0) // LANES) * LANES
            pieces = [
                Piece(s, min(s + self.piece, last), self._masked(body, start, stop, s, min(s + self.piece, last)))
                for s in range(first, last, self.piece)
            ]
            if pieces:
                yield Chunk(g, g_stop, start, stop, tuple(pieces))

    def _masked(self, body: int, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        if body < SPECIAL:
            return body == MASKED
        shift, limit = self.tiles.special[body - SPECIAL]
        return (
            k_stop > limit
            or (self.tiles.right is not None and k_stop - 1 - q_start + shift > self.tiles.right)
            or (self.tiles.left is not None and k_start - (q_stop - 1) + shift < -self.tiles.left)
        )

    def head_range(self, heads: int, c: Chunk) -> slice:
        """The heads of a chunk in a mask or bias block; the first dimension of one that is shared is 1."""
        return slice(0, 1) if heads == 1 else slice(c.g, c.g_stop)


# --- operands -------------------------------------------------------------------------------------------------------


def pad(x: Array, axis: int, length: int, fill: float = 0) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill) if widths[axis][1] else x


def as_rows(plan: Plan, x: Array, fill: float = 0) -> Array:
    """(group, q_pos) to (group block, query block, 1, row)."""
    t = plan.tiles
    x = pad(x, 1, t.q_count * t.q, fill).reshape(plan.head_blocks, plan.heads, t.q_count, t.q)
    return x.swapaxes(1, 2).reshape(plan.head_blocks, t.q_count, 1, plan.rows)


def from_rows(plan: Plan, x: Array) -> Array:
    """The inverse of `as_rows`."""
    t = plan.tiles
    x = x.reshape(plan.head_blocks, t.q_count, plan.heads, t.q).swapaxes(1, 2)
    return x.reshape(plan.group, t.q_count * t.q)[:, : t.q_len]


def hide_outside_window(plan: Plan, x: AttentionOperands) -> tuple[Array, Array]:
    """k and v, zero where no query's window reaches: a probability of 0 does not silence a NaN that it multiplies."""
    t = plan.tiles
    k, v = x.k, x.v
    offset = t.offset if t.offset is not None else x.q_offset - x.k_offset
    first = 0 if t.left is None else offset - t.left
    stop = t.k_len if t.right is None else offset + t.q_len + t.right
    static = t.offset is not None
    if (t.left is None or (static and first <= 0)) and (t.right is None or (static and stop >= t.k_len)):
        return k, v
    j = jnp.arange(t.k_len)[:, None]
    seen = (j >= first) & (j < stop)
    return jnp.where(seen, k, 0), jnp.where(seen, v, 0)


@dataclass(frozen=True)
class Extras:
    """The operands that not every call has, with their block specs; `ref` finds them among a kernel's arguments."""

    names: tuple[str, ...]
    arrays: tuple[Array, ...]
    specs: tuple[pl.BlockSpec, ...]


def extras(plan: Plan, x: AttentionOperands) -> Extras:
    t = plan.tiles
    q_size, k_size = t.q_count * t.q, t.k_count * t.k
    found: list[tuple[str, Array, pl.BlockSpec]] = []
    if x.q_segment_ids is not None and x.k_segment_ids is not None:
        ids = pad(x.q_segment_ids.astype(jnp.int32)[None], 1, q_size).reshape(t.q_count, 1, t.q)
        ids = jnp.tile(ids, (1, 1, plan.heads))
        found.append(("q_ids", ids, pl.BlockSpec((None, 1, plan.rows), lambda g, s, p, *_: (q_block(p[s]), 0, 0))))
        ids = pad(x.k_segment_ids.astype(jnp.int32), 0, k_size).reshape(t.k_count, 1, t.k)
        found.append(("k_ids", ids, pl.BlockSpec((None, 1, t.k), lambda g, s, p, *_: (k_block(p[s]), 0, 0))))
    for name, array, heads in (("mask", x.mask, plan.mask_heads), ("bias", x.bias, plan.bias_heads)):
        if array is not None:
            array = array.astype(jnp.int8) if name == "mask" else array
            array = pad(pad(array, 1, q_size), 2, k_size)
            found.append((name, array, pair_spec(plan, heads)))
    if plan.options.dropout:
        assert x.seed is not None
        hashed = row_hash(x.seed[:, None], x.q_offset + jnp.arange(t.q_len, dtype=jnp.int32)[None])
        found.append(("rows_hash", as_rows(plan, hashed), row_spec(plan)))
    names, arrays, specs = zip(*found, strict=True) if found else ((), (), ())
    return Extras(names, arrays, specs)


def row_spec(plan: Plan) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, 1, plan.rows), lambda g, s, p, *_: (g, q_block(p[s]), 0, 0))


def q_spec(plan: Plan, size: int) -> pl.BlockSpec:
    return pl.BlockSpec((plan.heads, plan.tiles.q, size), lambda g, s, p, *_: (g, q_block(p[s]), 0))


def k_spec(plan: Plan, size: int) -> pl.BlockSpec:
    return pl.BlockSpec((plan.tiles.k, size), lambda g, s, p, *_: (k_block(p[s]), 0))


def pair_spec(plan: Plan, heads: int) -> pl.BlockSpec:
    return pl.BlockSpec(
        (1 if heads == 1 else plan.heads, plan.tiles.q, plan.tiles.k),
        lambda g, s, p, *_: (0 if heads == 1 else g, q_block(p[s]), k_block(p[s])),
    )


# --- in the kernels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """One step of a kernel: its references and where it stands.

    Attributes:
        plan: of the kernel.
        body: the number of the body that runs.
        refs: the operands of `extras` by name.
        q_index: which query block.
        k_index: which key block.
        offsets: positions of the first query and the first key, in scalar memory.
        keys_first: whether logits are (keys, rows), as in the backward, or (rows, keys).
    """

    plan: Plan
    body: int
    refs: dict[str, Any]
    q_index: Int32[Array, ""]
    k_index: Int32[Array, ""]
    offsets: Any
    keys_first: bool

    def _shape(self, c: Chunk, p: Piece) -> tuple[int, int]:
        keys = p.stop - p.start
        return (keys, c.rows) if self.keys_first else (c.rows, keys)

    def row(self, name: str, c: Chunk) -> Array:
        """What there is one number of per row, to broadcast against the logits."""
        start = c.g * self.plan.tiles.q + c.start
        x = self.refs[name][:, start : start + c.rows]
        return x if self.keys_first else column(x)

    def _k_ids(self, p: Piece) -> Array:
        x = self.refs["k_ids"][:, p.start : p.stop]
        return column(x) if self.keys_first else x

    def _iota(self, c: Chunk, p: Piece) -> tuple[Array, Array]:
        """Positions inside the blocks of each pair of query and key."""
        shape, axis = self._shape(c, p), 1 if self.keys_first else 0
        rows = lax.broadcasted_iota(jnp.int32, shape, axis)
        if c.g_stop - c.g > 1:
            rows = rows & (self.plan.tiles.q - 1)  # blocks of several heads are powers of 2
        return rows, lax.broadcasted_iota(jnp.int32, shape, 1 - axis)

    def pair(self, name: str, heads: int, c: Chunk, p: Piece) -> Float32[Array, "..."]:
        """A chunk of a mask or bias block, in the logits' shape."""
        x = self.refs[name][self.plan.head_range(heads, c), c.start : c.stop, p.start : p.stop].astype(jnp.float32)
        if heads == 1 and c.g_stop - c.g > 1:
            x = jnp.broadcast_to(x, (c.g_stop - c.g, *x.shape[1:]))
        x = x.reshape(c.rows, p.stop - p.start)
        return x.T if self.keys_first else x

    def mask(self, c: Chunk, p: Piece) -> Bool[Array, "..."] | None:
        """Which pairs are visible; None if all are."""
        t = self.plan.tiles
        parts = []
        if p.masked:
            rows, keys = self._iota(c, p)
            if self.body >= SPECIAL:
                shift, limit = t.special[self.body - SPECIAL]
            else:
                offset = t.offset if t.offset is not None else self.offsets[0] - self.offsets[1]
                shift = self.k_index * t.k - self.q_index * t.q - offset
                limit = t.k_len - self.k_index * t.k
            # Constants go to one side, where they are folded.
            shift = shift + p.start - c.start
            if t.right is not None:
                parts.append(keys - rows <= t.right - shift)
            if t.left is not None:
                parts.append(keys - rows >= -t.left - shift)
            if not isinstance(limit, int) or limit < p.stop:
                parts.append(keys < limit - p.start)
        if self.plan.segmented:
            parts.append(self.row("q_ids", c) == self._k_ids(p))
        if self.plan.mask_heads:
            parts.append(self.pair("mask", self.plan.mask_heads, c, p) != 0)
        mask = None
        for part in parts:
            mask = part if mask is None else mask & part
        return mask

    def logits(self, scores: Float32[Array, "..."], c: Chunk, p: Piece) -> tuple[Array, Array | None]:
        """Logits in base 2, unmasked, and what went into the tanh of the soft cap if there is one."""
        o = self.plan.options
        if self.plan.natural:
            return scores * (o.scale * LOG2_E), None
        s = scores * o.scale
        if self.plan.bias_heads:
            s = s + self.pair("bias", self.plan.bias_heads, c, p)
        if o.soft_cap is None:
            return s * LOG2_E, None
        ratio = s * (1 / o.soft_cap)
        return jnp.tanh(ratio) * (o.soft_cap * LOG2_E), ratio

    def kept(self, c: Chunk, p: Piece) -> Bool[Array, "..."]:
        """Which probabilities dropout keeps."""
        _, keys = self._iota(c, p)
        keys = keys + (self.offsets[1] + self.k_index * self.plan.tiles.k + p.start)
        return keep_of_row(self.row("rows_hash", c), keys, self.plan.options.dropout)


def column(x: Array) -> Array:
    """(1, n) to (n, 1)."""
    return jnp.broadcast_to(x, (8, x.shape[1])).T[:, :1]


def row(x: Float32[Array, "n lanes"]) -> Float32[Array, "1 n"]:
    """(n, LANES), the lanes all the same, to (1, n).

    Of each square the diagonal, by a sum over sublanes: the transpose would move 128 times what is wanted.
    """
    n = x.shape[0]
    if n % LANES:
        return x.T[:1]
    shape = (LANES, LANES)
    diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
    squares = [jnp.where(diagonal, x[i : i + LANES], 0.0).sum(0, keepdims=True) for i in range(0, n, LANES)]
    return jnp.concatenate(squares, 1)


def visible_keys(mask: Bool[Array, "..."], x: Float[Array, "keys size"], keys_first: bool) -> Array:
    """x with the keys that no row of the chunk sees zero: 0 times their NaN would be NaN."""
    seen = jnp.where(mask, 1.0, 0.0).max(1 if keys_first else 0, keepdims=True)
    seen = seen if keys_first else column(seen)
    return jnp.where(seen > 0, x, jnp.zeros_like(x))


def dot(plan: Plan, a: Array, b: Array, dims: tuple[int, int]) -> Float32[Array, "m n"]:
    """The product of two matrices over a dimension of each, accumulated in float32."""
    return lax.dot_general(
        a, b, (((dims[0],), (dims[1],)), ((), ())), precision=plan.precision, preferred_element_type=jnp.float32
    )


def compiler_params(semantics: Any, vmem: int | None, interpret: bool) -> Any:
    # TPU interpret mode fails on named semantics under jax.vmap.
    return pltpu.CompilerParams(dimension_semantics=None if interpret else semantics, vmem_limit_bytes=vmem)
