# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The refusals of a plan: for each mistake, the exception that says what was found, from where, and the ways out."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from haliax_kernels.arguments import ArrayInfo
from haliax_kernels.errors import (
    ArgumentError,
    AxisSizeError,
    BindingError,
    InconsistentShardingError,
    ManualAxisError,
    MeshAxisConflictError,
    MissingShardingError,
    MultipleOfError,
    ShardedAxisError,
    UnevenShardingError,
    UnknownMeshAxisError,
    axis_text,
    bytes_text,
    mesh_axes_text,
    ways_out,
)
from haliax_kernels.mesh import MeshAxes, MeshContext
from haliax_kernels.plan import AxisPlan, InputPlan
from haliax_kernels.policies import Local, Policy
from haliax_kernels.signature import KernelSignature

Remedies = Sequence[tuple[str, str]]


def _unmap(name: str) -> str:
    return f'axis_mapping={{**mapping, "{name}": None}}'


@dataclass(frozen=True)
class Refusals:
    """Makes the exceptions for one call of one kernel.

    Attributes:
        kernel: the kernel's name.
        signature: its signature.
        mesh: the mesh of the call; None where there is none.
    """

    kernel: str
    signature: KernelSignature
    mesh: MeshContext | None

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.sizes + self.mesh.manual) if self.mesh is not None else {}

    @property
    def who(self) -> str:
        return f"kernel {self.kernel!r}"

    @property
    def mesh_text(self) -> str:
        return ", ".join(f"{n} {s}" for n, s in self.mesh.sizes) if self.mesh is not None else "none"

    @property
    def source(self) -> str:
        return self.mesh.source if self.mesh is not None else "no mesh"

    def nothing_known(self, info: ArrayInfo) -> MissingShardingError:
        """Under jit, on Auto mesh axes, without a mapping."""
        return MissingShardingError(
            f"{self.who} is called under jit with a mesh of several devices ({self.mesh_text}, {self.source}), and "
            f"nothing says how argument {info.label!r} is sharded: there is no axis mapping, and JAX does not show a "
            "traced array's placement on Auto mesh axes. XLA would gather it and compute everything on every device."
            + ways_out(
                ("set a mapping for the call", f'{self.kernel}(..., axis_mapping={{"batch": "data"}})'),
                ("set a mapping around it", 'with haliax.axis_mapping({"batch": "data"}): ...'),
                ("if nothing is sharded, say so", f"{self.kernel}(..., axis_mapping={{}})"),
            )
        )

    def opaque_sharding(self, info: ArrayInfo) -> MissingShardingError:
        """A concrete array under a sharding that names no mesh axes."""
        return MissingShardingError(
            f"{self.who}: argument {info.label!r} lies on several devices under a {info.placement.opaque}, which "
            "names no mesh axes." + ways_out(("say how its axes are sharded", f"{self.kernel}(..., axis_mapping=...)"))
        )

    def unknown_mesh_axis(self, info: ArrayInfo, a: AxisPlan, mesh_axis: str, origin: str) -> UnknownMeshAxisError:
        near = difflib.get_close_matches(mesh_axis, list(self.sizes), 1)
        return UnknownMeshAxisError(
            f"{self.who}: {axis_text(a.name, a.core)} of argument {info.label!r} is mapped to mesh axis "
            f"{mesh_axis!r}, {origin}, but the mesh ({self.source}) has only: {self.mesh_text}."
            + ways_out(
                ("map it to one of these", f'axis_mapping={{..., "{a.name}": "{near[0] if near else "..."}"}}'),
                ("or to none", f'axis_mapping={{..., "{a.name}": None}}'),
            )
        )

    def already_manual(self, info: ArrayInfo, a: AxisPlan, taken: MeshAxes, origin: str) -> ManualAxisError:
        needs = "whole on every device" if isinstance(a.policy, Local) else f"under {a.policy}()"
        return ManualAxisError(
            f"{self.who} needs {axis_text(a.name, a.core)} of argument {info.label!r} {needs}, but it is mapped to "
            f"{mesh_axes_text(taken, self.sizes)}, {origin}, which {self.source} has already made manual: the array "
            "here is one shard of it, and the kernel would take it for the whole."
            + ways_out(
                ("call the kernel outside that shard_map", f"{self.kernel}(...)  # it makes its own"),
                ("if the array here is the whole axis", f"{self.kernel}(..., {_unmap(a.name)})"),
            )
        )

    def sharded_plain_array(self, info: ArrayInfo, mesh_axes: MeshAxes) -> ShardedAxisError:
        return ShardedAxisError(
            f"{self.who}: argument {info.label!r} is a plain array without a place in the signature "
            f'"{self.signature}", so every device needs the whole of it, but it is sharded over '
            f"{mesh_axes_text(mesh_axes, self.sizes)}, from its own sharding."
            + ways_out(
                ("name its axes", f"haliax.named({info.label}, (...))"),
                ("or replicate it first", f"jax.device_put({info.label}, NamedSharding(mesh, P()))"),
            )
        )

    def mesh_axis_twice(self, x: InputPlan, a: AxisPlan, mesh_axis: str, other: str) -> MeshAxisConflictError:
        return MeshAxisConflictError(
            f"{self.who}: argument {x.label!r} has {mesh_axes_text((mesh_axis,), self.sizes)} on two of its axes, "
            f"{other!r} and {a.name!r}, {a.origin}; one mesh axis can shard one axis only."
            + ways_out(("drop one of them", _unmap(a.name)))
        )

    def uneven(self, x: InputPlan, a: AxisPlan) -> UnevenShardingError:
        fits = -(-a.size // a.shards) * a.shards
        return UnevenShardingError(
            f"{self.who}: {axis_text(a.name, a.core)} of argument {x.label!r} has size {a.size}, which is not "
            f"divisible by {mesh_axes_text(a.mesh_axes, self.sizes)}, {a.origin}."
            + ways_out(
                ("pad it to the next size that fits", f'Axis("{a.name}", {fits})'),
                ("or keep it whole", _unmap(a.name)),
            )
        )

    def sharded(self, x: InputPlan, a: AxisPlan, remedies: Remedies | None) -> ShardedAxisError:
        """A `Local` axis over several devices; `remedies` stand in for the general ways out."""
        return ShardedAxisError(
            f"{self.who} needs {axis_text(a.name, a.core)} whole on every device, but argument {x.label!r} has it "
            f"sharded over {mesh_axes_text(a.mesh_axes, self.sizes)}, {a.origin}."
            + ways_out(*(self._ways_for_local(x, a) if remedies is None else _filled(remedies, a)))
        )

    def _ways_for_local(self, x: InputPlan, a: AxisPlan) -> Remedies:
        ways = [("keep it whole for this call", f"{self.kernel}(..., {_unmap(a.name)})")]
        if a.core is None:
            return [*ways, ("or give the argument a place in the signature", f'"{self.signature}"')]
        size = bytes_text(x.local_bytes * a.shards)
        gather = f"{self.kernel}.with_policies({a.core}=Gather())    # all-gathers {size} per device"
        ways.append(("let the kernel gather it", gather))
        if all(a.core in out.axes for out in self.signature.outputs):
            what = "only if its indices are independent"
            ways.append((what, f"{self.kernel}.with_policies({a.core}=Parallel())"))
        else:
            ways.append(
                ("only if the kernel is additive over it", f"{self.kernel}.with_policies({a.core}=Sum())"),
            )
        return ways

    def not_a_multiple(self, x: InputPlan, core: str, parts: Sequence[AxisPlan], divisor: int) -> MultipleOfError:
        size, whole = (math.prod(n) for n in ([a.own_size for a in parts], [a.size for a in parts]))
        shards = math.prod(a.shards for a in parts if not a.gathered)
        mesh_axes = tuple(m for a in parts for m in a.kernel_mesh_axes)
        first = parts[0].name
        sharding = f" ({whole} over {mesh_axes_text(mesh_axes, self.sizes)}, {parts[0].origin})" if shards > 1 else ""
        fits = -(-whole // (divisor * shards)) * divisor * shards
        return MultipleOfError(
            f"{self.who} needs the local size of its {core!r} to be a multiple of {divisor}, but axis "
            f"{', '.join(repr(a.name) for a in parts)} of argument {x.label!r} has {size} on each device{sharding}."
            + ways_out(
                ("pad it to the next size that fits", f'Axis("{first}", {fits})'),
                ("or shard it over fewer devices", _unmap(first)) if shards > 1 else None,
            )
        )

    def inconsistent(
        self, first: InputPlan, axis: AxisPlan, second: InputPlan, other: AxisPlan
    ) -> InconsistentShardingError:
        found = " but ".join(
            f"{axis_text(a.name, a.core)} over {mesh_axes_text(a.mesh_axes, self.sizes)} in argument {x.label!r} "
            f"({a.origin})"
            for x, a in ((first, axis), (second, other))
        )
        return InconsistentShardingError(
            f"{self.who}: what must lie alike is sharded differently: {found}."
            + ways_out(("say which it is", f'{self.kernel}(..., axis_mapping={{"{axis.name}": "..."}})'))
        )

    def conflict(
        self, mesh_axis: str, first: InputPlan, axis: AxisPlan, second: InputPlan, other: AxisPlan
    ) -> MeshAxisConflictError:
        core = other.core or axis.core
        return MeshAxisConflictError(
            f"{self.who}: {mesh_axes_text((mesh_axis,), self.sizes)} shards {axis_text(axis.name, axis.core)} of "
            f"argument {first.label!r} and {axis_text(other.name, other.core)} of argument {second.label!r}, "
            f"{other.origin}: each device would combine one block of the one with one block of the other only, and "
            "most pairs would be missing."
            + ways_out(
                ("keep one of them whole for this call", f"{self.kernel}(..., {_unmap(other.name)})"),
                ("let the kernel gather one", f"{self.kernel}.with_policies({core}=Gather())") if core else None,
            )
        )

    def flattened(self, core: str, policy: Policy, names: Sequence[str]) -> BindingError:
        """A core axis whose neighbours or offsets count, bound to several array axes."""
        listed = ", ".join(map(repr, names))
        return BindingError(
            f"{self.who}: core axis {core!r} is {policy}() and bound to several array axes {listed}: neighbours and "
            "offsets along their flattened axis are those of none of them."
            + ways_out(("flatten them first", f'array.flatten_axes(({listed}), "{core}")'))
        )

    def not_aligned(self, core: str, size: int, leader: str, other: int) -> AxisSizeError:
        return AxisSizeError(
            f"{self.who}: core axis {core!r} has size {size}, but {leader!r}, which its Halo(aligned_with={leader!r}) "
            f"says it lies beside, has {other}: their shards would not hold the same rows."
            + ways_out(("pad one of them to the other's size", f"{max(size, other)}"))
        )

    def twice_in_output(self, index: int, a: AxisPlan, mesh_axis: str, other: str) -> MeshAxisConflictError:
        """Two axes that may share a mesh axis inside the kernel meet in one output."""
        return MeshAxisConflictError(
            f"{self.who}: output {index} has {mesh_axes_text((mesh_axis,), self.sizes)} on two of its axes, {other!r} "
            f"and {a.name!r}, {a.origin}: each device holds one block of the diagonal, and the others are missing."
            + ways_out(("keep one of them whole for this call", f"{self.kernel}(..., {_unmap(a.name)})"))
        )

    def not_reduced(self, index: int, x: InputPlan, a: AxisPlan, mesh_axes: MeshAxes) -> ShardedAxisError:
        """A sharded `Manual` axis that an output lacks, and no word of what the shards return there."""
        return ShardedAxisError(
            f"{self.who}: {axis_text(a.name, a.core)} of argument {x.label!r} is sharded over "
            f"{mesh_axes_text(mesh_axes, self.sizes)}, {a.origin}, under Manual(), but output {index} is not: which "
            "shard's result is it?"
            + ways_out(
                (
                    "if the kernel gives every shard the whole result",
                    f"{self.kernel}.with_policies({a.core}=Manual(reduces=True))",
                ),
                (
                    "if each shard has a part of the sum",
                    f"{self.kernel}.with_policies({a.core}=Sum())",
                ),
                ("or keep it whole for this call", f"{self.kernel}(..., {_unmap(a.name)})"),
            )
        )

    def raw_key(self, x: InputPlan) -> ArgumentError:
        return ArgumentError(
            f"{self.who}: argument {x.label!r} is a uint32 array of shape {x.shape} without a place in the signature: "
            "it looks like a raw PRNG key, with which every shard would draw the same numbers."
            + ways_out(
                ("pass a typed key, which is folded per shard", f"jax.random.wrap_key_data({x.label})"),
                ("or say that all shards share it", 'named_kernel(..., rng="replicated")'),
            )
        )


def _filled(remedies: Remedies, a: AxisPlan) -> Remedies:
    mesh_axes = ", ".join(f'"{m}"' for m in a.mesh_axes)
    return [(what, code.format(axis=a.name, mesh_axes=mesh_axes)) for what, code in remedies]
