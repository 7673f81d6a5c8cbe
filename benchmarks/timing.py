# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the benchmarks of CPU programs time them with."""

import statistics
import time
from collections.abc import Callable

import jax


def medians(programs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each program, interleaved, each after an untimed run of its own.

    Without that one pays for what its neighbour left: programs that hold gigabytes empty caches and memory pools.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, f in programs.items():
            jax.block_until_ready(f())
            start = time.perf_counter()
            jax.block_until_ready(f())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}
