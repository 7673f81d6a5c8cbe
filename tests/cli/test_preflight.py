# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`haliax-kernels preflight`: what the TPU compiler says of an example config, beside what the plan says."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter

import pytest

from haliax_kernels.cli import preflight
from haliax_kernels.cli.main import main
from launching import EXAMPLES

TINY = EXAMPLES / "llama_tiny_context_parallel.yaml"
compiles = [
    pytest.mark.slow,
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]


def command(*args):
    done = subprocess.run(
        [sys.executable, "-m", "haliax_kernels", "preflight", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "Traceback" not in done.stderr
    return done


class TestCompiled:
    pytestmark = compiles

    def test_a_train_step(self):
        done = command(TINY, "--topology", "v5e:2x4", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        (program,) = found["programs"]
        assert found["passed"] and program["failure"] is None and found["hbm_bytes"] == 16 * 2**30
        over = {"the kernel": set(), "the model": set()}
        for c in program["collectives"]:
            over["the kernel" if "flash_attention" in c["op_name"] else "the model"].add(tuple(c["mesh_axes"]))
        assert ("context",) in over["the kernel"] <= {("context",), ()}  # a transfer to itself crosses no mesh axis
        assert {"data", "model"} <= {m for axes in over["the model"] for m in axes}
        assert program["argument_bytes"] > 0 and program["other_bytes"] > 0
        assert {k["name"] for k in program["kernels"]} == {"attention_forward", "attention_backward"}
        assert all(k["cycles"] > 1000 for k in program["kernels"])
        # Stages are told while it compiles.
        assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
            "reading the config",
            "planning the model's kernels",
            "tracing the train step",
            "compiling the train step for v5e",
        ]

    @pytest.mark.parametrize("mode", ["zigzag", "ring", "allgather"])
    def test_what_the_plan_counts_is_in_the_program(self, mode):
        done = command(
            TINY, "--topology", "v5e:2x4", "--only", "attention", "--json", "--kernels.context_parallel", mode
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        (program,) = found["programs"]
        (call,) = found["plan"]["kernels"]
        planned, compiled = Counter(), Counter()
        for c in call["collectives"]:
            planned[c["kind"]] += c["bytes_per_device"] * (c["steps"] or 1)
            planned[c["kind"], "times"] += c["steps"] or 1
        for c in program["collectives"]:
            compiled[c["kind"]] += c["bytes_per_device"] * c["runs"]
            compiled[c["kind"], "times"] += c["runs"]
            assert "flash_attention" in c["op_name"]
        assert planned == compiled

    def test_a_model_that_does_not_fit(self):
        done = command(TINY, "--topology", "v5e:2x4", "--model.hidden_dim", 16384, "--model.num_layers", 8)
        assert done.returncode == 1
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
        assert "it does not fit into the chip's memory (HBM)" in line and "15.75G" in line
        assert "trainer.per_device_parallelism" in line
        assert "does NOT compile" in done.stdout


def test_a_mistake_is_refused_before_anything_compiles():
    pytest.importorskip("libtpu")
    done = command(TINY, "--topology", "v5e:2x4", "--kernels.context_parallel", "zigzg")
    assert done.returncode == 1 and "compiling" not in done.stderr
    assert "did you mean 'zigzag'" in done.stderr.splitlines()[-1]


def test_without_the_compiler_it_says_what_to_install(monkeypatch, capsys):
    own = preflight.installed_version
    monkeypatch.setattr(preflight, "installed_version", lambda name: None if name == "libtpu" else own(name))
    with pytest.raises(SystemExit, match="1"):
        main(["preflight", str(TINY), "--topology", "v5e:2x4"])
    assert "pip install 'haliax-kernels[tpu]'" in capsys.readouterr().err
