# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`benchmarks/linear_vs_flash.py` runs, in processes of its own: it sets what JAX reads when it starts."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest


def run(path: pathlib.Path, *arguments: str) -> tuple[str, list[dict]]:
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "linear_vs_flash.py"
    files = ["--plot", str(path / "plot.png"), "--json", str(path / "figures.json")]
    done = subprocess.run(
        [sys.executable, str(script), *arguments, *files], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    parts = json.loads((path / "figures.json").read_text())["parts"]
    missing = "pip install 'haliax-kernels[bench]'" in done.stdout
    assert (path / "plot.png").exists() != missing
    return done.stdout, parts


def test_on_the_cpu(tmp_path):
    decays = ("none", "token", "head", "channel")
    out, (part,) = run(tmp_path, "cpu", "--lengths", "100", "--rounds", "1", "--decay", *decays)
    linear = ["linear", *(f"linear, {decay} decay" for decay in decays[1:])]
    assert part["rows"].keys() == {"100"}
    assert all(list(row) == [*linear, "flash", "quadratic"] for row in part["rows"].values())
    assert all(seconds > 0 for row in part["rows"].values() for seconds in row.values())
    assert all(f"\n{way}: " in out for way in linear)


def test_what_takes_too_long_is_left_out(tmp_path):
    out, (part,) = run(tmp_path, "cpu", "--lengths", "64", "128", "--rounds", "1", "--limit", "0", "--decay", "none")
    assert part["rows"]["64"].keys() == {"linear", "flash", "quadratic"} and part["rows"]["128"] == {}
    (row,) = (line for line in out.splitlines() if line.startswith("|        128 |"))
    assert row.split() == ["|", "128", "|", "-", "|", "-", "|", "-", "|", "-", "|"]


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_for_a_tpu(tmp_path):
    """Linear attention's cycles are proportional to the length, and flash attention's grow faster."""
    _, (part,) = run(tmp_path, "tpu", "--lengths", "1024", "4096", "--decay", "none", "token", "channel")
    short, long = part["rows"]["1024"], part["rows"]["4096"]
    ways = ["linear", "linear, token decay", "linear, channel decay"]
    for way in [*ways, "bound (linear)", "memory (linear)"]:
        assert 3.5 * short[way] < long[way] < 4.1 * short[way]
    assert long["flash"] > 6 * short["flash"]
    assert all(long["bound (linear)"] < long[way] < 8 * long["bound (linear)"] for way in ways)
    assert all(3 * long[way] < long["flash"] for way in ways[:2])
