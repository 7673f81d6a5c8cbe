# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`check_kernel`: prove a kernel right under every sharding that it accepts."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from haliax_kernels.binding import AxisBinding
from haliax_kernels.errors import ways_out
from haliax_kernels.kernel import NamedKernel
from haliax_kernels.plan import KernelPlan
from haliax_kernels.testing.blame import Blame
from haliax_kernels.testing.call import (
    Arrays,
    KernelCall,
    Results,
    Runner,
    make_mesh,
    random_cotangents,
    read_call,
    single_device_mesh,
)
from haliax_kernels.testing.compare import Difference, Tolerance, compare, scale_of
from haliax_kernels.testing.gradients import check_differences
from haliax_kernels.testing.interpret import race_detection
from haliax_kernels.testing.randomness import check_draws, comparable, random_outputs
from haliax_kernels.testing.reference import check_reference
from haliax_kernels.testing.report import CheckReport, KernelCheckError, Sharding
from haliax_kernels.testing.shardings import Shardings, find_shardings
from haliax_kernels.testing.tpu import check_compiles


def check_kernel(
    kernel: NamedKernel,
    *args: Any,
    axes: Mapping[str, AxisBinding] | None = None,
    mesh: Mapping[str, int] | None = None,
    samples: int | None = 32,
    seed: int = 0,
    gradients: bool = True,
    reference: Callable[..., Any] | None = None,
    races: bool = False,
    topology: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Run a call of a kernel unsharded and under the shardings that its plan accepts, and compare.

    Every accepted sharding of one array axis alone is run, so that a failure names the axis to blame, and then a
    sample of those of several axes. The unsharded gradient is compared with finite differences. Keep the arrays small,
    and their sizes multiples of the number of devices.

    Args:
        kernel: the kernel.
        *args: the arguments of the call, as the kernel takes them.
        axes: the bindings of the call, as the kernel takes them.
        mesh: mesh axes and their sizes; two axes of two devices by default.
        samples: how many shardings of several axes to run; None for all of them.
        seed: of the sample, of the cotangents and of the directions.
        gradients: whether to check gradients with respect to every floating-point array.
        reference: a function of the same arguments, NamedArrays too, that returns what the kernel should. It is run in
            float64 where possible.
        races: whether to run Pallas calls in TPU interpret mode with race detection too.
        topology: a TPU topology (`"v5e:2x2"`) to compile the call for too; it needs libtpu and no TPU.
        rtol: how far results may be apart, relative to the largest expected element. By default that of the dtype:
            float32 2e-5, bfloat16 2e-2, float16 4e-3, float64 1e-9.
        atol: an absolute distance that is added to that; twice the dtype's machine epsilon by default.
        **kwargs: the keyword arguments of the call.

    Returns:
        What was checked, what was refused, and what could not be checked.

    Raises:
        KernelCheckError: the kernel is wrong, or nothing of the call can be sharded.
        RuntimeError: jax has fewer devices than the mesh.
    """
    sizes = dict(mesh or {"a": 2, "b": 2})
    check = _Check(read_call(kernel, args, kwargs, axes), make_mesh(sizes), Tolerance(rtol, atol), seed)
    check.run_unsharded(gradients)
    if reference is not None:
        check.notes.append(check_reference(check.call, check.base, reference, check.cotangents, check.tolerance))
    if check.cotangents is not None:
        check.notes.append(check_differences(check.call, check.cotangents, seed))
    shardings = find_shardings(check.call, check.mesh, samples, seed)
    check.compare_shardings(shardings)
    if races:
        check.look_for_races(shardings)
    if topology is not None:
        everything = ((), *shardings.alone)
        check.notes.append(check_compiles(check.call, topology, sizes, shardings.axes, everything, check.cotangents))
    return CheckReport(
        kernel=check.call.name,
        mesh=tuple(sizes.items()),
        checked=shardings.alone + shardings.together,
        gradients=check.cotangents is not None,
        refused=shardings.refused,
        unchecked=shardings.unchecked,
        notes=tuple(check.notes),
    )


class _Check:
    """One check: the call, and what the unsharded kernel gives."""

    base: Results

    def __init__(self, call: KernelCall, mesh: Mesh, tolerance: Tolerance, seed: int):
        self.call, self.mesh, self.tolerance, self.seed = call, mesh, tolerance, seed
        self.cotangents: Arrays | None = None
        self.random: tuple[int, ...] = ()
        self.notes: list[str] = []

    def run_unsharded(self, gradients: bool) -> None:
        """What all else is compared with.

        Raises:
            KernelCheckError: the kernel has no gradient, or its two forward passes disagree.
        """
        self.call, runner, forward = _runnable(self.call)
        self.base = forward
        self.random = random_outputs(self.call, runner)
        if not gradients:
            return
        cotangents = random_cotangents(self.call.function((), single_device_mesh()), self.call.arrays, self.seed)
        if not cotangents or not self.call.moving:
            self.notes.append("there are no gradients: no floating-point argument, or no such output")
            return
        try:
            self.call, runner, self.base = _runnable(self.call, cotangents)
        except Exception as e:
            raise KernelCheckError(
                f"kernel {self.call.name!r} runs, but cannot be differentiated: {type(e).__name__}: "
                f"{(str(e).splitlines() or [''])[0]}"
                + ways_out(
                    ("give it a backward", "jax.custom_vjp, then kernel.defvjp(forward, backward)"),
                    ("or check its values only", f"check_kernel({self.call.name}, ..., gradients=False)"),
                )
            ) from e
        self.cotangents = cotangents
        assert self.base.saving is not None
        expected = [self.base.values[i] for i in self._floating]
        for i, found, want in zip(self._floating, self.base.saving, expected, strict=True):
            difference = compare(found, want, self._limit(want, expected))
            if difference is not None:
                raise KernelCheckError(
                    f"kernel {self.call.name!r}: output {i} has another value when it is differentiated, even "
                    f"unsharded: {difference.text()}."
                    + ways_out(("make both forward passes the same", "the forward of defvjp(forward, backward)"))
                )

    def compare_shardings(self, shardings: Shardings) -> None:
        """Run every sharding.

        Raises:
            KernelCheckError: one disagrees.
        """
        alone, uncompared, drawn = set(shardings.alone), [], []
        for sharding in shardings.alone + shardings.together:
            blame = Blame(self.call.name, self.mesh, shardings.axes, sharding)
            plan = self.call.plan(sharding, self.mesh)
            if self.random and sharding in alone and self._draws_checked(shardings, blame):
                drawn.append(sharding[0][0])
            runner = self.call.runner(sharding, self.mesh)
            results = self._run(blame, runner)
            skipped = () if comparable(plan) else self.random
            self._compare(plan, blame, results, skipped)
            if skipped:
                uncompared.append(sharding)
                if sharding in alone:
                    self._check_repeats(blame, results, runner(cotangents=self.cotangents))
        if drawn:
            self.notes.append(f"shards draw different random numbers along {', '.join(dict.fromkeys(drawn))}")
        if uncompared:
            listed = ", ".join(f"output {i}" for i in self.random)
            self.notes.append(
                f"not compared: {listed}, and gradients, under {len(uncompared)} shardings, since each shard draws its "
                "own random numbers; check the kernel also with randomness switched off"
            )

    def look_for_races(self, shardings: Shardings) -> None:
        """Run again with race detection.

        Raises:
            KernelCheckError: there is a race, or no Pallas call to look at.
        """
        call = self.call.in_interpret_mode(False)
        watched = False
        for sharding in ((), *shardings.alone):
            blame = Blame(self.call.name, self.mesh, shardings.axes, sharding)
            with race_detection() as races:
                self._run(blame, call.runner(sharding, self.mesh if sharding else None))
            watched |= races.watched
            if races.first is not None:
                raise blame.race(races.first)
        if not watched:
            raise KernelCheckError(
                f"kernel {self.call.name!r}: races=True, but no Pallas call ran in TPU interpret mode: there is "
                "nothing to look at. Pass races=False."
            )
        self.notes.append(f"no races, unsharded and under {len(shardings.alone)} shardings")

    @property
    def _floating(self) -> list[int]:
        return [i for i, v in enumerate(self.base.values) if jnp.issubdtype(v.dtype, jnp.inexact)]

    def _limit(self, expected: np.ndarray, among: list[np.ndarray]) -> float:
        scale = next(s for v, s in zip(among, scale_of(among), strict=True) if v is expected)
        return self.tolerance.limit(expected.dtype, scale)

    def _draws_checked(self, shardings: Shardings, blame: Blame) -> bool:
        arguments = (self.call, self.mesh, shardings.axes, blame.sharding, self.random)
        return self._guarded(blame, lambda: check_draws(*arguments))

    def _run(self, blame: Blame, runner: Runner) -> Results:
        return self._guarded(blame, lambda: runner(cotangents=self.cotangents))

    def _guarded(self, blame: Blame, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except KernelCheckError:
            raise
        except Exception as e:
            if not blame.sharding:
                raise
            raise blame.crash(e) from e

    def _compare(self, plan: KernelPlan, blame: Blame, results: Results, skipped: tuple[int, ...]) -> None:
        values = list(self.base.values)
        for i, want in enumerate(values):
            found = [("", results.values[i])]
            if results.saving is not None and i in self._floating:
                found.append((", when differentiated,", results.saving[self._floating.index(i)]))
            for when, v in found if i not in skipped else ():
                difference = compare(v, want, self._limit(want, values))
                if difference is not None:
                    dims = tuple(a.name for a in plan.outputs[i].axes)
                    raise blame.disagreement(f"the value of output {i}{when}", False, dims, difference)
        if results.gradients is None or self.base.gradients is None or skipped:
            return
        wanted = list(self.base.gradients.values())
        for i, want in self.base.gradients.items():
            difference = compare(results.gradients[i], want, self._limit(want, wanted))
            if difference is not None:
                dims = tuple(a.name for a in plan.inputs[i].axes)
                what = f"the gradient of argument {self.call.shape.infos[i].label!r}"
                raise blame.disagreement(what, True, dims, difference)

    def _check_repeats(self, blame: Blame, first: Results, second: Results) -> None:
        for i, (a, b) in enumerate(zip(first.values, second.values, strict=True)):
            difference: Difference | None = compare(b, a, 0)
            if difference is not None:
                raise blame.not_repeatable(f"the value of output {i}", difference)


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
