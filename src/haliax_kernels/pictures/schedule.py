# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What each shard of a ring computes at each step, as plain data.

The unit is one block: the queries of one shard by the keys of one shard. A zigzag ring computes quarters of it.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from haliax_kernels.attention.contract import AttentionOptions
from haliax_kernels.context.pieces import Pieces, Work
from haliax_kernels.ring_plan import RingPlan


@dataclass(frozen=True)
class RingStep:
    """One step of a ring.

    Attributes:
        hop: shard `i` has the keys of shard `i - hop`.
        whole: for each shard, the blocks of which the mask leaves everything.
        cut: for each shard, the blocks of which the mask leaves a part.
    """

    hop: int
    whole: tuple[float, ...]
    cut: tuple[float, ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """For each shard, how long it computes; a block that is cut counts whole."""
        return tuple(a + b for a, b in zip(self.whole, self.cut, strict=True))

    @property
    def lasts(self) -> float:
        """How long the slowest shard computes."""
        return max(self.busy)


@dataclass(frozen=True)
class RingSchedule:
    """The steps of a ring, in the order in which they run.

    Attributes:
        shards: the number of shards.
        zigzag: whether each shard holds an early and a late part of the sequence.
        steps: the steps.
    """

    shards: int
    zigzag: bool
    steps: tuple[RingStep, ...]

    @property
    def blocks(self) -> float:
        """The blocks that all shards compute together."""
        return sum(sum(step.busy) for step in self.steps)

    @property
    def critical_path(self) -> float:
        """How long the ring takes: the slowest shard's blocks of each step, added up."""
        return sum(step.lasts for step in self.steps)

    @property
    def idle(self) -> float:
        """The share of the devices' time in which they wait for others."""
        time = self.shards * self.critical_path
        return 1 - self.blocks / time if time else 0.0


def ring_schedule(ring: RingPlan) -> RingSchedule:
    """What each shard computes at each step: the blocks of which the window leaves anything.

    Where the position of the first query is known on the device only, that is every block.
    """
    q, k = (Pieces(ring.shards, rows, ring.zigzag) for rows in (ring.q_rows, ring.k_rows))
    work = Work.of(AttentionOptions(1.0, left=ring.left, right=ring.right), q, k, ring.q_offset)
    whole = work.seen.copy()
    if work.certain:
        if ring.right is not None:
            whole &= k.size - 1 - work.distance <= ring.right
        if ring.left is not None:
            whole &= work.distance + q.size - 1 <= ring.left
    unit = 1 / (q.count * k.count)

    def of(blocks: np.ndarray, hop: int) -> tuple[float, ...]:
        return tuple((blocks[hop].sum((1, 2)) * unit).tolist())

    # The keys' own shard first; then they travel onwards, and then, where that is nearer, backwards.
    ahead, behind = work.arms
    hops = [*range(ahead + 1), *(ring.shards - hop for hop in range(1, behind + 1))]
    steps = tuple(RingStep(hop, of(whole, hop), of(work.seen & ~whole, hop)) for hop in hops)
    return RingSchedule(ring.shards, ring.zigzag, steps)


def both_layouts(ring: RingPlan) -> tuple[RingPlan, ...]:
    """The ring with contiguous shards and with zigzag ones; without the latter where rows cannot be halved."""
    halves = ring.q_rows % 2 == 0 and ring.k_rows % 2 == 0
    return tuple(dataclasses.replace(ring, zigzag=z) for z in ((False, True) if halves else (False,)))
