# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs of the launcher, and the losses that they log."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples" / "levanter_configs"


def launch(*args: str, cwd: Path, timeout: int = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the launcher as a user would: without what our own conftest put into the environment."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "haliax_kernels.levanter", *args]
    return subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=timeout)


def losses_of(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    assert done.returncode == 0, done.stderr[-3000:]
    logged = re.findall(
        r'"event": "log", "step": (\d+), "metrics": \{"train/loss": ([\d.]+)', done.stdout + done.stderr
    )
    return {int(step): float(loss) for step, loss in logged}
