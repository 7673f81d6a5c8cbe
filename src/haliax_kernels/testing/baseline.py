# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The unsharded call: what every sharding is compared with, and what can be said of it alone."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from haliax_kernels.errors import ways_out
from haliax_kernels.testing.call import Arrays, KernelCall, Results, Runner, random_cotangents, single_device_mesh
from haliax_kernels.testing.compare import Tolerance, compare, scale_of
from haliax_kernels.testing.randomness import random_outputs
from haliax_kernels.testing.report import KernelCheckError


@dataclass(frozen=True, eq=False)
class Baseline:
    """The unsharded call.

    Attributes:
        call: the call, in TPU interpret mode where it needs that.
        results: what it gave.
        cotangents: those of the floating-point outputs; None where no gradient is checked.
        random: the outputs that depend on a PRNG key.
        tolerance: how far other results may be apart from these.
    """

    call: KernelCall
    results: Results
    cotangents: Arrays | None
    random: tuple[int, ...]
    tolerance: Tolerance

    @property
    def floating(self) -> list[int]:
        """The floating-point outputs."""
        return [i for i, v in enumerate(self.results.values) if jnp.issubdtype(v.dtype, jnp.inexact)]

    def limits(self, expected: list[np.ndarray]) -> list[float]:
        """How far each result may be apart from its expected one."""
        scales = scale_of(expected)
        return [self.tolerance.limit(v.dtype, scale) for v, scale in zip(expected, scales, strict=True)]


def run_unsharded(call: KernelCall, gradients: bool, seed: int, tolerance: Tolerance) -> Baseline:
    """Run a call unsharded.

    Raises:
        KernelCheckError: the kernel has no gradient, its two forward passes disagree, or its results are NaN.
    """
    cotangents = random_cotangents(call.function((), single_device_mesh()), call.arrays, seed)
    if not (gradients and cotangents and call.moving):
        call, runner, results = _runnable(call)
        base = Baseline(call, results, None, random_outputs(call, runner), tolerance)
        _refuse_nan(base)
        return base
    try:
        call, runner, results = _runnable(call, cotangents)
    except Exception as e:
        _runnable(call)  # a kernel that does not even run says so itself
        raise KernelCheckError(
            f"kernel {call.name!r} runs, but cannot be differentiated: {type(e).__name__}: "
            f"{(str(e).splitlines() or [''])[0]}"
            + ways_out(
                ("give it a backward", "jax.custom_vjp, then kernel.defvjp(forward, backward)"),
                ("or check its values only", f"check_kernel({call.name}, ..., gradients=False)"),
            )
        ) from e
    base = Baseline(call, results, cotangents, random_outputs(call, runner), tolerance)
    _refuse_nan(base)
    _compare_forward_passes(base)
    return base


def _compare_forward_passes(base: Baseline) -> None:
    assert base.results.saving is not None
    expected = [base.results.values[i] for i in base.floating]
    for i, found, want, limit in zip(base.floating, base.results.saving, expected, base.limits(expected), strict=True):
        difference = compare(found, want, limit)
        if difference is not None:
            raise KernelCheckError(
                f"kernel {base.call.name!r}: output {i} has another value when it is differentiated, even unsharded: "
                f"{difference.text()}."
                + ways_out(("make both forward passes the same", "the forward of defvjp(forward, backward)"))
            )


def _refuse_nan(base: Baseline) -> None:
    """NaN is in the same places as NaN, and would agree with itself."""
    named = [(f"the value of output {i}", base.results.values[i]) for i in base.floating]
    labels = [info.label for info in base.call.shape.infos]
    named += [(f"the gradient of argument {labels[i]!r}", v) for i, v in (base.results.gradients or {}).items()]
    for what, v in named:
        if np.isnan(v).any():
            raise KernelCheckError(
                f"kernel {base.call.name!r}: {what} is NaN in {int(np.isnan(v).sum())} of {v.size} elements, even "
                "unsharded, and NaN compares with nothing."
                + ways_out(
                    ("look for memory that is read before it is written", "interpret mode fills it with NaN"),
                    ("or for 0 / 0 and the like", "a row that is masked out as a whole, ..."),
                )
            )


def _runnable(call: KernelCall, cotangents: Arrays | None = None) -> tuple[KernelCall, Runner, Results]:
    """Run unsharded; on a CPU in TPU interpret mode where a Pallas call asks for the compiler."""
    runner = call.runner()
    try:
        return call, runner, runner(cotangents=cotangents)
    except ValueError as e:
        if call.forced or jax.default_backend() != "cpu" or "interpret mode" not in str(e):
            raise
    call = call.in_interpret_mode()
    runner = call.runner()
    return call, runner, runner(cotangents=cotangents)
