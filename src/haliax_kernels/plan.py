# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The plan of a call: everything decided before anything runs. Plain frozen data; `planner.py` makes it."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from haliax_kernels.errors import NamedKernelError
from haliax_kernels.mesh import MeshAxes, MeshContext, halo_hops
from haliax_kernels.policies import Gather, Halo, Policy
from haliax_kernels.ring_plan import RingPlan
from haliax_kernels.signature import KernelSignature

if TYPE_CHECKING:
    from haliax_kernels.pictures.html import PlanView


@dataclass(frozen=True)
class AxisPlan:
    """One axis of one array in one call.

    Attributes:
        name: the array axis.
        core: the core axis it is bound to, or None for a loop axis, or for an axis of an array without a place.
        loop: whether it is a loop axis.
        size: the global size.
        mesh_axes: the mesh axes that shard it on entry (on exit for an output), the major one first.
        shards: the number of shards.
        policy: the core axis' policy; None for a loop axis.
        origin: where the sharding came from.
    """

    name: str
    core: str | None
    loop: bool
    size: int
    mesh_axes: MeshAxes = ()
    shards: int = 1
    policy: Policy | None = None
    origin: str = ""

    @property
    def local_size(self) -> int:
        """Size on one device, before any gather."""
        return self.size // self.shards

    @property
    def gathered(self) -> bool:
        return isinstance(self.policy, Gather) and self.shards > 1

    @property
    def halo(self) -> tuple[int, int]:
        """How many rows the kernel sees before and after its own."""
        return (self.policy.before, self.policy.after) if isinstance(self.policy, Halo) else (0, 0)

    @property
    def own_size(self) -> int:
        """Size of the kernel's own part, which its outputs have: the whole where gathered, else the shard."""
        return self.size if self.gathered else self.local_size

    @property
    def kernel_size(self) -> int:
        """Size that the kernel sees in its arguments."""
        return self.own_size + sum(self.halo)

    @property
    def kernel_mesh_axes(self) -> MeshAxes:
        """The mesh axes over which the kernel's own view of this axis varies."""
        return () if self.gathered else self.mesh_axes

    @property
    def identity(self) -> tuple[str, str]:
        """What makes two axes of two arrays the same axis: the core axis, or the loop axis' name."""
        return ("core", self.core) if self.core is not None else ("loop", self.name)


@dataclass(frozen=True)
class InputPlan:
    """One array argument.

    Attributes:
        label: how messages name it.
        place: index of its spec in the signature, or None.
        named: whether it is a NamedArray.
        axes: its axes in its own order; empty for a replicated plain array.
        shape: its global shape.
        dtype: its dtype.
        reshard: whether its type on an Explicit mesh differs from `spec`, so that it is resharded on entry.
        fold: the mesh axes whose index is folded into a PRNG key.
        grad_sum: the mesh axes over which shards hold different parts of its gradient, so that these are added up.
    """

    label: str
    place: int | None
    named: bool
    axes: tuple[AxisPlan, ...]
    shape: tuple[int, ...]
    dtype: Any
    reshard: bool = False
    fold: MeshAxes = ()
    grad_sum: MeshAxes = ()

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(a.mesh_axes or None for a in self.axes))

    @property
    def differentiable(self) -> bool:
        return jax.numpy.issubdtype(self.dtype, jax.numpy.inexact)

    @property
    def local_bytes(self) -> int:
        if not self.axes:
            return math.prod(self.shape) * _itemsize(self.dtype)
        return math.prod(a.local_size for a in self.axes) * _itemsize(self.dtype)

    @property
    def own_bytes(self) -> int:
        """Bytes of what the kernel sees, gathered axes whole, without halos."""
        if not self.axes:
            return self.local_bytes
        return math.prod(a.own_size for a in self.axes) * _itemsize(self.dtype)

    def halo_dims(self, signature: KernelSignature) -> tuple[int, ...]:
        """The dimensions that get a halo, in this order: those that are exchanged first, while the array is small.

        Where the ends of two axes hold different values, the one that stands later in the signature has the corners,
        however the axes lie and are sharded.
        """
        halos = {i: a for i, a in enumerate(self.axes) if any(a.halo) and a.core is not None}
        if len({a.policy.edge for a in halos.values() if isinstance(a.policy, Halo)}) > 1:
            return tuple(sorted(halos, key=lambda i: signature.core_axes.index(halos[i].core or "")))
        return tuple(sorted(halos, key=lambda i: halos[i].shards == 1))


@dataclass(frozen=True)
class OutputPlan:
    """One output.

    Attributes:
        axes: its axes: loop axes in order of first appearance, then the core axes. Size -1: known once the kernel is
            traced.
        psum: the mesh axes over which the shards' outputs are added up (`Sum`).
        slices: per axis, the mesh axes by which the gathered, whole axis is cut to the local shard again.
        once: the mesh axes over which every shard holds the same output while others are cut; its cotangent counts
            once.
        dtype: its dtype; None until the kernel is traced.
    """

    axes: tuple[AxisPlan, ...]
    psum: MeshAxes = ()
    slices: tuple[MeshAxes, ...] = ()
    once: MeshAxes = ()
    dtype: Any = None

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(a.mesh_axes or None for a in self.axes))

    @property
    def local_bytes(self) -> int | None:
        if self.dtype is None or any(a.size < 0 for a in self.axes):
            return None
        return math.prod(a.local_size for a in self.axes) * _itemsize(self.dtype)


@dataclass(frozen=True)
class Collective:
    """One collective of the compiled program.

    Attributes:
        kind: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`.
        phase: `forward` or `backward`.
        mesh_axes: the mesh axes it runs over.
        what: the argument or output it serves, or `the kernel itself`.
        bytes_per_device: bytes of its result on one device, each time it runs; None for an output whose size is not
            known yet.
        steps: how many times it runs: more than once in a loop; None where that depends on data.
    """

    kind: str
    phase: str
    mesh_axes: MeshAxes
    what: str
    bytes_per_device: int | None
    steps: int | None = 1


@dataclass(frozen=True)
class KernelPlan:
    """Everything decided before a kernel runs; `print` it to see a table.

    Attributes:
        kernel: the kernel's name.
        signature: its signature.
        mesh: the mesh, or None where the kernel is called directly.
        bindings: the array axes that each core axis is bound to.
        loop_axes: the loop axes in order of first appearance.
        inputs: one plan per array argument.
        outputs: one plan per output.
        vmapped: the loop axes that are vmapped, outermost first.
        leading: the loop axes that the kernel takes as leading dimensions.
        collapse: whether `leading` is one single dimension.
        refusals: why the call cannot run; empty if it can.
        notes: what runs but may surprise, such as an idle mesh axis.
        reshards: the arguments that lie otherwise than planned, and are resharded on entry.
        own: the collectives that the kernel calls itself; known once it is traced, for a kernel with `Manual` axes.
        ring: how the shards of a sequence visit each other, where they do.
    """

    kernel: str
    signature: KernelSignature
    mesh: MeshContext | None
    bindings: tuple[tuple[str, tuple[str, ...]], ...] = ()
    loop_axes: tuple[str, ...] = ()
    inputs: tuple[InputPlan, ...] = ()
    outputs: tuple[OutputPlan, ...] = ()
    vmapped: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    collapse: bool = False
    refusals: tuple[NamedKernelError, ...] = ()
    notes: tuple[str, ...] = ()
    reshards: tuple[str, ...] = ()
    own: tuple[Collective, ...] = ()
    ring: RingPlan | None = None

    @property
    def sharded(self) -> bool:
        """Whether the kernel runs under `shard_map` (else it is called directly)."""
        return self.mesh is not None

    def bound(self, core: str) -> tuple[str, ...]:
        """The array axes that a core axis is bound to."""
        return dict(self.bindings)[core]

    @property
    def varying(self) -> MeshAxes:
        """The mesh axes over which the kernel's arguments differ from device to device, in the mesh's order."""
        found = {m for x in self.inputs for a in x.axes for m in a.kernel_mesh_axes}
        return tuple(m for m, _ in self.mesh.sizes if m in found) if self.mesh is not None else ()

    def refusal(self) -> NamedKernelError:
        """The first refusal, with the others as notes; a fresh one each time, since plans are cached."""
        first, *others = self.refusals
        error = type(first)(*first.args)
        for other in others:
            error.add_note(f"also refused: {type(other).__name__}: {other}")
        return error

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of the call, and of its gradient with respect to every floating-point argument."""
        if self.mesh is None or self.refusals:
            return ()
        forward, backward = (tuple(c for c in self.own if c.phase == phase) for phase in ("forward", "backward"))
        return (*self._forward(), *forward, *self._backward(), *backward)

    def several(self, mesh_axes: MeshAxes) -> MeshAxes:
        """Those of `mesh_axes` that have more than one device; none where there is no mesh."""
        return self.mesh.several(mesh_axes) if self.mesh is not None else ()

    def _forward(self) -> list[Collective]:
        found = []
        for x in self.inputs:
            size = x.local_bytes
            for a in x.axes:
                if a.gathered:
                    size *= a.shards
                    found.append(Collective("all-gather", "forward", self.several(a.mesh_axes), x.label, size))
            found += self._halos(x, "forward", x.label)
        for i, out in enumerate(self.outputs):
            if self.several(out.psum):
                found.append(
                    Collective("all-reduce", "forward", self.several(out.psum), f"output {i}", out.local_bytes)
                )
        return found

    def _halos(self, x: InputPlan, phase: str, what: str) -> list[Collective]:
        """One collective for each neighbour that rows come from; backward, that their cotangents go to."""
        found = []
        sizes = [a.own_size for a in x.axes]
        for dim in x.halo_dims(self.signature):
            a = x.axes[dim]
            row = math.prod(n for i, n in enumerate(sizes) if i != dim) * _itemsize(x.dtype)
            for side in a.halo:
                for rows in halo_hops(side, a.local_size, a.shards):
                    found.append(Collective("collective-permute", phase, self.several(a.mesh_axes), what, rows * row))
            sizes[dim] = a.kernel_size
        return found

    def _backward(self) -> list[Collective]:
        found = []
        for x in self.inputs:
            if not x.differentiable:
                continue
            found += self._halos(x, "backward", f"d{x.label}")
            size, scattered = x.own_bytes, set()
            for a in x.axes:
                for mesh_axes, summed in gradient_steps(x, a) if a.gathered else ():
                    scattered.update(mesh_axes)
                    size //= math.prod(dict(self.mesh.sizes)[m] for m in mesh_axes) if self.mesh else 1
                    if summed and self.several(mesh_axes):
                        found.append(
                            Collective("reduce-scatter", "backward", self.several(mesh_axes), f"d{x.label}", size)
                        )
            rest = self.several(tuple(m for m in x.grad_sum if m not in scattered))
            if rest:
                found.append(Collective("all-reduce", "backward", rest, f"d{x.label}", x.local_bytes))
        return found

    def with_outputs(self, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> "KernelPlan":
        """The plan with the sizes and dtypes of its outputs, which are `shapes` on one device, before any cut."""
        outputs = tuple(
            replace(
                out,
                dtype=s.dtype,
                axes=tuple(
                    replace(a, size=n if a.gathered else n * a.shards) for a, n in zip(out.axes, s.shape, strict=True)
                ),
            )
            for out, s in zip(self.outputs, shapes, strict=True)
        )
        return replace(self, outputs=outputs)

    def __str__(self) -> str:
        from haliax_kernels.report import render_plan

        return render_plan(self)

    def show(self) -> "PlanView":
        """The plan with pictures, for a notebook: which devices hold which part of an array, and the steps of a ring.

        Raises:
            DistributionError: an ImportError; matplotlib is missing.
        """
        from haliax_kernels.pictures.html import show_plan

        return show_plan(self)

    def _repr_html_(self) -> str:
        """A plan shows itself where it is the last line of a notebook's cell; without pictures, if it must."""
        from haliax_kernels.pictures.html import plan_html

        return plan_html(self)


def gradient_steps(x: InputPlan, axis: AxisPlan) -> list[tuple[MeshAxes, bool]]:
    """How the gradient of a gathered axis becomes local again, the major mesh axis first.

    Each step is (mesh axes, summed): a reduce-scatter where the shards hold different parts of the gradient, a plain
    local slice where all of them computed the same one.
    """
    steps: list[tuple[MeshAxes, bool]] = []
    for m in axis.mesh_axes:
        summed = m in x.grad_sum
        if steps and steps[-1][1] == summed:
            steps[-1] = ((*steps[-1][0], m), summed)
        else:
            steps.append(((m,), summed))
    return steps


def _itemsize(dtype: Any) -> int:
    return getattr(dtype, "itemsize", None) or np.dtype(dtype).itemsize
