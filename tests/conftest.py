# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Eight simulated CPU devices for every test; must run before anything imports jax."""

import os
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
# Most of the tests' time is compiling, a third of which goes into optimizing code that runs for milliseconds.
for _flag in ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"):
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()


def pytest_addoption(parser):
    parser.addoption("--fuzz-minutes", type=float, default=1.0, help="how long tests/fuzz runs")
    parser.addoption("--fuzz-seed", type=int, default=0, help="where tests/fuzz begins")


# A process that keeps every program it ever compiled runs out of memory maps (65,530 on Linux), and XLA's compiler
# then crashes.
MOST_MAPS = 30_000


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_end_with_their_module():
    yield
    _forget_programs()


@pytest.fixture(autouse=True)
def compiled_programs_end_when_they_are_many():
    """A module may compile too many on its own."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        _forget_programs()


def _forget_programs():
    import jax

    jax.clear_caches()
