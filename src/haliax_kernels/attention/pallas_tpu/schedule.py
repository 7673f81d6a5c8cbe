# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Which pairs of a query block and a key block a kernel visits, in what order, and what it does there.

A kernel's grid is a list of steps, in arrays that are prefetched to scalar memory. With offsets known when the kernel
is built only visible pairs are in the list; with traced offsets the list has room for as many as there may be, and
what is left over repeats the last pair, so that nothing is loaded for it.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

# What is done at a step; more numbers from SPECIAL on are the entries of `Tiles.special`.
NOTHING, WHOLE, MASKED, SPECIAL = 0, 1, 2, 3
# Bits of a step's flags, above the four of the body's number.
LAST, OPENS, CLOSES = 16, 32, 64
_FLAG_BITS = 8
# Each is a copy of the kernel's body: more would be slow to compile and to load.
_MAX_SPECIAL = 4
# Steps in scalar memory.
MAX_STEPS = 1 << 15


@dataclass(frozen=True)
class Tiles:
    """How queries and keys are cut, and what of it is visible.

    Attributes:
        q_len: number of query positions.
        k_len: number of key positions.
        q: query positions per block.
        k: key positions per block.
        left: as in `AttentionOptions`.
        right: as in `AttentionOptions`.
        offset: the position of the first query less that of the first key; None where it is traced.
    """

    q_len: int
    k_len: int
    q: int
    k: int
    left: int | None
    right: int | None
    offset: int | None

    @property
    def q_count(self) -> int:
        return -(-self.q_len // self.q)

    @property
    def k_count(self) -> int:
        return -(-self.k_len // self.k)

    @cached_property
    def special(self) -> tuple[tuple[int, int], ...]:
        """Kinds of partly visible pairs that have a kernel body of their own: `(shift, limit)`.

        With `i` and `j` counted inside the blocks, the query sees the key if `-left <= j - i + shift <= right` and
        `j < limit`. For traced offsets these are the pairs that are partly visible where the offsets are equal, or
        differ by whole blocks: most often they do.
        """
        visible, whole, shift, limit = self._kinds(np, 0 if self.offset is None else self.offset)
        partial = visible & ~whole
        kinds, counts = np.unique(np.stack([shift[partial], limit[partial]], -1), axis=0, return_counts=True)
        commonest = np.argsort(-counts, kind="stable")[:_MAX_SPECIAL]
        return tuple((int(kinds[i, 0]), int(kinds[i, 1])) for i in sorted(commonest))

    def _kinds(self, xp: Any, offset: Any) -> tuple[Any, Any, Any, Any]:
        """For each pair of blocks: whether any and whether all of it is visible, and its `(shift, limit)`."""
        i, j = xp.arange(self.q_count)[:, None], xp.arange(self.k_count)[None, :]
        q_first = i * self.q + offset
        q_last = xp.minimum((i + 1) * self.q, self.q_len) - 1 + offset
        k_first = j * self.k
        limit = xp.minimum(self.k_len - k_first, self.k)
        visible = xp.ones((self.q_count, self.k_count), bool)
        whole = xp.broadcast_to(limit == self.k, visible.shape)
        if self.right is not None:
            visible = visible & (k_first <= q_last + self.right)
            whole = whole & (k_first + self.k - 1 <= q_first + self.right)
        if self.left is not None:
            visible = visible & (k_first + limit - 1 >= q_first - self.left)
            whole = whole & (k_first >= q_last - self.left)
        return visible, whole, xp.broadcast_to(k_first - q_first, visible.shape), xp.broadcast_to(limit, visible.shape)

    @property
    def _room(self) -> int:
        """How many steps a list for traced offsets may need."""
        per_row = self.k_count
        if self.left is not None and self.right is not None:
            per_row = min(per_row, (self.q + self.left + self.right - 1) // self.k + 2)
        return min(self.q_count * self.k_count, self.q_count * per_row + self.k_count)

    def steps(self, offset: Int32[Array, ""] | int, every: bool = False) -> "Steps":
        """The list for these offsets.

        Each query block and each key block is in it, if only with NOTHING to do there but to write zeros.

        Args:
            offset: `offset`, or its traced value.
            every: put every pair in the list, also those where nothing is visible.
        """
        xp: Any = np if self.offset is not None else jnp
        visible, whole, shift, limit = self._kinds(xp, offset)
        body = xp.where(visible, xp.where(whole, WHOLE, MASKED), NOTHING)
        for n, (s, m) in enumerate(self.special):
            body = xp.where(visible & ~whole & (shift == s) & (limit == m), SPECIAL + n, body)
        # A row without anything takes its first pair, a column its last.
        i, j = xp.arange(self.q_count)[:, None], xp.arange(self.k_count)[None, :]
        listed = visible | (~visible.any(1, keepdims=True) & (j == 0))
        listed = listed | (~listed.any(0, keepdims=True) & (i == self.q_count - 1))
        listed = (listed | every).reshape(-1)
        count = listed.sum()
        room = int(count) if xp is np else (self.q_count * self.k_count if every else self._room)
        order = xp.argsort(~listed, stable=True)[:room]
        t = xp.arange(room)
        real = t < count
        pair = order[xp.minimum(t, count - 1)]
        q, k = pair // self.k_count, pair % self.k_count
        body = xp.where(real, body.reshape(-1)[pair], NOTHING)
        end = xp.ones(1, bool)
        new_row = xp.concatenate([end, q[1:] != q[:-1]])
        last = xp.where(t == count - 1, True, xp.concatenate([new_row[1:], end]) & (t < count - 1))
        opens = xp.zeros(room, bool)
        closes = xp.zeros(room, bool)
        big = xp.full(self.k_count, room)
        if xp is np:
            first_use, last_use = big.copy(), np.full(self.k_count, -1)
            np.minimum.at(first_use, k, t)
            np.maximum.at(last_use, k, np.where(real, t, -1))
            opens[first_use], closes[last_use] = True, True
            closing = np.where(closes, t, room)
            closing = np.minimum.accumulate(closing[::-1])[::-1]
        else:
            first_use, last_use = big.at[k].min(t), xp.full(self.k_count, -1).at[k].max(xp.where(real, t, -1))
            opens, closes = opens.at[first_use].set(True), closes.at[last_use].set(True)
            closing = lax.cummin(xp.where(closes, t, room), reverse=True)
        # After the last key block is written its window stays where it is.
        k_out = k[xp.minimum(closing, last_use.max())]
        flags = body + LAST * last + OPENS * opens + CLOSES * closes
        pairs = xp.asarray(q + (k << 16), dtype="int32")
        return Steps(pairs, xp.asarray(flags + (k_out << _FLAG_BITS), dtype="int32"), self)


@dataclass(frozen=True)
class Steps:
    """A list of steps, as two words for each.

    Attributes:
        pairs: the query block in the lower half, the key block in the upper one.
        flags: the body's number, LAST of a query block, OPENS and CLOSES of a key block; above them the key
            block that closes next.
        tiles: what the list is of.
    """

    pairs: Int32[Array, " steps"]
    flags: Int32[Array, " steps"]
    tiles: Tiles

    def __len__(self) -> int:
        return self.pairs.shape[0]

    @property
    def bodies(self) -> tuple[int, ...]:
        """The numbers of the bodies that may be needed."""
        if self.tiles.offset is None:
            return (WHOLE, MASKED, *range(SPECIAL, SPECIAL + len(self.tiles.special)))
        return tuple(sorted({int(x) & 15 for x in np.asarray(self.flags)} - {NOTHING}))

    def branch_runs(self, head_blocks: int, backward: bool) -> list[int | None]:
        """How often the branches of a kernel without a bias run, in the program's order; None for the bodies where
        offsets are traced: at each step at most one of them runs."""
        bodies: list[int | None] = [None] * len(self.bodies)
        if self.tiles.offset is not None:
            counts = Counter(int(flags) & 15 for flags in np.asarray(self.flags))
            bodies = [head_blocks * counts[body] for body in self.bodies]
        t = self.tiles
        # Where a kernel has a single step, being the first one is no condition.
        runs: list[int | None] = [head_blocks] if len(self) > 1 else []
        if backward:
            return [*runs, t.k_count, *bodies, head_blocks * t.q_count, t.k_count]
        return [*runs, *bodies, head_blocks * t.q_count]

    def metadata(self, head_blocks: int, backward: bool, elements: int) -> dict[str, str]:
        """What `compiled.kernels` reads in a compiled program, to count the kernel's cycles.

        Args:
            head_blocks: in one call.
            backward: whether it is the backward kernel.
            elements: of the kernel's first result in one call; a `vmap` makes it larger.
        """
        return {
            "branch_runs": " ".join("*" if n is None else str(n) for n in self.branch_runs(head_blocks, backward)),
            "grid_steps": str(head_blocks * len(self)),
            "elements": str(elements),
        }


def q_block(pair: Int32[Array, ""]) -> Int32[Array, ""]:
    return pair & 0xFFFF


def k_block(pair: Int32[Array, ""]) -> Int32[Array, ""]:
    return lax.shift_right_logical(pair, 16)


def closing_block(flags: Int32[Array, ""]) -> Int32[Array, ""]:
    return lax.shift_right_logical(flags, _FLAG_BITS)
