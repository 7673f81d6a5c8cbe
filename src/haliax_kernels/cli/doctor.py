# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`haliax-kernels doctor`: what is installed, what clashes, and which implementations this machine can run."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

import haliax_kernels
from haliax_kernels.attention import backends as attention
from haliax_kernels.distributions import installed_version
from haliax_kernels.implementations import current_platform
from haliax_kernels.linear import backends as linear

_DISTRIBUTIONS = ("jax", "jaxlib", "marin-haliax", "equinox", "marin-levanter", "libtpu", "tokamax")


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("doctor", help="print versions, devices and which implementations can run here")
    parser.set_defaults(run=run, takes_more=False)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; the status is 1 where something must be repaired."""
    print(f"haliax-kernels {haliax_kernels.__version__}, Python {platform.python_version()}")
    for name in _DISTRIBUTIONS:
        print(f"  {name:15} {installed_version(name) or 'not installed'}")
    problems = list(_problems())
    try:
        devices = _devices()
        kinds = sorted({d.device_kind for d in devices})
        print(
            f"devices: {len(devices)} of {current_platform()} ({', '.join(kinds)}), {jax.process_count()} process(es)"
        )
        for line in _implementations():
            print(line)
    except RuntimeError as error:
        problems.append(f"JAX finds no device: {' '.join(str(error).split())}")
    for problem in problems:
        print(f"problem: {problem}")
    print("nothing to repair" if not problems else f"{len(problems)} to repair")
    return 1 if problems else 0


def _devices() -> list[jax.Device]:
    """JAX's devices. What is written to stderr meanwhile is shown unless the CPU is found.

    There an installed libtpu says in lines of errors, past Python, that it is not on a TPU host.
    """
    devices: list[jax.Device] = []
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            devices = jax.devices()
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            if not devices or devices[0].platform != "cpu":
                held.seek(0)
                os.write(2, held.read())
    return devices


def _problems() -> Iterator[str]:
    # The old distributions of haliax and levanter stop the import of this package; they never come this far.
    distributions = metadata.packages_distributions()
    for module in ("haliax", "levanter", "jax"):
        owners = sorted(set(distributions.get(module, ())))
        if len(owners) > 1:
            yield f"module {module} comes from {' and '.join(owners)}: uninstall them, and install one of them again."
    found = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    if len({tuple(v.split(".")[:2]) for v in found.values()}) > 1:
        yield f"jax {found['jax']} and jaxlib {found['jaxlib']} differ: pip install -U jax jaxlib"


def _implementations() -> Iterator[str]:
    here, dtype = current_platform(), jnp.dtype(jnp.bfloat16)
    requests: list[tuple[str, Any, Any]] = [
        ("flash_attention", attention.IMPLEMENTATIONS, attention.Request(here, (), dtype, None, 128)),
        ("linear_attention", linear.IMPLEMENTATIONS, linear.Request(here, (), dtype, 128, None)),
    ]
    for operation, implementations, request in requests:
        yield f"{operation} (bfloat16, head size 128):"
        best = next((i.name for i in implementations if not i.refusals(request)), None)
        for i in implementations:
            reasons = i.refusals(request)
            state = "; ".join(reasons) if reasons else "runs here" + (", and is taken" if i.name == best else "")
            yield f"  {i.name:15} {state}"
