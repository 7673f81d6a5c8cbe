# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Which shardings a call accepts: those of one axis alone, and a sample of the others."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from haliax_kernels.errors import ShardedAxisError, ways_out
from haliax_kernels.plan import AxisPlan, KernelPlan
from haliax_kernels.policies import Local
from haliax_kernels.testing.call import KernelCall
from haliax_kernels.testing.report import KernelCheckError, Refused, Sharding

_FOUND_PER_SAMPLE = 16


@dataclass(frozen=True)
class Shardings:
    """The shardings of one call.

    Attributes:
        axes: its array axes.
        alone: the accepted shardings of one axis alone.
        together: a sample of the accepted shardings of several.
        refused: the refused shardings of one axis alone.
    """

    axes: Mapping[str, AxisPlan]
    alone: tuple[Sharding, ...]
    together: tuple[Sharding, ...]
    refused: tuple[Refused, ...]

    @property
    def unchecked(self) -> tuple[tuple[str, str], ...]:
        """The axes that may be sharded, but none of whose shardings was possible, and why."""
        possible = {axis for ((axis, _),) in self.alone}
        return tuple(
            (name, f"its size {a.size} allows no sharding ({', '.join(self._kinds(name))})")
            for name, a in self.axes.items()
            if name not in possible and not isinstance(a.policy, Local)
        )

    def _kinds(self, name: str) -> list[str]:
        return list(dict.fromkeys(r.kind for r in self.refused if r.axis == name))


def array_axes(plan: KernelPlan) -> dict[str, AxisPlan]:
    """The array axes of a call, by name."""
    found: dict[str, AxisPlan] = {}
    for x in plan.inputs:
        for a in x.axes:
            # An array without a place may have an axis under another role; the role of the placed one counts.
            if a.name not in found or x.place is not None:
                found.setdefault(a.name, a)
    return found


def find_shardings(call: KernelCall, mesh: Mesh, samples: int | None, seed: int) -> Shardings:
    """Every accepted sharding of one axis, and up to `samples` accepted ones of several.

    Raises:
        KernelCheckError: nothing can be sharded, so there is nothing to check.
    """
    axes = array_axes(call.plan((), mesh))
    names = mesh.axis_names
    choices = [c for n in range(1, len(names) + 1) for c in itertools.permutations(names, n)]
    alone: list[Sharding] = []
    refused: list[Refused] = []
    for mesh_axes, name in itertools.product(choices, axes):
        sharding = ((name, mesh_axes),)
        refusals = call.plan(sharding, mesh).refusals
        if refusals:
            # That the axis is Local says more than that its size would not do either.
            main = next((r for r in refusals if isinstance(r, ShardedAxisError)), refusals[0])
            refused.append(Refused(name, mesh_axes, type(main).__name__))
        else:
            alone.append(sharding)
    found = Shardings(axes, tuple(alone), (), tuple(refused))
    if not alone:
        raise _nothing_sharded(call, found, mesh)
    together = _combinations(call, mesh, alone, samples, seed)
    return Shardings(axes, tuple(alone), tuple(together), tuple(refused))


def _combinations(
    call: KernelCall, mesh: Mesh, alone: list[Sharding], samples: int | None, seed: int
) -> list[Sharding]:
    """A sample of the accepted shardings of several axes."""
    order = {name: i for i, name in enumerate(dict.fromkeys(name for ((name, _),) in alone))}
    random = np.random.default_rng(seed)
    limit = math.inf if samples is None else samples * _FOUND_PER_SAMPLE
    found: list[Sharding] = []
    # What is refused for some axes is refused in company too, so that only accepted ones need to grow.
    grown = alone
    while grown and len(found) < limit:
        pairs = list(itertools.product(grown, alone))
        grown = []
        for i in random.permutation(len(pairs)):
            first, ((name, mesh_axes),) = pairs[i]
            sharding = (*first, (name, mesh_axes))
            if order[first[-1][0]] < order[name] and not call.plan(sharding, mesh).refusals:
                grown.append(sharding)
            if len(found) + len(grown) >= limit:
                break
        found += grown
    return [found[i] for i in random.permutation(len(found))[:samples]]


def _nothing_sharded(call: KernelCall, found: Shardings, mesh: Mesh) -> KernelCheckError:
    listed = ", ".join(
        f"{name!r} (size {a.size}, {a.policy or 'loop axis'}: {', '.join(found._kinds(name))})"
        for name, a in found.axes.items()
    )
    return KernelCheckError(
        f"kernel {call.name!r}: no axis of this call can be sharded, so a check would say nothing. Its axes: "
        f"{listed or 'none'}."
        + ways_out(
            ("add a loop axis", f"an axis 'batch' whose size is a multiple of {mesh.size} on an argument"),
            ("choose sizes that divide", f"multiples of {mesh.size} (times multiple_of=, where there is one)"),
            ("say what the kernel tolerates", "policies={...} in the decorator"),
        )
    )
