# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Random kernels, policies, meshes, mappings and transformations: right numbers or a refusal of ours, nothing else.

`--fuzz-minutes N` says for how long (1 by default), `--fuzz-seed S` where to begin.
"""

import time
from collections import Counter

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.cases import Case, cases
from fuzz.check import check

BATCH = 50


@pytest.mark.slow
def test_fuzz(request, record_property, capsys):
    minutes, start = request.config.getoption("--fuzz-minutes"), request.config.getoption("--fuzz-seed")
    results: Counter[str] = Counter()
    end = time.monotonic() + 60 * minutes
    for batch in range(10**9):
        if time.monotonic() > end:
            break

        @seed(start + batch)
        @settings(
            max_examples=BATCH,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
            report_multiple_bugs=False,
        )
        @given(cases())
        def run(case: Case) -> None:
            results[check(case)] += 1

        run()
        jax.clear_caches()  # thousands of programs would fill the memory
        if minutes > 1:
            with capsys.disabled():
                print(f"{sum(results.values())} cases, seed {start} to {start + batch}: {dict(results)}", flush=True)
    record_property("cases", dict(results))
    assert results["right"] > 0.4 * sum(results.values()), results
