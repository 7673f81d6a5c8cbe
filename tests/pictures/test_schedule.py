# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the shards of a ring compute at each step, against the mask itself and the benchmark's critical path."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haliax_kernels.context.pieces import Pieces
from haliax_kernels.pictures.schedule import RingStep, both_layouts, ring_schedule
from haliax_kernels.ring_plan import RingPlan
from support import load_benchmark


def causal(shards, zigzag, rows=8, **rest):
    return RingPlan(("context",), shards, zigzag, rows, rows, right=0, **rest)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_a_causal_mask(n):
    contiguous, zigzag = (ring_schedule(causal(n, z)) for z in (False, True))
    # Pairs of slices on and below the diagonal; zigzag's slices are half as long.
    assert contiguous.blocks == n * (n + 1) / 2
    assert zigzag.blocks == 2 * n * (2 * n + 1) / 2 / 4
    assert sum(sum(step.cut) for step in contiguous.steps) == n
    assert sum(sum(step.cut) for step in zigzag.steps) == 2 * n / 4
    assert contiguous.critical_path == n and zigzag.critical_path == (2 * n + 1) / 4
    assert contiguous.idle == pytest.approx((n - 1) / (2 * n)) and zigzag.idle == 0
    assert [step.hop for step in contiguous.steps] == [*range(n)]


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("zigzag", [False, True])
def test_the_benchmark_says_the_same(n, zigzag):
    assert ring_schedule(causal(n, zigzag)).critical_path == load_benchmark("ring").critical_path(n, zigzag)


def test_two_shards_step_by_step():
    assert ring_schedule(causal(2, False)).steps == (RingStep(0, (0, 0), (1, 1)), RingStep(1, (0, 1), (0, 0)))
    quarter, half = 0.25, 0.5
    assert ring_schedule(causal(2, True)).steps == (
        RingStep(0, (quarter, quarter), (half, half)),
        RingStep(1, (half, half), (0, 0)),
    )


@settings(max_examples=200, deadline=None)
@given(
    shards=st.integers(2, 6),
    zigzag=st.booleans(),
    rows=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    left=st.none() | st.integers(0, 20),
    right=st.none() | st.integers(0, 20),
)
def test_blocks_are_those_of_the_mask(shards, zigzag, rows, left, right):
    """Counted entry by entry: a block is whole where the mask leaves all of it, cut where it leaves some."""
    q_rows, k_rows = (2 * n for n in rows)
    ring = RingPlan(("context",), shards, zigzag, q_rows, k_rows, left, right)
    i, j = np.arange(shards * q_rows)[:, None], np.arange(shards * k_rows)[None, :]
    mask = np.ones((i.size, j.size), bool)
    mask &= True if right is None else j <= i + right
    mask &= True if left is None else j >= i - left
    q, k = (Pieces(shards, n, zigzag) for n in (q_rows, k_rows))
    schedule = ring_schedule(ring)
    steps = {step.hop: step for step in schedule.steps}
    for hop in range(shards):
        for shard in range(shards):
            whole = cut = 0
            for a in range(q.count):
                for b in range(k.count):
                    first_q, first_k = q.start(a, shard), k.start(b, (shard - hop) % shards)
                    block = mask[first_q : first_q + q.size, first_k : first_k + k.size]
                    whole += bool(block.all())
                    cut += bool(block.any() and not block.all())
            unit = 1 / q.count**2
            # Steps that are left out have nothing to compute.
            found = (steps[hop].whole[shard], steps[hop].cut[shard]) if hop in steps else (0, 0)
            assert found == (whole * unit, cut * unit)


def test_an_offset_that_only_the_device_knows():
    schedule = ring_schedule(causal(4, False, q_offset=None))
    assert schedule.blocks == 16 and schedule.idle == 0
    assert all(step.cut == (0, 0, 0, 0) for step in schedule.steps)


def test_a_window_both_ways_goes_both_ways():
    ring = RingPlan(("context",), 8, False, 8, 8, left=8, right=8)
    assert [step.hop for step in ring_schedule(ring).steps] == [0, 1, 7]


def test_rows_that_cannot_be_halved_have_no_zigzag():
    assert [r.zigzag for r in both_layouts(causal(4, False, rows=8))] == [False, True]
    assert [r.zigzag for r in both_layouts(causal(4, False, rows=7))] == [False]
