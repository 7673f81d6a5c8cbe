# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""CPU devices in place of accelerators, for the command lines."""

import argparse
import os
import re
import sys

_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def use_cpu_devices(count: int) -> None:
    """Makes JAX run on `count` CPU devices. It must come before anything that asks JAX for its devices."""
    flags = re.sub(rf"{_DEVICE_COUNT}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT}={count}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA reads its flags when the first device is asked for, but JAX reads its platform when it is imported.
    if (jax := sys.modules.get("jax")) is not None:
        jax.config.update("jax_platforms", "cpu")


def device_count(text: str) -> int:
    """The type of an argument that says how many devices there are."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of devices")
    return int(text)
