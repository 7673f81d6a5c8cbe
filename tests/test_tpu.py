# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Compiled for TPUs through libtpu: what fails bare runs under `named_kernel`, with the planned collectives."""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'haliax-kernels[tpu]'"
    ),
]
TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")
MESHES = ("batch over 4", "batch 2 x heads 2", "batch over 2, 2 idle", "nothing sharded")
SUMMED = ("group over 2", "query position over 2")
CONTEXTS = ("explicit", "nested")  # an Explicit mesh; inside a shard_map that is manual over one mesh axis
MOSAIC = "Mosaic kernels cannot be automatically partitioned"


@functools.cache
def results(topology: str) -> dict[str, dict]:
    program = pathlib.Path(__file__).with_name("tpu_program.py")
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), topology],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert run.returncode == 0 and lines, run.stderr[-4000:]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bare_kernel_fails_and_named_kernel_compiles(topology):
    found = results(topology)
    assert len(found) == 3 * len(MESHES + SUMMED) + 2 * len(MESHES) + len(CONTEXTS)
    for case, line in found.items():
        if case.endswith("bare"):
            assert MOSAIC in line.get("error", ""), line
            continue
        assert "error" not in line, line
        assert line["found"] == line["planned"], line
        assert line["kernels"] >= (2 if "gradient" in case else 1), line
        if case.split(":")[0] in MESHES or case.endswith("forward"):
            assert line["found"] == {}, line
        else:
            assert line["found"]["all-reduce"][0] == 2, line  # dk and dv, nothing else
