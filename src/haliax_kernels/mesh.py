# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Find the mesh and the sharding of an array's axes, in every context. The one place that knows JAX's mesh modes."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from haliax_kernels import _compat

FROM_ARGUMENT = "from the axis_mapping= argument"
FROM_CONTEXT = "from the current hax.axis_mapping"
FROM_TYPE = "from the array's own type on the Explicit mesh"
FROM_ARRAY = "from the array's own NamedSharding"

MeshAxes = tuple[str, ...]
AxisMapping = Mapping[str, str | Sequence[str] | None]


@dataclass(frozen=True)
class MeshContext:
    """The mesh that a call runs on.

    Attributes:
        mesh: what `shard_map` is given; None means that it takes the context's.
        sizes: the mesh axes and their sizes, in the mesh's order, without those already manual.
        auto: the axes of `sizes` whose placement no type shows.
        manual: the mesh axes (with sizes) that an enclosing `shard_map` has already made manual.
        source: where the mesh came from, for messages.
    """

    mesh: Mesh | AbstractMesh | None
    sizes: tuple[tuple[str, int], ...]
    auto: frozenset[str]
    manual: tuple[tuple[str, int], ...]
    source: str

    @property
    def axis_names(self) -> MeshAxes:
        return tuple(name for name, _ in self.sizes)

    def several(self, mesh_axes: MeshAxes) -> MeshAxes:
        """Those of `mesh_axes` that have more than one device: the others need no collective."""
        sizes = dict(self.sizes)
        return tuple(m for m in mesh_axes if sizes[m] > 1)

    @property
    def auto_devices(self) -> int:
        return math.prod(size for name, size in self.sizes if name in self.auto)

    @property
    def needs_shard_map(self) -> bool:
        """False on one device and where every mesh axis is manual already: the kernel is then called directly.

        An Explicit mesh of one device still puts its axes into the arrays' types, which a kernel must not see.
        """
        devices = math.prod(n for _, n in self.sizes + self.manual)
        return bool(self.sizes) and (devices > 1 or len(self.auto) < len(self.sizes))


@dataclass(frozen=True)
class Placement:
    """What an array itself says of its sharding: one tuple of mesh axes per dimension, or nothing (`dims` is None).

    Attributes:
        dims: the mesh axes of each dimension.
        typed: True where the array's type says so (Explicit mesh axes), False where a concrete array's sharding does.
        unknown: True for a tracer whose placement over Auto mesh axes cannot be seen.
        opaque: a sharding over several devices that is no NamedSharding.
    """

    dims: tuple[MeshAxes, ...] | None = None
    typed: bool = False
    unknown: bool = False
    opaque: str | None = None


def as_mesh_axes(entry: Any) -> MeshAxes:
    """One entry of an axis mapping or PartitionSpec as a tuple of mesh axis names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def halo_hops(rows: int, size: int, shards: int) -> list[int]:
    """How many of `rows` halo rows come from each neighbour on one side, the nearest first; `size` is a shard's."""
    counts = [min(size, rows - hop * size) for hop in range(shards - 1)]
    return [n for n in counts if n > 0]


def freeze_mapping(mapping: AxisMapping | None) -> tuple[tuple[str, MeshAxes], ...] | None:
    """An axis mapping in a hashable form."""
    if mapping is None:
        return None
    return tuple((name, as_mesh_axes(entry)) for name, entry in mapping.items())


def find_mesh(mesh: Mesh | AbstractMesh | None, arrays: Iterable[Any]) -> MeshContext | None:
    """The mesh of a call: a manual context, else `mesh=`, the context's, the legacy context's, the arrays' own.

    Args:
        mesh: the caller's `mesh=` argument.
        arrays: the call's arrays, asked last.
    """
    context = _compat.context_mesh()
    if context is not None and AxisType.Manual in context.axis_types:
        return _describe(context, None, "the enclosing shard_map")
    if mesh is not None:
        return _describe(mesh, mesh, "the mesh= argument")
    if context is not None:
        return _describe(context, None, "the current jax.set_mesh")
    legacy = _compat.legacy_mesh()
    if legacy is not None:
        return _describe(legacy, legacy, "the enclosing `with mesh:`")
    for x in arrays:
        sharding = getattr(_compat.concrete_array(x), "sharding", None) or getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty and sharding.mesh.size > 1:
            return _describe(sharding.mesh, sharding.mesh, "the arrays' own sharding")
    return None


def _describe(mesh: Mesh | AbstractMesh, passed: Mesh | AbstractMesh | None, source: str) -> MeshContext:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    sizes = tuple((n, s) for n, s in mesh.shape.items() if types[n] != AxisType.Manual)
    return MeshContext(
        mesh=passed,
        sizes=sizes,
        auto=frozenset(n for n, _ in sizes if types[n] == AxisType.Auto),
        manual=tuple((n, s) for n, s in mesh.shape.items() if types[n] == AxisType.Manual),
        source=source,
    )


def placement_of(x: Any) -> Placement:
    """What `x` itself says of its placement; `x` is an array, a tracer or a `ShapeDtypeStruct`."""
    concrete = _compat.concrete_array(x)
    typed = _compat.type_spec(x)
    if typed is not None:
        mesh, spec = typed
        if any(t == AxisType.Explicit for t in mesh.axis_types):
            # Explicit axes are in the type; Auto axes of a mixed mesh are seen on a concrete array only.
            sharding = getattr(concrete, "sharding", None)
            if isinstance(sharding, NamedSharding):
                spec = sharding.spec
            return Placement(_dims(spec, x.ndim), typed=True, unknown=concrete is None)
    sharding = concrete.sharding if concrete is not None else None
    if sharding is None and isinstance(x, jax.ShapeDtypeStruct):
        sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        return Placement(_dims(sharding.spec, x.ndim))
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return Placement(unknown=concrete is None and isinstance(x, _compat.Tracer))
    if sharding.is_fully_replicated or len(sharding.device_set) == 1:
        return Placement()
    return Placement(opaque=type(sharding).__name__)


def _dims(spec: PartitionSpec, ndim: int) -> tuple[MeshAxes, ...]:
    entries = tuple(spec) + (None,) * (ndim - len(tuple(spec)))
    return tuple(as_mesh_axes(e) for e in entries)


@dataclass(frozen=True)
class ShardingSource:
    """Where the shardings of one call come from: the argument, the arrays' types, the context, the arrays."""

    argument: tuple[tuple[str, MeshAxes], ...] | None
    context: tuple[tuple[str, MeshAxes], ...] | None

    @functools.cached_property
    def _mapping(self) -> dict[str, MeshAxes]:
        return dict(self.argument if self.argument is not None else self.context or ())

    def mesh_axes(self, name: str, dim: int, placement: Placement, mesh: MeshContext) -> tuple[MeshAxes, str]:
        """(mesh axes, origin) of one axis of one array."""
        mapped = self._mapping.get(name, ())
        if self.argument is not None:
            return mapped, FROM_ARGUMENT
        if placement.typed and placement.dims is not None:
            own = placement.dims[dim]
            extra = tuple(m for m in mapped if m in mesh.auto and m not in own)
            return own + extra, FROM_TYPE if own or not extra else FROM_CONTEXT
        if self.context is not None:
            return mapped, FROM_CONTEXT
        if placement.dims is not None:
            return placement.dims[dim], FROM_ARRAY
        return (), "nowhere: the array is on one device"

    @property
    def silent(self) -> bool:
        """No mapping was given: only the arrays themselves can say how they are sharded."""
        return self.argument is None and self.context is None
