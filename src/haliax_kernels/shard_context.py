# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What a kernel is told about its shard: which mesh axes shard each core axis, and which part of it is here."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from haliax_kernels.collectives import shard_index
from haliax_kernels.mesh import MeshAxes
from haliax_kernels.plan import KernelPlan
from haliax_kernels.planner import KernelSpec


@dataclass(frozen=True)
class AxisShard:
    """One device's part of one core axis. Static and hashable, but for `index` and `offset`.

    Attributes:
        mesh_axes: the mesh axes of several devices that shard the axis, the major one first: what a collective over
            its shards takes. Empty where the kernel has the whole axis.
        size: the number of shards.
        local_size: the size of the shard; without the rows of a `Halo`.
        global_size: the size of the whole axis.
    """

    mesh_axes: MeshAxes
    size: int
    local_size: int
    global_size: int

    @property
    def index(self) -> jax.Array:
        """Which shard this is: an int32 scalar from 0 to `size - 1`."""
        return shard_index(self.mesh_axes)

    @property
    def offset(self) -> jax.Array:
        """Where in the whole axis the shard's first row lies: an int32 scalar."""
        return self.index * self.local_size


@dataclass(frozen=True)
class ShardContext(Mapping[str, AxisShard]):
    """The shard of every core axis that an argument has: `shard["q_pos"].offset`.

    A kernel that has a keyword-only parameter `shard` receives it, on one device too. It is static: hashable, so that
    it may be a `nondiff_argnums` argument of `jax.custom_vjp`.
    """

    shards: tuple[tuple[str, AxisShard], ...]

    def __getitem__(self, core: str) -> AxisShard:
        return dict(self.shards)[core]

    def __iter__(self) -> Iterator[str]:
        return (core for core, _ in self.shards)

    def __len__(self) -> int:
        return len(self.shards)


def with_shard(fn: Callable[..., Any], spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
    """The kernel's function with the context of a call, if it takes one."""
    return functools.partial(fn, shard=_shard_context(plan)) if spec.takes_shard else fn


def _shard_context(plan: KernelPlan) -> ShardContext:
    """An axis bound to several array axes is in it if only the first of these is sharded."""
    found = []
    for core, names in plan.bindings:
        found_axes = [
            [a for x in plan.inputs for a in x.axes if a.core == core and a.name == name]
            for name in names
            if core in plan.signature.input_axes
        ]
        # An axis that only arguments have which are None is nowhere.
        parts = [max(axes, key=lambda a: a.shards) for axes in found_axes if axes]
        if not parts or any(plan.several(a.kernel_mesh_axes) for a in parts[1:]):
            continue
        mesh_axes = plan.several(parts[0].kernel_mesh_axes)
        size = parts[0].shards if mesh_axes else 1
        whole = math.prod(a.size for a in parts)
        found.append((core, AxisShard(mesh_axes, size, whole // size, whole)))
    return ShardContext(tuple(found))
