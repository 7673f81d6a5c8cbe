# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`haliax-kernels preflight`: compile what a Levanter run would run for TPUs, on a machine without any."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from haliax_kernels.cli.arguments import add_config_command, topology
from haliax_kernels.cli.plan import closing_lines, model_plan_dict
from haliax_kernels.compiled.topologies import chip_count
from haliax_kernels.cpu_devices import use_cpu_devices
from haliax_kernels.distributions import DistributionError, installed_version, require_levanter
from haliax_kernels.errors import bytes_text
from haliax_kernels.report import table

if TYPE_CHECKING:
    from haliax_kernels.levanter.preflight import CompiledProgram, Preflight

_DESCRIPTION = """\
Compiles the train step of a Levanter config for TPUs that this machine does not have, with the compiler in the PyPI
package libtpu, and prints whether it compiles, its memory on a chip, its collectives by mesh axis, and its Pallas
kernels with the cycles that the compiler scheduled. It takes no weights and no data. All other arguments go to
Levanter, as in a run. The exit status is 1 where the run could not be.
"""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = add_config_command(
        commands, "preflight", "compile the train step of a Levanter config for TPUs, without TPUs", _DESCRIPTION
    )
    parser.add_argument(
        "--topology", type=topology, required=True, metavar="v5p:4x4x4", help="TPU chips, as they are connected"
    )
    parser.add_argument(
        "--only",
        choices=("attention",),
        help="compile the model's named kernels alone, forward and backward, instead of the whole train step",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command."""
    require_levanter()
    if installed_version("libtpu") is None:
        raise DistributionError(
            "The TPU compiler is not installed. Install it with: pip install 'haliax-kernels[tpu]'"
        )
    use_cpu_devices(chip_count(args.topology))
    # Levanter tells about itself; here only the outcome is wanted.
    logging.disable(logging.WARNING)
    from haliax_kernels.levanter.preflight import preflight

    found = preflight(["--config_path", args.config, *rest], args.topology, args.only, _stage)
    print(json.dumps(_as_dict(found), indent=2) if args.json else _text(found))
    if not args.json:
        for failure in filter(None, [found.plan.refusal, *(p.failure for p in found.programs)]):
            print(f"error: {failure}", file=sys.stderr)
    return 0 if found.passed else 1


@contextmanager
def _stage(title: str) -> Iterator[None]:
    """Say on the terminal what is being done, and how long it has taken."""
    start, done, terminal = time.monotonic(), threading.Event(), sys.stderr.isatty()

    def say(end: str) -> None:
        begin = "\r" if terminal else ""
        print(f"{begin}{title}: {time.monotonic() - start:.0f} s", end=end, file=sys.stderr, flush=True)

    def tick() -> None:
        while not done.wait(1):
            say("")

    ticking = threading.Thread(target=tick, daemon=True)
    if terminal:
        ticking.start()
    try:
        yield
    finally:
        done.set()
        if terminal:
            ticking.join()
        say("\n")


def _text(found: Preflight) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in found.plan.mesh.items())
    lines = [f"{found.topology}, mesh: {mesh}"]
    for program in found.programs:
        lines += ["", *_program(program, found.hbm_bytes)]
    return "\n".join([*lines, *closing_lines(found.plan)])


def _program(program: CompiledProgram, hbm: int) -> list[str]:
    if program.failure is not None:
        return [f"{program.title}: does NOT compile"]
    total = program.argument_bytes + program.other_bytes
    lines = [
        f"{program.title}: compiles",
        f"memory of a chip: {bytes_text(total)} of {bytes_text(hbm)} ({total / hbm:.0%}): "
        f"{bytes_text(program.argument_bytes)} of arguments, {bytes_text(program.other_bytes)} beside them",
        "",
        "collectives (results on one chip; as if every branch were taken):",
    ]
    lines += [f"  {row}" for row in table(_collective_rows(program))] if program.collectives else ["  none"]
    if program.kernels:
        lines += ["", "Pallas kernels (cycles that the compiler scheduled, without waits for memory):"]
        lines += [f"  {row}" for row in table(_kernel_rows(program))]
    return lines


def _collective_rows(program: CompiledProgram) -> list[tuple[str, ...]]:
    runs: Counter[tuple[str, ...]] = Counter()
    size: Counter[tuple[str, ...]] = Counter()
    unknown: set[tuple[str, ...]] = set()
    for c in program.collectives:
        key = (_owner(c.op_name, program), c.kind, f"over {', '.join(c.mesh_axes)}" if c.mesh_axes else "to itself")
        runs[key] += c.runs or 1
        size[key] += c.total_bytes
        unknown |= {key} if c.runs is None else set()
    return [
        (*key, f"{n} times{' or more, in a loop of unknown length' if key in unknown else ''}", bytes_text(size[key]))
        for key, n in sorted(runs.items(), key=lambda item: -size[item[0]])
    ]


def _owner(op_name: str, program: CompiledProgram) -> str:
    """The named kernel whose scope an operation stands in."""
    return next((name for name in program.named_kernels if name in op_name), "the model")


def _kernel_rows(program: CompiledProgram) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("kernel", "runs", "cycles of a run", "of all")]
    for k in program.kernels:
        most = "" if k.exact else "at most "
        cycles = ("not known", "")
        if k.cycles is not None and k.total_cycles is not None:
            cycles = (f"{most}{k.cycles:,.0f}", f"{most}{k.total_cycles:,.0f}")
        rows.append((k.name, "in a loop" if k.runs is None else str(k.runs), *cycles))
    return rows


def _as_dict(found: Preflight) -> dict[str, Any]:
    return {
        "topology": found.topology,
        "hbm_bytes": found.hbm_bytes,
        "passed": found.passed,
        "programs": [asdict(p) for p in found.programs],
        "plan": model_plan_dict(found.plan),
    }
