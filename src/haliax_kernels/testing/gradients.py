# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The gradient of the unsharded kernel against finite differences of its values."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from haliax_kernels.errors import ways_out
from haliax_kernels.testing.call import Arrays, KernelCall, Results, Runner
from haliax_kernels.testing.report import KernelCheckError

_DIRECTIONS = 3
# (steps, relative tolerance): the fine ones are of use where the kernel computes in float64 throughout.
_FINE = ((1e-4, 1e-5, 1e-3), 1e-5)
_COARSE = ((1e-2, 3e-2, 1e-1), 2e-2)


@dataclass(frozen=True)
class _Verdict:
    """One direction: whether the gradient agrees (None where the differences say nothing), and the two slopes."""

    agrees: bool | None
    slope: float
    claimed: float


def check_differences(call: KernelCall, cotangents: Arrays, seed: int) -> str:
    """Compare with central differences along random directions, in float64 where the kernel allows it.

    A direction counts where two steps give the same slope, so that kinks and rounding raise no alarm; most of the
    directions must disagree.

    Returns:
        A note on what was compared.

    Raises:
        KernelCheckError: the gradient of an argument is wrong.
    """
    if any(jnp.issubdtype(call.shape.infos[i].dtype, jnp.complexfloating) for i in call.moving):
        return "gradients of complex arrays were not compared with finite differences"
    try:
        with jax.enable_x64(True):
            wide, cts = call.widened(), tuple(np.asarray(c, np.float64) for c in cotangents)
            runner = wide.runner()
            results = runner(cotangents=cts)
            assert results.gradients is not None and results.saving is not None
            if all(v.dtype == np.float64 for v in (*results.saving, *results.gradients.values())):
                return _check_all(wide, runner, results, cts, seed, "float64", (_FINE, _COARSE))
    except KernelCheckError:
        raise
    except Exception:  # whatever a kernel does with a dtype that it was not written for
        pass
    dtypes = {np.dtype(v.dtype) for v in cotangents} | {np.dtype(call.shape.infos[i].dtype) for i in call.moving}
    if any(d.itemsize < 4 for d in dtypes):
        return f"no finite differences: the kernel does not run in float64, and {min(map(str, dtypes))} is too coarse"
    runner = call.runner()
    return _check_all(call, runner, runner(cotangents=cotangents), cotangents, seed, "its own dtypes", (_COARSE,))


def _check_all(
    call: KernelCall,
    runner: Runner,
    results: Results,
    cotangents: Arrays,
    seed: int,
    precision: str,
    levels: tuple[tuple[tuple[float, ...], float], ...],
) -> str:
    random = np.random.default_rng(seed + 1)
    assert results.gradients is not None
    silent = []

    def objective(arrays: Arrays) -> float:
        outs = [v for v in runner(arrays).values if jnp.issubdtype(v.dtype, jnp.inexact)]
        pairs = zip(outs, cotangents, strict=True)
        return float(sum(np.sum(v.astype(np.float64) * c.astype(np.float64)) for v, c in pairs))

    for i in call.moving:
        base = np.asarray(call.arrays[i], np.float64)
        gradient = results.gradients[i].astype(np.float64)
        verdicts = []
        for _ in range(_DIRECTIONS if base.size else 0):
            direction = np.asarray(random.choice([-1.0, 1.0], size=base.shape))
            verdicts.append(_direction(_along(objective, call, i, base, direction), gradient, direction, levels))
        wrong = [v for v in verdicts if v.agrees is False]
        if len(wrong) > _DIRECTIONS // 2:
            raise _wrong_gradient(call, i, wrong, precision)
        if verdicts and all(v.agrees is None for v in verdicts):
            silent.append(call.shape.infos[i].label)
    note = f"gradients of the unsharded call agree with finite differences, in {precision}"
    return note + (f"; for {', '.join(silent)} these were too noisy to say anything" if silent else "")


def _along(
    objective: Callable[[Arrays], float], call: KernelCall, i: int, base: np.ndarray, direction: np.ndarray
) -> Callable[[float], float]:
    """The slope of the objective along a direction, by the step."""
    unit = float(np.max(np.abs(base))) or 1.0

    def moved(step: float) -> Arrays:
        arrays = list(call.arrays)
        arrays[i] = jnp.asarray(base + step * unit * direction, call.arrays[i].dtype)
        return tuple(arrays)

    return lambda step: (objective(moved(step)) - objective(moved(-step))) / (2 * step * unit)


def _direction(
    slope_at: Callable[[float], float],
    gradient: np.ndarray,
    direction: np.ndarray,
    levels: tuple[tuple[tuple[float, ...], float], ...],
) -> _Verdict:
    claimed, norm = float(np.sum(gradient * direction)), float(np.linalg.norm(gradient))
    slope = 0.0
    for steps, tolerance in levels:
        before: float | None = None
        settled: float | None = None
        for step in steps:
            slope = slope_at(step)
            limit = tolerance * max(abs(slope), norm) + 1e-9
            if abs(slope - claimed) <= limit:
                return _Verdict(True, slope, claimed)
            if before is not None and settled is None and abs(slope - before) <= limit:
                settled = slope
            before = slope
        if settled is not None:
            return _Verdict(False, settled, claimed)
    return _Verdict(None, slope, claimed)


def _wrong_gradient(call: KernelCall, i: int, wrong: list[_Verdict], precision: str) -> KernelCheckError:
    label = call.shape.infos[i].label
    pairs = ", ".join(f"{v.claimed:.6g} instead of {v.slope:.6g}" for v in wrong)
    return KernelCheckError(
        f"kernel {call.name!r}: the gradient of argument {label!r} is wrong even unsharded. It disagrees with finite "
        f"differences of the kernel's values (in {precision}) along {len(wrong)} of {_DIRECTIONS} random directions."
        f"\n  slopes:        {pairs}"
        + ways_out(
            (
                "look for a term that the backward forgets",
                f"what it returns for {label!r} in defvjp(forward, backward)",
            ),
            ("look for a residual that is not the right one", "what the forward saves"),
            ("if the gradient is meant to be another", f"check_kernel({call.name}, ..., gradients=False)"),
        )
    )
