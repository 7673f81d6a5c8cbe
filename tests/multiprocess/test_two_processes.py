# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Two processes with gloo on the loopback run one named kernel, values and gradients."""

import os
import pathlib
import socket
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).with_name("_program.py")


def test_two_processes():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), address, str(i)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        ended = [p.communicate(timeout=120) for p in running]
    finally:
        for p in running:
            p.kill()
    for p, (out, err) in zip(running, ended, strict=True):
        assert p.returncode == 0 and "right" in out, err[-3000:]
