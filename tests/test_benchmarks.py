# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`benchmarks/run.py` runs benchmarks in processes of their own, and writes and draws what they found."""

import importlib.util
import json
import pathlib
import sys
from importlib.metadata import version

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    """The scripts' own folder is on the path when they are called."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("run", "plots"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run", module)
    spec.loader.exec_module(module)
    return module


def test_a_benchmark_and_its_results(benchmarks, tmp_path):
    figures = tmp_path / "ring.json"
    suite = benchmarks.Suite("ring", "Rings", ("ring.py", "--shards", "2", "--topology", ""))
    outcome = benchmarks.run(suite, figures)
    assert not outcome.failed
    text = benchmarks.merged("", [outcome], ["Rings"])
    assert "\n## Rings\n" in text and "| 2 | zigzag | 3.0 | 2.5 | 2.5 | 1.25 |" in text
    assert f"jax {version('jax')}" in text and str(tmp_path) not in text
    rows = json.loads(figures.read_text())["blocks"]
    assert {r["layout"]: r["backward"] for r in rows} == {"contiguous": 3.0, "zigzag": 2.5, "two passes": 6.0}
    if importlib.util.find_spec("matplotlib") is not None:
        benchmarks.plots.draw({"ring": figures}, tmp_path)
        assert (tmp_path / "rings.svg").stat().st_size > 5_000


def test_only_what_came_to_its_end_replaces_what_was_there(benchmarks, tmp_path):
    suite = benchmarks.Suite("ring", "Rings", ("ring.py", "--shards", "no_number"))
    failed = benchmarks.run(suite, tmp_path / "ring.json")
    assert failed.failed
    titles = ["One", "Rings", "Two"]
    outcomes = [benchmarks.Outcome(benchmarks.Suite(t, t, ("x.py",)), f"of {t}", 1.0, False) for t in titles]
    old = benchmarks.merged("", outcomes[::-1], titles)
    assert [line for line in old.splitlines() if line.startswith("## ")] == ["## One", "## Rings", "## Two"]
    assert benchmarks.merged(old, [failed], titles) == old
    newer = benchmarks.Outcome(outcomes[2].suite, "of today", 1.0, False)
    assert benchmarks.merged(old, [newer], titles) == old.replace("of Two", "of today")


def test_tables_stay_tables(benchmarks):
    output = "v5e, cycles\n| a | b |\n|---|---|\n| 1 | 2 |\n\nPlot: x.svg\n\n"
    expected = "```text\nv5e, cycles\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```text\nPlot: x.svg\n```"
    assert benchmarks.as_markdown(output) == expected


def test_every_benchmark_that_needs_no_accelerator_is_run(benchmarks):
    scripts = {suite.arguments[0] for suite in benchmarks.suites(pathlib.Path("plots"))}
    others = {"run.py", "plots.py", "timing.py", "gpu.py"}
    assert scripts == {path.name for path in FOLDER.glob("*.py")} - others
