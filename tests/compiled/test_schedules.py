# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Cycles counted in the TPU compiler's schedules: how they grow with what there is to compute."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from haliax_kernels.compiled.schedules import UnreadableScheduleError, parse

# Two bundles, a loop of 12 turns around a condition, one bundle; branches have four bundles after them.
SCHEDULE = """\
     0   :  { start }
   0x1   :  { s0 = smov 0 }
   0x2 LB: > { Start region 1 }
   0x3   : >{ sbr.rel (%p1) target = $region4 }
   0x4   : >{ }
   0x5   : >{ }
   0x6   : >{ }
   0x7   : >{ }
   0x8   : >>{ v1 = vmatmul }
   0x9   : >>{ v2 = vmatmul }
   0xa   : >{ Start region 4 }
   0xb   : >{ p2 = scmp.ge.s32.totalorder %s3, 12 /* loop exit test */ }
   0xc   : >{ sbr.rel (!%p2) target = $region1 }
   0xd   : >{ }
   0xe   : >{ }
   0xf   : >{ }
  0x10   : >{ }
  0x11   :  { end }
"""


def test_loops_and_conditions():
    root = parse(SCHEDULE)
    (loop,) = root.inner
    (condition,) = loop.inner
    assert (loop.kind, loop.start, loop.end, loop.trips) == ("loop", 2, 16, 12)
    assert (condition.kind, condition.start, condition.end) == ("condition", 8, 9)
    assert (root.own, loop.own, condition.own) == (3, 13, 2)


def test_a_loop_of_unknown_length():
    with pytest.raises(UnreadableScheduleError, match="not a constant"):
        parse(SCHEDULE.replace("%s3, 12", "%s3, %s4"))


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_cycles_of_attention():
    script = Path(__file__).with_name("_schedules.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {}
    parts = next(line["kernels"] for line in lines if line["case"] == "gradient 8192")
    for line in lines:
        if line["kernels"] is parts:
            continue
        ((name, runs, cycles, exact),) = line["kernels"]
        assert name == "attention_forward"
        found[line["case"]] = runs, cycles, exact
    runs, base, exact = found["causal 2048"]
    assert runs == 1 and exact
    # By the number of blocks that the mask shows: more than for half of the square, less than for all of it.
    assert found["causal 4096"][2] and 3 * base < found["causal 4096"][1] < 4 * base
    assert found["full 2048"][2] and 1.2 * base < found["full 2048"][1] < 2 * base
    assert found["4 heads"][2] and 1.8 * base < found["4 heads"][1] < 2.1 * base
    # In a loop the compiler schedules what is around the grid's loop in another way.
    runs, cycles, exact = found["5 layers"]
    assert (runs, exact) == (5, True) and 0.9 * base < cycles < 1.1 * base
    # A kernel for three quarters of the keys, and the same code for the last quarter, which few queries see: 27 of its
    # blocks are whole and 6 cut, and 1 and 2.
    assert all(exact for *_, exact in parts)
    most, forward, least = (cycles for _, _, cycles, _ in parts)
    assert [name for name, *_ in parts] == ["attention_backward", "attention_forward", "attention_backward"]
    assert most > 1.5 * forward and 8 * least < most < 14 * least
    # An offset that only the run knows: as if every block were visible.
    _, most, exact = found["an offset"]
    assert not exact and base < most < 2.5 * found["full 2048"][1]
