# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The Pallas kernels of a compiled TPU program, with the cycles of each."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from haliax_kernels.compiled.program import Instruction, Program
from haliax_kernels.compiled.schedules import KernelSchedule, UnreadableScheduleError

_TARGET = 'custom_call_target="tpu_custom_call"'


@dataclass(frozen=True)
class CompiledKernel:
    """A Pallas kernel of a compiled program; where the program calls it several times, all of the calls.

    Attributes:
        name: its name.
        op_name: the Python scopes that it comes from.
        runs: how often it runs, as if every branch of the program were taken; None where a loop's turns are not known.
        cycles: of one run, as scheduled; None where the schedule could not be read.
        exact: whether `cycles` counts each branch of the kernel as often as it runs; else it is an upper bound, as if
            each step of its grid took the longest way.
    """

    name: str
    op_name: str
    runs: int | None
    cycles: float | None
    exact: bool

    @property
    def total_cycles(self) -> float | None:
        """Of all runs, those in a loop of unknown length counted once."""
        return None if self.cycles is None else self.cycles * (self.runs or 1)


def compiled_kernels(program: Program, schedules: Iterable[KernelSchedule]) -> tuple[CompiledKernel, ...]:
    """The kernels of a program, the ones that run most cycles first."""
    by_name = {schedule.name: schedule for schedule in schedules}
    built: dict[str, KernelSchedule] = {}
    found: dict[tuple[str, str], list[Instruction]] = {}
    for i in program:
        if i.opcode == "custom-call" and _TARGET in i.text:
            # The compiler builds kernels that are the same once, under the name of one of them. They may do different
            # work all the same: what is to do at each step of its grid is an operand.
            identity = _identity(i)
            if i.name in by_name:
                built.setdefault(identity, by_name[i.name])
            found.setdefault((identity, str(_told(i))), []).append(i)
    kernels = []
    for (identity, _), same in found.items():
        schedule = built.get(identity)
        cycles, exact = (None, False) if schedule is None else _cycles(schedule, same[0])
        runs = [program.runs[i.computation] for i in same]
        total = None if None in runs else sum(n for n in runs if n is not None)
        kernels.append(CompiledKernel(_title(same[0]), same[0].op_name, total, cycles, exact))
    return tuple(sorted(kernels, key=lambda k: -(k.total_cycles or 0)))


def _identity(i: Instruction) -> str:
    layouts = re.search(r"operand_layout_constraints=\{.*?\}\}", i.text)
    body = re.search(r'"body":"([^"]*)"', i.text)
    return f"{_shape(i.shape)} {layouts and layouts[0]} {body and body[1]}"


def _shape(text: str) -> str:
    return re.sub(r"\{[^}]*\}", "", text)


def _title(i: Instruction) -> str:
    """The name that the kernel has in Python: the last scope before `pallas_call`."""
    scopes = i.op_name.removesuffix("/pallas_call").split("/")
    return re.sub(r"^(?:\w+\()+|\)+$", "", scopes[-1]) or i.name


def _told(i: Instruction) -> dict[str, str]:
    """What a kernel says of itself in its metadata."""
    return dict(re.findall(r'"(branch_runs|grid_steps|elements)":\s*"([\d* ]+)"', i.text))


def _cycles(schedule: KernelSchedule, i: Instruction) -> tuple[float, bool]:
    """The cycles of a run, and whether they are exact."""
    told = _told(i)
    dims = re.search(r"\[([\d,]*)\]", i.shape)
    if len(told) == 3 and dims is not None:
        runs = [None if n == "*" else int(n) for n in told["branch_runs"].split()]
        calls = math.prod(int(d) for d in dims[1].split(",") if d) // int(told["elements"])
        try:
            return schedule.by_runs(runs, int(told["grid_steps"]), calls), None not in runs
        except UnreadableScheduleError:  # the compiler has made other branches of it
            pass
    return schedule.at_most(), False
