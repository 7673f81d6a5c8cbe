# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`haliax-kernels doctor`."""

import importlib.util
import os
import subprocess
import sys
from importlib import metadata

import pytest

from haliax_kernels.cli import doctor
from haliax_kernels.cli.main import main


def test_it_says_what_runs_here(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["doctor"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0, text
    assert f"jax             {metadata.version('jax')}" in text
    assert "xla             runs here, and is taken" in text
    assert "pallas_tpu      it needs a tpu, and this call runs on cpu" in text


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_what_libtpu_says_where_there_is_no_tpu_is_not_shown():
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-m", "haliax_kernels", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if "of tpu" in done.stdout:
        pytest.skip("there is a TPU")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TPU" not in done.stderr


def test_two_owners_of_a_module_are_a_problem(capsys, monkeypatch):
    both = {"haliax": ["haliax", "marin-haliax"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: both)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor"])
    assert stopped.value.code == 1
    assert "module haliax comes from haliax and marin-haliax" in capsys.readouterr().out
    assert list(doctor._problems())
