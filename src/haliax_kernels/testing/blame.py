# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The messages of a failed check: which axis, what differs, what it looks like, and what to do."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from jax.sharding import Mesh

from haliax_kernels.errors import axis_text, mesh_axes_text, ways_out
from haliax_kernels.plan import AxisPlan
from haliax_kernels.policies import Gather, Halo, Manual, Parallel, Policy, Sum
from haliax_kernels.testing.compare import Difference
from haliax_kernels.testing.report import KernelCheckError, Sharding, sharding_text

_Way = tuple[str, str]


@dataclass(frozen=True)
class Blame:
    """Makes the errors for one kernel under one sharding.

    Attributes:
        kernel: the kernel's name.
        mesh: the mesh.
        axes: the axes of the call.
        sharding: the sharding under which it fails.
    """

    kernel: str
    mesh: Mesh
    axes: Mapping[str, AxisPlan]
    sharding: Sharding

    def disagreement(self, what: str, gradient: bool, dims: tuple[str, ...], found: Difference) -> KernelCheckError:
        """`what` (such as "the value of output 0"), whose axes are `dims`, is another one than unsharded."""
        lines = [f"difference:    {found.text()}"]
        side = None
        for axis, mesh_axes in self.sharding:
            if axis in dims:
                text, axis_side = found.where(dims.index(axis), self._count(mesh_axes))
                lines.append(f"where:         along {axis!r}, {text}")
                side = side or axis_side
        if gradient and side in ("before", "after"):
            side = "after" if side == "before" else "before"  # cotangents go back to where the rows came from
        factor = self._factor(found, gradient)
        if factor is not None:
            lines.append(f"looks like:    {factor}")
        ways = [
            way
            for axis, _ in self.sharding
            for way in self._remedies(self.axes[axis], side, gradient, factor is not None)
        ]
        return KernelCheckError(
            f"kernel {self.kernel!r}: {what} differs from the unsharded one when {self._title()}."
            + self._details(lines, ways)
        )

    def other_shape(self, what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> KernelCheckError:
        """An output axis that no argument has takes its size from the output, and that depends on the shard."""
        return KernelCheckError(
            f"kernel {self.kernel!r}: {what} has another shape than the unsharded one when {self._title()}: {found} "
            f"instead of {expected}."
            + self._details(
                [], [("if a size depends on the shard's", "give that axis the name of the argument's axis")]
            )
        )

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Make what the kernel raises under the sharding an error of the check. Unsharded it speaks for itself."""
        try:
            yield
        except KernelCheckError:
            raise
        except Exception as e:
            if not self.sharding:
                raise
            raise self.crash(e) from e

    def crash(self, error: Exception) -> KernelCheckError:
        """The kernel runs unsharded, but raises under this sharding."""
        said = str(error).strip().splitlines() or [""]
        # Pallas' interpret mode gives a traceback, which ends with what happened.
        line = said[-1] if any(s.startswith("Traceback") or "Traceback (" in s for s in said) else said[0]
        lines = [f"the error:     {type(error).__name__}: {line}"[:600]]
        ways: list[_Way] = []
        for axis, mesh_axes in self.sharding:
            a = self.axes[axis]
            count = self._count(mesh_axes)
            size = a.size if isinstance(a.policy, Gather) else a.size // count
            lines.append(f"sizes:         {axis!r} is {size} on a device, and {a.size} unsharded")
            if a.core is not None:
                ways.append(("if it works in blocks", f'multiple_of={{"{a.core}": ...}} in the decorator'))
                ways.append(("if it needs the whole axis", _with_policy(self.kernel, a.core, "Gather()")))
            else:
                ways.append(
                    ("if it must not be sharded", f"make {axis!r} a core axis of the signature: Local() refuses")
                )
        return KernelCheckError(
            f"kernel {self.kernel!r} runs unsharded, but fails when {self._title()}." + self._details(lines, ways)
        )

    def repeats(self, axis: str, shards: int, outputs: list[int]) -> KernelCheckError:
        """Shards that hold the same data draw the same random numbers."""
        listed = " and ".join(f"output {i}" for i in outputs)
        return KernelCheckError(
            f"kernel {self.kernel!r}: its random numbers (dropout?) are identical across shards when "
            f"{self._title()}: {listed} depends on the key, but of {shards} shards that hold the same data two give "
            "the same, for every key that was tried."
            + self._details(
                [],
                [
                    ("let each shard draw its own numbers", 'rng="fold" in the decorator, the default'),
                    ("use the key that the kernel is given", "not one that it makes itself"),
                    ("where each index has a key of its own", f"pass a NamedArray of keys with axis {axis!r}"),
                ],
            )
        )

    def not_repeatable(self, what: str, found: Difference) -> KernelCheckError:
        """The same call gives two results."""
        return KernelCheckError(
            f"kernel {self.kernel!r}: {what} is another one in a second run of the same call when {self._title()}."
            + self._details(
                [f"difference:    {found.text()}"],
                [("look for memory that is read before it is written", "check_kernel(..., races=True)")],
            )
        )

    def race(self, text: str) -> KernelCheckError:
        """Race detection found one."""
        return KernelCheckError(
            f"kernel {self.kernel!r} has a race in its memory when {self._title()}, whatever its numbers say."
            + self._details(
                [f"the race:      {text}"],
                [
                    ("wait for each copy before its memory is used", "copy.wait() for every copy.start()"),
                    ("between devices", "a barrier, or a semaphore that the other device signals"),
                ],
            )
        )

    def does_not_compile(self, topology: str, phase: str, error: Exception) -> KernelCheckError:
        """The compiler for a TPU topology refuses the kernel."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()][:4]
        text = "\n                 ".join(lines)[:1200]
        return KernelCheckError(
            f"kernel {self.kernel!r}: its {phase} does not compile for TPU {topology} when {self._title()}."
            + self._details([f"the compiler:  {text}"], [])
        )

    def _title(self) -> str:
        if not self.sharding:
            return "nothing is sharded"
        return " and ".join(
            f"{self._axis(self.axes[axis])} is sharded over {mesh_axes_text(mesh_axes, dict(self.mesh.shape))}"
            for axis, mesh_axes in self.sharding
        )

    def _axis(self, a: AxisPlan) -> str:
        what = f"declared {policy_text(a.policy)}" if a.policy is not None else "a loop axis"
        return f"{axis_text(a.name, a.core)}, {what},"

    def _details(self, lines: list[str], ways: list[_Way]) -> str:
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        start = [f"sharding:      {sharding_text(self.sharding)} on mesh {mesh}"] if self.sharding else []
        if len(self.sharding) > 1:
            start.append("blame:         each of these axes alone agrees")
        return "".join(f"\n  {line}" for line in start + lines) + (ways_out(*dict.fromkeys(ways)) if ways else "")

    def _count(self, mesh_axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[m] for m in mesh_axes)

    def _factor(self, found: Difference, gradient: bool) -> str | None:
        factor = found.factor()
        if factor is None:
            return None
        counts = set(self.mesh.shape.values()) | {self._count(m) for _, m in self.sharding}
        for n in sorted(counts | {self.mesh.size}):
            if n > 1 and abs(factor - n) < 1e-2 * n:
                who = "the backward" if gradient else "the kernel"
                return f"{n} times too large: summed twice. Does {who} psum by itself? The wrapper adds the parts up."
            if n > 1 and abs(factor - 1 / n) < 1e-2 / n:
                return f"1/{n} of what it should be: a psum is missing, or something divides by the number of shards."
        return f"{factor:.4g} times what it should be." if abs(factor) > 1e-6 else "zero: left out?"

    def _remedies(self, a: AxisPlan, side: str | None, gradient: bool, scaled: bool) -> list[_Way]:
        kernel, core = self.kernel, a.core
        if core is None:
            return [
                ("the kernel mixes its leading dimensions", f"treat every index of {a.name!r} by itself"),
                ("if it must mix them", f"make {a.name!r} a core axis of the signature, with Gather() or Local()"),
            ]
        whole = ("if it needs the whole axis", _with_policy(kernel, core, "Gather()"))
        local = ("if it must not be sharded", _with_policy(kernel, core, "Local()"))
        if side == "remainder":
            return [("if it works in whole blocks", f'multiple_of={{"{core}": ...}} in the decorator'), whole, local]
        psum = ("sum nothing over the mesh in the kernel", "no psum in its forward or backward")
        before, after = ("...", 0) if side == "before" else (0, "...") if side == "after" else ("...", "...")
        halo = (
            "if it needs the neighbours' rows",
            _with_policy(kernel, core, f"Halo(before={before}, after={after})"),
        )
        match a.policy:
            case Halo():
                first = ("give it enough rows, on the right side", "the kernel pads nothing itself")
                return [first, halo, whole, local]
            case Sum():
                additive = (
                    "Sum() wants the outputs on the parts to add up",
                    "square, normalise, ... after the kernel",
                )
                return [psum, whole, local] if scaled else [additive, psum, whole, local]
            case Gather():
                return [psum, local]
            case Parallel():
                return [halo, whole, local] if side else [whole, halo, local]
            case Manual():
                shard = f'shard["{core}"]'
                return [
                    ("where shards' parts add up (reduces=True)", f"lax.psum(part, {shard}.mesh_axes), once"),
                    ("where rows are counted", f"{shard}.offset + local row, of {shard}.global_size"),
                    ("in a backward written by hand", "cotangents of what all shards hold add up: psum them once"),
                    whole,
                    local,
                ]
            case _:
                return [whole, local]


def policy_text(policy: Policy) -> str:
    """`Parallel()`, `Halo(before=1)`: as it would be written."""
    given = [f for f in fields(policy) if getattr(policy, f.name) != f.default]
    return f"{policy}({', '.join(f'{f.name}={getattr(policy, f.name)!r}' for f in given)})"


def _with_policy(kernel: str, core: str, policy: str) -> str:
    return f"{kernel}.with_policies({core}={policy})"
