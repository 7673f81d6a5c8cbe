# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Where the rows of each shard lie in the whole sequence, and which pairs of blocks a mask leaves something of.

A sequence is cut into as many slices as there are shards, and shard `i` holds slice `i` (contiguous); or into twice as
many, and shard `i` of `n` holds the slices `i` and `2n - 1 - i` (zigzag), so that under a causal mask all shards have
the same work. A slice on its shard is a *piece*.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from haliax_kernels.attention.contract import AttentionOptions

# Windows wider than any sequence are none; as int32 they would overflow.
_WIDEST = 2**30


@dataclass(frozen=True)
class Pieces:
    """How one sequence lies over its shards.

    Attributes:
        shards: the number of shards.
        rows: the rows on each of them.
        zigzag: whether each holds an early and a late slice.
    """

    shards: int
    rows: int
    zigzag: bool

    @property
    def count(self) -> int:
        """Pieces on each shard."""
        return 2 if self.zigzag else 1

    @property
    def size(self) -> int:
        """Rows of a piece."""
        return self.rows // self.count

    def start(self, piece: int, shard: Any) -> Any:
        """The position of a piece's first row; `shard` may be a traced index."""
        return (shard if piece == 0 else 2 * self.shards - 1 - shard) * self.size

    def local(self, piece: int) -> slice:
        """The rows of a piece on its shard."""
        return slice(piece * self.size, (piece + 1) * self.size)

    @property
    def order(self) -> np.ndarray:
        """For each stored slice, all shards one after the other, which slice of the sequence it is."""
        shards = np.arange(self.shards)
        return np.stack([shards, 2 * self.shards - 1 - shards], 1).ravel() if self.zigzag else shards


def visible(options: AttentionOptions, q_start: Any, q_rows: int, k_start: Any, k_rows: int) -> Any:
    """Whether a window leaves anything of a block; Python ints, NumPy arrays or traced scalars."""
    seen = (q_start == q_start) & (k_start == k_start)
    if options.right is not None and options.right < _WIDEST:
        seen &= k_start <= q_start + (q_rows - 1 + options.right)
    if options.left is not None and options.left < _WIDEST:
        seen &= k_start + (k_rows - 1) >= q_start - options.left
    return seen


@dataclass(frozen=True)
class Work:
    """What every shard has to compute at every step of a ring, known before anything runs.

    At step `hop` shard `i` sees the keys of shard `i - hop`.

    Attributes:
        q: how the queries lie.
        k: how the keys lie.
        seen: (hop, shard, query piece, key piece): whether the mask leaves anything of the pair.
        distance: likewise: the position of the first query less that of the first key.
        certain: False where the offset of the queries is known on the device only; `seen` is then all True.
    """

    q: Pieces
    k: Pieces
    seen: np.ndarray
    distance: np.ndarray
    certain: bool

    @classmethod
    def of(cls, options: AttentionOptions, q: Pieces, k: Pieces, q_offset: int | None) -> "Work":
        """The work under a window; `q_offset` is the position of the first query, None where it is not known."""
        shards = np.arange(q.shards)
        sources = (shards[None, :] - shards[:, None]) % q.shards
        starts_q = np.stack([q.start(a, shards) for a in range(q.count)], -1)[None, :, :, None] + (q_offset or 0)
        starts_k = np.stack([k.start(b, sources) for b in range(k.count)], -1)[:, :, None, :]
        seen = visible(options, starts_q, q.size, starts_k, k.size)
        return cls(
            q, k, seen if q_offset is not None else np.ones_like(seen), starts_q - starts_k, q_offset is not None
        )

    def needed(self, a: int, b: int, hops: range) -> str:
        """Whether a pair of pieces is computed at these steps: `always`, `never`, or `sometimes`."""
        seen = self.seen[hops.start : hops.stop, :, a, b]
        if seen.all():
            return "always" if self.certain else "sometimes"
        return "sometimes" if seen.any() else "never"

    def fixed_distance(self, a: int, b: int, hops: range) -> int | None:
        """The distance of a pair of pieces if it is the same on all shards at all these steps."""
        found = np.unique(self.distance[hops.start : hops.stop, :, a, b])
        return int(found[0]) if len(found) == 1 and self.certain else None

    @property
    def arms(self) -> tuple[int, int]:
        """How many steps the keys must travel onwards, and how many backwards, to be where they are seen."""
        shards = self.q.shards
        wanted = [hop for hop in range(1, shards) if self.seen[hop].any()]
        splits = [(0, [hop for hop in wanted if hop > 0])] + [(w, [v for v in wanted if v > w]) for w in wanted]
        return min(
            ((ahead, shards - min(rest, default=shards)) for ahead, rest in splits), key=lambda s: (sum(s), s[1])
        )
