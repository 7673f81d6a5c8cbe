# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Run a call under its shardings, and compare each with the unsharded one."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from haliax_kernels.plan import KernelPlan
from haliax_kernels.testing.baseline import Baseline
from haliax_kernels.testing.blame import Blame
from haliax_kernels.testing.call import Results
from haliax_kernels.testing.compare import compare
from haliax_kernels.testing.randomness import check_draws, comparable
from haliax_kernels.testing.report import counted
from haliax_kernels.testing.shardings import Shardings


def compare_shardings(base: Baseline, mesh: Mesh, shardings: Shardings) -> list[str]:
    """Run every sharding.

    Returns:
        Notes on random numbers.

    Raises:
        KernelCheckError: one disagrees, or fails.
    """
    call, alone = base.call, set(shardings.alone)
    drawn: list[str] = []
    uncompared = 0
    for sharding in shardings.alone + shardings.together:
        blame = Blame(call.name, mesh, shardings.axes, sharding)
        plan = call.plan(sharding, mesh)
        if base.random and sharding in alone:
            with blame.guard():
                if check_draws(call, mesh, shardings.axes, sharding, base.random):
                    drawn.append(sharding[0][0])
        runner = call.runner(sharding, mesh)
        with blame.guard():
            copies = runner.copies(cotangents=base.cotangents)
        skipped = () if comparable(plan) else base.random
        for i, results in enumerate(copies):
            copy = f" (copy {i} of {len(copies)}, which should be equal)" if i else ""
            _compare(base, plan, blame, results, skipped, copy)
        if skipped:
            uncompared += 1
            if sharding in alone:
                _check_repeats(blame, copies[0], runner(cotangents=base.cotangents))
    notes = [f"shards draw different random numbers along {', '.join(dict.fromkeys(drawn))}"] if drawn else []
    if uncompared:
        listed = ", ".join(f"output {i}" for i in base.random)
        notes.append(
            f"not compared: {listed}, and gradients, under {counted(uncompared)}, since each shard draws its own "
            "random numbers; check the kernel also with randomness switched off"
        )
    return notes


def _compare(
    base: Baseline, plan: KernelPlan, blame: Blame, results: Results, skipped: Sequence[int], copy: str
) -> None:
    expected = list(base.results.values)
    for i, (want, limit) in enumerate(zip(expected, base.limits(expected), strict=True)):
        dims = tuple(a.name for a in plan.outputs[i].axes)
        found = [("", results.values[i])]
        if results.saving is not None and i in base.floating:
            found.append((", when differentiated,", results.saving[base.floating.index(i)]))
        for when, v in found if i not in skipped else ():
            _compare_one(blame, f"the value of output {i}{copy}{when}", False, dims, (v, want, limit))
    if results.gradients is None or base.results.gradients is None or skipped:
        return
    gradients = base.results.gradients
    for (i, want), limit in zip(gradients.items(), base.limits(list(gradients.values())), strict=True):
        dims = tuple(a.name for a in plan.inputs[i].axes)
        what = f"the gradient of argument {base.call.shape.infos[i].label!r}{copy}"
        _compare_one(blame, what, True, dims, (results.gradients[i], want, limit))


def _compare_one(
    blame: Blame, what: str, gradient: bool, dims: tuple[str, ...], results: tuple[np.ndarray, np.ndarray, float]
) -> None:
    found, expected, limit = results
    if found.shape != expected.shape:
        raise blame.other_shape(what, found.shape, expected.shape)
    difference = compare(found, expected, limit)
    if difference is not None:
        raise blame.disagreement(what, gradient, dims, difference)


def _check_repeats(blame: Blame, first: Results, second: Results) -> None:
    for i, (a, b) in enumerate(zip(first.values, second.values, strict=True)):
        difference = compare(b, a, 0)
        if difference is not None:
            raise blame.not_repeatable(f"the value of output {i}", difference)
