# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs all benchmarks that a machine without an accelerator can, one after the other, and writes what they found.

    python benchmarks/run.py [--only ring cpu] [--results benchmarks/RESULTS.md]

The results file has what each benchmark printed, on which machine, with which versions and when; `--only` replaces the
sections of those benchmarks. The plots in `docs/plots` are those that the README shows. Nothing else should run on the
machine meanwhile; all take about half an hour on two cores. A GPU's part is `gpu.sh`.
"""

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import plots

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("haliax-kernels", "jax", "jaxlib", "libtpu", "marin-haliax", "marin-levanter", "numpy")


@dataclass(frozen=True)
class Suite:
    """One call of a benchmark."""

    name: str
    title: str
    arguments: tuple[str, ...]


def suites(plot_folder: pathlib.Path) -> list[Suite]:
    static = [
        Suite(
            f"tpu_static_{topology.split(':')[0]}",
            f"Attention kernels on {topology.split(':')[0]}, estimated without one",
            ("tpu_static.py", "--topology", topology, "--lengths", *lengths),
        )
        for topology, *lengths in (("v5e:2x2", "2048", "4096"), ("v5p:2x2x1", "4096"), ("v6e:2x2", "4096"))
    ]
    windows = ("tpu_static.py", "--lengths", "16384", "--sizes", "128", "--only", "haliax")
    decays = ("--decay", "none", "token", "channel")
    linear = ("linear_vs_flash.py", *decays, "--plot", str(plot_folder / "linear_vs_flash.png"))
    return [
        Suite("wrapper", "What `named_kernel` costs beside the hand-written `shard_map`", ("wrapper.py",)),
        Suite("cpu", "Attention on the CPU beside Levanter's and JAX's", ("cpu.py", "--memory")),
        *static,
        Suite("tpu_static_window", "A window at 16,384 positions on v5e, estimated without one", windows),
        Suite("ring", "What attention over a sharded sequence computes and moves", ("ring.py",)),
        Suite("linear_vs_flash", "Linear attention beside flash attention", linear),
    ]


@dataclass(frozen=True)
class Outcome:
    """What a call printed, and whether it came to its end."""

    suite: Suite
    output: str
    minutes: float
    failed: bool


def run(suite: Suite, figures: pathlib.Path) -> Outcome:
    """Run a benchmark in a process of its own, and show what it prints as it does."""
    print(f"\n== {suite.name}: python benchmarks/{' '.join(suite.arguments)}", flush=True)
    script, *arguments = suite.arguments
    command = [sys.executable, f"benchmarks/{script}", *arguments, "--json", str(figures)]
    began, lines = time.monotonic(), []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return Outcome(suite, "".join(lines), (time.monotonic() - began) / 60, process.returncode != 0)


def as_markdown(output: str) -> str:
    """Tables as they are, anything else as a block of text."""
    parts: list[str] = []
    block: list[str] = []

    def close() -> None:
        while block and not block[-1].strip():
            block.pop()
        if block:
            parts.extend(["", "```text", *block, "```", ""])
        block.clear()

    for line in output.splitlines():
        if line.startswith("|"):
            close()
            parts.append(line)
        elif line.strip() or block:
            block.append(line)
    close()
    return "\n".join(parts).strip("\n")


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {cpu}, {gib:.0f} GiB of memory, {platform.system()}; no accelerator"


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return ", ".join([*found, f"commit {git.stdout.strip()}" if git.returncode == 0 else "no git"])


HEAD = """# Results

Written by `python benchmarks/run.py`, benchmark by benchmark. Seconds on a shared machine mean little: look at ratios.
Cycles are counted in what the TPU compiler scheduled, nothing ran on a TPU: they are for comparing kernels.
"""


def section(outcome: Outcome) -> str:
    """What the results file has of a benchmark."""
    today = datetime.date.today().isoformat()
    return (
        f"`python benchmarks/{' '.join(outcome.suite.arguments)}`\n\n"
        f"{today}, {outcome.minutes:.1f} minutes; {machine()}; {versions()}.\n\n{as_markdown(outcome.output)}\n"
    )


def merged(old: str, outcomes: Sequence[Outcome], titles: Sequence[str]) -> str:
    """The results file with the sections of these benchmarks, where they came to their end, in place of its own."""
    sections = dict(part.split("\n\n", 1) for part in old.split("\n## ")[1:])
    sections |= {o.suite.title: section(o) for o in outcomes if not o.failed}
    return HEAD + "".join(f"\n## {title}\n\n{sections[title]}" for title in titles if title in sections)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = suites(pathlib.Path("docs/plots"))
    parser.add_argument("--only", nargs="+", choices=[s.name for s in known], help="run these alone")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks" / "RESULTS.md")
    options = parser.parse_args()
    chosen = [s for s in known if options.only is None or s.name in options.only]
    (ROOT / "docs/plots").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmarks_") as scratch:
        figures = {s.name: pathlib.Path(scratch) / f"{s.name}.json" for s in chosen}
        outcomes = [run(s, figures[s.name]) for s in chosen]
        plots.draw({name: path for name, path in figures.items() if path.exists()}, ROOT / "docs/plots")
    old = options.results.read_text(encoding="utf-8") if options.results.exists() else ""
    options.results.write_text(merged(old, outcomes, [s.title for s in known]), encoding="utf-8")
    print(f"\nResults: {options.results}")
    failed = [o.suite.name for o in outcomes if o.failed]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
