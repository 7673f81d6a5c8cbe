# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Cycles of the Pallas kernels of a TPU program, counted in the schedules that the compiler writes down.

The PyPI package libtpu holds the TPU compiler, which can write down the final schedule of a kernel: bundles of
instructions, one a cycle when nothing stalls. Counted are a kernel's bundles times how often they run: the loop over
its grid, the loops inside, and the bodies under a condition. What the schedule does not show, waits for memory and for
full matrix units, is not in the figures.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class UnreadableScheduleError(ValueError):
    """What runs cannot be told from the schedule."""


@dataclass
class Body:
    """Bundles `start` to `end`: a kernel, a loop, or what runs under a condition."""

    kind: str
    start: int
    end: int
    trips: int = 1
    inner: list["Body"] = field(default_factory=list)

    def insert(self, other: "Body") -> None:
        for body in self.inner:
            if body.start <= other.start and other.end <= body.end:
                return body.insert(other)
        self.inner.append(other)

    @property
    def bundles(self) -> int:
        return self.end - self.start + 1

    @property
    def own(self) -> int:
        return self.bundles - sum(body.bundles for body in self.inner)


@dataclass(frozen=True)
class KernelSchedule:
    """The schedule of one kernel.

    Attributes:
        name: that of its instruction in the compiled program.
        root: its bundles.
        mxu: for each bundle, what the matrix units do in it.
    """

    name: str
    root: Body
    mxu: list[int]

    def multiplies(self, body: Body) -> bool:
        """Whether a body uses the matrix units."""
        return any(self.mxu[body.start : body.end + 1])

    def at_most(self, body: Body | None = None) -> float:
        """Cycles of one run, every condition taken."""
        body = body or self.root
        return float(body.own) + sum(b.trips * self.at_most(b) for b in body.inner)

    def by_runs(self, runs: Sequence[int | None], steps: int, calls: int) -> float:
        """Cycles of one run in which the grid's loop takes its branches so often.

        Args:
            runs: how often each branch runs in one call, in the program's order. At most one of those with None runs
                in a step; counted is the longest of them in each.
            steps: of the grid of one call. The loop has more turns, which fill and drain its pipeline; the two
                TensorCores of a v4 or v5p share it.
            calls: how many calls a `vmap` made into one.

        Raises:
            UnreadableScheduleError: it has other branches.
        """
        loops = [b for b in self.root.inner if b.kind == "loop"]
        guards = [b for loop in loops for b in loop.inner if self.multiplies(b)]
        if len(loops) != 1 or len(guards) != 1:
            raise UnreadableScheduleError(f"{self.name}: {len(loops)} loops, {len(guards)} bodies of them")
        (loop,), (guard,) = loops, guards
        if len(guard.inner) != len(runs):
            raise UnreadableScheduleError(f"{self.name}: {len(guard.inner)} branches, expected {len(runs)}")
        cores = max(1, round(steps * calls / loop.trips))
        branches = [(n, self.at_most(b)) for n, b in zip(runs, guard.inner, strict=True)]
        inside = sum(n * cycles for n, cycles in branches if n is not None)
        inside += steps * max((cycles for n, cycles in branches if n is None), default=0)
        return self.root.own + loop.trips * (loop.own + guard.own) + inside * calls / cores


def dump_schedules(directory: Path) -> None:
    """Let the TPU compiler write its schedules into a directory. It must come before anything loads libtpu."""
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true "
        "--xla_jf_emit_annotations=true --xla_jf_dump_llo_pass_label_regex=^final_(bundles|hlo-static).*"
    ).strip()


def read_schedules(directory: Path, seen: set[str]) -> Iterator[KernelSchedule]:
    """The readable schedules of the Pallas kernels whose files are not in `seen` yet, to which they are added."""
    for path in sorted(directory.glob("*-final_bundles.txt")):
        if path.name in seen or "schedule-analysis" in path.name:
            continue
        seen.add(path.name)
        text = path.read_text()
        if "window_params" not in text and "window allocation" not in text:
            continue
        (units,) = directory.glob(f"{path.name.split('-')[0]}-*final_hlo-static-per-bundle-utilization.txt")
        rows = [line.split() for line in units.read_text().splitlines()]
        # The first column of numbers counts what the matrix units do.
        mxu = [int(row[0]) for row in rows if len(row) >= 10 and all(x.isdigit() for x in row[:10])]
        with contextlib.suppress(UnreadableScheduleError):
            yield KernelSchedule(re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", path.name), parse(text), mxu)


def parse(text: str) -> Body:
    """The loops and conditions of a schedule, from its branches and the regions that they name.

    Raises:
        UnreadableScheduleError: a loop whose number of turns is not a constant.
    """
    bundles: list[str] = []
    for line in text.splitlines():
        if re.match(r"\s*(0x[0-9a-f]+|0)\s+(\w\w)?\s*:", line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += line
    regions: dict[str, int] = {}
    for n, bundle in enumerate(bundles):
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", bundle):
            regions.setdefault(region, n)
    found: list[Body] = []
    heads: list[int] = []
    for n, bundle in enumerate(bundles):
        if re.match(r"\s*\S+\s+LB", bundle):
            heads.append(n)
        for region in re.findall(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)", bundle):
            target = regions.get(region, -1)
            # The four bundles after a branch run in any case.
            if target > n + 5:
                found.append(Body("condition", n + 5, target - 1))
            elif target <= n and heads:
                head = heads.pop()
                test = r"scmp\.[a-z]+\.[su]32\.totalorder %s\w+, (\d+) /\* loop exit test"
                trips = re.findall(test, "".join(bundles[max(head, n - 40) : n + 1]))
                if not trips:
                    raise UnreadableScheduleError("a loop whose number of turns is not a constant")
                found.append(Body("loop", head, min(n + 4, len(bundles) - 1), int(trips[-1])))
    root = Body("kernel", 0, len(bundles) - 1)
    for body in sorted(found, key=lambda b: (b.start, -b.end)):
        root.insert(body)
    return root
