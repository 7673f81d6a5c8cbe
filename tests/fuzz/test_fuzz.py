# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Random kernels, policies, meshes, mappings and transformations: right numbers or a refusal of ours, nothing else.

`--fuzz-minutes N` says for how long (1 by default), `--fuzz-seed S` where to begin.
"""

import time
import traceback
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
    failures: list[tuple[Case, str]] = []
    end = time.monotonic() + 60 * minutes

    def run_batch(number: int) -> None:
        @seed(number)
        @settings(
            max_examples=BATCH,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        )
        @given(cases())
        def batch(case: Case) -> None:
            if time.monotonic() > end:
                return
            try:
                results[check(case)] += 1
            except Exception:
                # Not raised at once: shrinking takes longer than finding the next, perhaps smaller one.
                failures.append((case, f"seed {number}: {case}\n{traceback.format_exc()}"))
                if minutes > 1:
                    with capsys.disabled():
                        print(failures[-1][1], flush=True)

        batch()
        jax.clear_caches()  # thousands of programs would fill the memory

    for number in range(start, start + 10**6):
        if time.monotonic() > end or len(failures) >= 5:
            break
        run_batch(number)
        if minutes > 1:
            with capsys.disabled():
                total = sum(results.values())
                print(f"{total} cases, seeds {start} to {number}: {dict(results)}, {len(failures)} failed", flush=True)
    record_property("cases", dict(results))
    if failures:
        pytest.fail(f"{len(failures)} failed; the shortest:\n" + min((text for _, text in failures), key=len))
    assert results["right"] > 0.4 * sum(results.values()), results
