# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Make the plan of a call from its NamedArrays, the kernel's signature and policies, and the mesh. All refusals are here."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from haliax_kernels.arguments import ArrayInfo
from haliax_kernels.binding import Bound, FrozenAxes, bind
from haliax_kernels.errors import (
    ArgumentError,
    InconsistentShardingError,
    ManualAxisError,
    MeshAxisConflictError,
    MissingShardingError,
    MultipleOfError,
    NamedKernelError,
    ShardedAxisError,
    UnevenShardingError,
    UnknownMeshAxisError,
    axis_text,
    bytes_text,
    mesh_axes_text,
    ways_out,
)
from haliax_kernels.mesh import FROM_ARGUMENT, MeshAxes, MeshContext, ShardingSource
from haliax_kernels.plan import AxisPlan, InputPlan, KernelPlan, OutputPlan
from haliax_kernels.policies import Gather, Local, Parallel, Policy, Sum
from haliax_kernels.signature import KernelSignature


@dataclass(frozen=True)
class KernelSpec:
    """What the decorator was told about a kernel.

    Attributes:
        name: the kernel's name, for messages.
        signature: its arguments and outputs.
        policies: the policy of every core axis.
        multiple_of: what local sizes must be multiples of.
        loop: `vmap`, or `collapse` for one single leading dimension.
        rng: `fold` folds the shard's index into PRNG keys, `replicated` leaves them alone.
        remedies: the ways out for a refused core axis instead of the general ones, as (what it does, code).
    """

    name: str
    signature: KernelSignature
    policies: tuple[tuple[str, Policy], ...]
    multiple_of: tuple[tuple[str, int], ...] = ()
    loop: Literal["vmap", "collapse"] = "vmap"
    rng: Literal["fold", "replicated"] = "fold"
    remedies: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()


def make_plan(
    spec: KernelSpec, infos: Sequence[ArrayInfo], axes: FrozenAxes, mesh: MeshContext | None, source: ShardingSource
) -> KernelPlan:
    """The plan of one call. Never raises a `NamedKernelError`: what cannot run is in the plan's `refusals`."""
    try:
        bound = bind(spec.signature, axes, infos, spec.name)
    except NamedKernelError as refusal:
        return KernelPlan(spec.name, spec.signature, mesh, refusals=(refusal,))
    return _Planner(spec, tuple(infos), bound, mesh, source).plan()


class _Planner:
    def __init__(
        self,
        spec: KernelSpec,
        infos: tuple[ArrayInfo, ...],
        bound: Bound,
        mesh: MeshContext | None,
        source: ShardingSource,
    ):
        self.spec, self.infos, self.bound, self.source = spec, infos, bound, source
        self.context = mesh
        self.mesh = mesh if mesh is not None and mesh.needs_shard_map and not self._on_one_device(mesh) else None
        self.sizes = dict(mesh.sizes + mesh.manual) if mesh is not None else {}
        self.policies = dict(spec.policies)
        self.refusals: list[NamedKernelError] = []

    def plan(self) -> KernelPlan:
        spec, signature = self.spec, self.spec.signature
        self._check_known()
        inputs = [self._input(i) for i in range(len(self.infos))]
        if not self.refusals:
            inputs = self._unify(inputs)
        for x in inputs:
            self._check_input(x)
        varies = self._check_conflicts(inputs) if not self.refusals else {}
        self._check_keys(inputs, varies)
        loop = tuple(self.bound.loop_axes)
        placed = [{a.name for a in x.axes if a.loop} for x in inputs if x.place is not None]
        common = tuple(a for a in loop if all(a in has for has in placed))
        rest = tuple(a for a in loop if a not in common)
        collapse = spec.loop == "collapse"
        if collapse:
            vmapped, leading = (), loop
        elif signature.batched:
            vmapped, leading = rest, common
        else:
            # Axes that some argument lacks go innermost: consecutive grid steps then read the same block of it.
            vmapped, leading = common + rest, ()
        outputs, cut = self._outputs(inputs, varies)
        work = frozenset(varies) | cut
        inputs = [self._with_gradient(x, work, varies) for x in inputs]
        return KernelPlan(
            kernel=spec.name,
            signature=signature,
            mesh=self.mesh,
            bindings=tuple(self.bound.names.items()),
            loop_axes=loop,
            inputs=tuple(inputs),
            outputs=outputs,
            vmapped=vmapped,
            leading=leading,
            collapse=collapse,
            refusals=tuple(self.refusals),
            notes=self._notes(work),
            reshards=tuple(self._reshard_text(x, i) for x, i in zip(inputs, self.infos, strict=True) if x.reshard),
        )

    # What is known of the shardings

    def _on_one_device(self, mesh: MeshContext) -> bool:
        """Eager, no mapping, and no array lies on several devices: there is nothing to run in parallel."""
        silent = self.source.silent and not mesh.manual
        return silent and all(
            p.dims is None and not p.unknown and p.opaque is None for p in (i.placement for i in self.infos)
        )

    def _check_known(self) -> None:
        if self.mesh is None or not self.source.silent or self.mesh.auto_devices == 1:
            return
        name = self.spec.name
        for info in self.infos:
            if info.placement.opaque is not None:
                self.refusals.append(
                    MissingShardingError(
                        f"kernel {name!r}: argument {info.label!r} lies on several devices under a "
                        f"{info.placement.opaque}, which names no mesh axes."
                        + ways_out(("say how its axes are sharded", f"{name}(..., axis_mapping=...)"))
                    )
                )
            elif info.placement.unknown and info.axes and (info.named or info.place is not None):
                self.refusals.append(
                    MissingShardingError(
                        f"kernel {name!r} is called under jit with a mesh of several devices ({self._mesh_text()}, "
                        f"{self.mesh.source}), and nothing says how argument {info.label!r} is sharded: there is no axis "
                        "mapping, and JAX does not show a traced array's placement on Auto mesh axes. XLA would gather it "
                        "and compute everything on every device."
                        + ways_out(
                            ("set a mapping for the call", f'{name}(..., axis_mapping={{"batch": "data"}})'),
                            ("set a mapping around it", 'with haliax.axis_mapping({"batch": "data"}): ...'),
                            ("if nothing is sharded, say so", f"{name}(..., axis_mapping={{}})"),
                        )
                    )
                )
                return

    def _mesh_text(self) -> str:
        return ", ".join(f"{n} {s}" for n, s in self.context.sizes) if self.context else "none"

    def _input(self, i: int) -> InputPlan:
        info, roles = self.infos[i], self.bound.roles[i]
        shape = tuple(n for _, n in info.axes)
        axes = tuple(
            self._axis(info, dim, name, core, loop, size)
            for dim, ((name, core, loop), size) in enumerate(zip(roles, shape, strict=False))
        )
        self._check_plain(info)
        return InputPlan(info.label, info.place, info.named, axes, shape, info.dtype)

    def _axis(self, info: ArrayInfo, dim: int, name: str, core: str | None, loop: bool, size: int) -> AxisPlan:
        policy = None if loop else self.policies[core] if core is not None else Local()
        plain = AxisPlan(name, core, loop, size, policy=policy)
        if self.context is None:
            return plain
        mesh_axes, origin = self.source.mesh_axes(name, dim, info.placement, self.context)
        unknown = [m for m in mesh_axes if m not in self.sizes]
        if unknown:
            near = difflib.get_close_matches(unknown[0], list(self.sizes), 1)
            self.refusals.append(
                UnknownMeshAxisError(
                    f"kernel {self.spec.name!r}: {axis_text(name, core)} of argument {info.label!r} is mapped to mesh axis "
                    f"{unknown[0]!r}, {origin}, but the mesh ({self.context.source}) has only: {self._mesh_text()}."
                    + ways_out(
                        ("map it to one of these", f'axis_mapping={{..., "{name}": "{near[0] if near else "..."}"}}'),
                        ("or to none", f'axis_mapping={{..., "{name}": None}}'),
                    )
                )
            )
            return plain
        manual = dict(self.context.manual)
        taken = tuple(m for m in mesh_axes if manual.get(m, 1) > 1)
        if taken and not (loop or isinstance(policy, Parallel)):
            self._refuse_manual(info, plain, taken, origin)
        mesh_axes = tuple(m for m in mesh_axes if m not in manual)
        if self.mesh is None:
            return plain
        shards = math.prod(self.sizes[m] for m in mesh_axes)
        return replace(plain, mesh_axes=mesh_axes, shards=shards, origin=origin)

    def _refuse_manual(self, info: ArrayInfo, axis: AxisPlan, taken: MeshAxes, origin: str) -> None:
        name = self.spec.name
        self.refusals.append(
            ManualAxisError(
                f"kernel {name!r} needs {axis_text(axis.name, axis.core)} of argument {info.label!r} "
                + ("whole on every device" if not isinstance(axis.policy, Sum | Gather) else f"under {axis.policy}()")
                + f", but it is mapped to {mesh_axes_text(taken, self.sizes)}, {origin}, which {self.context.source} "  # type: ignore[union-attr]
                "has already made manual: the array here is one shard of it, and the kernel would take it for the whole."
                + ways_out(
                    ("call the kernel outside that shard_map", f"{name}(...)  # it makes its own"),
                    (
                        "if the array here is the whole axis",
                        f'{name}(..., axis_mapping={{**mapping, "{axis.name}": None}})',
                    ),
                )
            )
        )

    def _check_plain(self, info: ArrayInfo) -> None:
        """A plain array without a place is replicated; one that is sharded cannot be."""
        if info.named or info.place is not None or self.mesh is None or info.placement.dims is None:
            return
        sharded = tuple(m for dim in info.placement.dims for m in dim if self.sizes.get(m, 1) > 1)
        if sharded:
            self.refusals.append(
                ShardedAxisError(
                    f"kernel {self.spec.name!r}: argument {info.label!r} is a plain array without a place in the signature "
                    f'"{self.spec.signature}", so every device needs the whole of it, but it is sharded over '
                    f"{mesh_axes_text(sharded, self.sizes)}, from its own sharding."
                    + ways_out(
                        ("name its axes", f"haliax.named({info.label}, (...))"),
                        ("or replicate it first", f"jax.device_put({info.label}, NamedSharding(mesh, P()))"),
                    )
                )
            )

    # The checks

    def _check_input(self, x: InputPlan) -> None:
        used: dict[str, str] = {}
        for a in x.axes:
            for m in a.mesh_axes:
                if m in used:
                    self.refusals.append(
                        MeshAxisConflictError(
                            f"kernel {self.spec.name!r}: argument {x.label!r} has {mesh_axes_text((m,), self.sizes)} on two "
                            f"of its axes, {used[m]!r} and {a.name!r}, {a.origin}; one mesh axis can shard one axis only."
                            + ways_out(
                                ("drop one of them", f'axis_mapping={{**mapping, "{a.name}": None}}'),
                            )
                        )
                    )
                used[m] = a.name
            self._check_even(x, a)
            self._check_local(x, a)
        self._check_multiple(x)

    def _check_even(self, x: InputPlan, a: AxisPlan) -> None:
        if a.size % a.shards:
            fits = -(-a.size // a.shards) * a.shards
            self.refusals.append(
                UnevenShardingError(
                    f"kernel {self.spec.name!r}: {axis_text(a.name, a.core)} of argument {x.label!r} has size {a.size}, which "
                    f"is not divisible by {mesh_axes_text(a.mesh_axes, self.sizes)}, {a.origin}."
                    + ways_out(
                        ("pad it to the next size that fits", f'Axis("{a.name}", {fits})'),
                        ("or keep it whole", f'axis_mapping={{**mapping, "{a.name}": None}}'),
                    )
                )
            )

    def _check_local(self, x: InputPlan, a: AxisPlan) -> None:
        if a.loop or a.shards == 1 or not isinstance(a.policy, Local):
            return
        name, core, signature = self.spec.name, a.core, self.spec.signature
        ways: list[tuple[str, str] | None] = [
            ("keep it whole for this call", f'{name}(..., axis_mapping={{**mapping, "{a.name}": None}})')
        ]
        if core is None:
            ways.append(("or give the argument a place in the signature", f'"{signature}"'))
        elif core in dict(self.spec.remedies):
            mesh_axes = ", ".join(f'"{m}"' for m in a.mesh_axes)
            ways = [
                (what, code.format(axis=a.name, mesh_axes=mesh_axes)) for what, code in dict(self.spec.remedies)[core]
            ]
        else:
            size = bytes_text(x.local_bytes * a.shards)
            ways.append(
                (
                    "let the kernel gather it",
                    f"{name}.with_policies({core}=Gather())    # all-gathers {size} per device",
                )
            )
            if all(core in out.axes for out in signature.outputs):
                ways.append(("only if its indices are independent", f"{name}.with_policies({core}=Parallel())"))
            elif core in signature.input_axes:
                ways.append(("only if the kernel is additive over it", f"{name}.with_policies({core}=Sum())"))
        self.refusals.append(
            ShardedAxisError(
                f"kernel {name!r} needs {axis_text(a.name, core)} whole on every device, but argument {x.label!r} has it "
                f"sharded over {mesh_axes_text(a.mesh_axes, self.sizes)}, {a.origin}." + ways_out(*ways)
            )
        )

    def _check_multiple(self, x: InputPlan) -> None:
        for core, divisor in self.spec.multiple_of:
            parts = [a for a in x.axes if a.core == core and not a.loop]
            size = math.prod(a.kernel_size for a in parts)
            if not parts or size % divisor == 0:
                continue
            whole = math.prod(a.size for a in parts)
            shards = math.prod(a.shards for a in parts if not a.gathered)
            sharding = (
                f" ({whole} over {mesh_axes_text(sum((a.kernel_mesh_axes for a in parts), ()), self.sizes)}, "
                f"{parts[0].origin})"
                if shards > 1
                else ""
            )
            names = ", ".join(repr(a.name) for a in parts)
            self.refusals.append(
                MultipleOfError(
                    f"kernel {self.spec.name!r} needs the local size of its {core!r} to be a multiple of {divisor}, but axis "
                    f"{names} of argument {x.label!r} has {size} on each device{sharding}."
                    + ways_out(
                        (
                            "pad it to the next size that fits",
                            f'Axis("{parts[0].name}", {-(-whole // (divisor * shards)) * divisor * shards})',
                        ),
                        ("or shard it over fewer devices", f'axis_mapping={{**mapping, "{parts[0].name}": None}}')
                        if shards > 1
                        else None,
                    )
                )
            )

    def _unify(self, inputs: list[InputPlan]) -> list[InputPlan]:
        """Give an axis that several arguments share one sharding; where one has it whole, its shard is cut for free."""
        chosen: dict[tuple[tuple[str, str], str], tuple[InputPlan, AxisPlan]] = {}
        for x in inputs:
            for a in x.axes:
                if isinstance(a.policy, Gather | Local) or not a.mesh_axes:
                    continue
                first, axis = chosen.setdefault((a.identity, a.name), (x, a))
                if axis.mesh_axes != a.mesh_axes:
                    self.refusals.append(
                        InconsistentShardingError(
                            f"kernel {self.spec.name!r}: {axis_text(a.name, a.core)} is sharded over "
                            f"{mesh_axes_text(axis.mesh_axes, self.sizes)} in argument {first.label!r} ({axis.origin}), but "
                            f"over {mesh_axes_text(a.mesh_axes, self.sizes)} in argument {x.label!r} ({a.origin})."
                            + ways_out(
                                ("say which it is", f'{self.spec.name}(..., axis_mapping={{"{a.name}": "..."}})'),
                            )
                        )
                    )
        return [
            replace(x, axes=axes, reshard=self._differs(x, axes, info))
            for x, info in zip(inputs, self.infos, strict=True)
            for axes in [tuple(self._unified(a, chosen) for a in x.axes)]
        ]

    @staticmethod
    def _unified(a: AxisPlan, chosen: dict[tuple[tuple[str, str], str], tuple[InputPlan, AxisPlan]]) -> AxisPlan:
        known = chosen.get((a.identity, a.name))
        if known is None or isinstance(a.policy, Gather | Local):
            return a
        axis = known[1]
        return replace(a, mesh_axes=axis.mesh_axes, shards=axis.shards, origin=axis.origin)

    def _differs(self, x: InputPlan, axes: tuple[AxisPlan, ...], info: ArrayInfo) -> bool:
        if self.mesh is None or not info.placement.typed or info.placement.dims is None:
            return False
        explicit = [m for m in self.mesh.axis_names if m not in self.mesh.auto]
        wanted = [a.mesh_axes for a in axes] or [()] * len(x.shape)
        return any(
            tuple(m for m in own if m in explicit) != tuple(m for m in new if m in explicit)
            for own, new in zip(info.placement.dims, wanted, strict=True)
        )

    def _check_conflicts(self, inputs: list[InputPlan]) -> dict[str, tuple[str, str]]:
        """Which axis each mesh axis shards inside the kernel; it may be one only, or blocks of different axes would meet."""
        varies: dict[str, tuple[str, str]] = {}
        holder: dict[str, tuple[InputPlan, AxisPlan]] = {}
        for x in inputs:
            for a in x.axes:
                for m in a.kernel_mesh_axes:
                    if self.sizes[m] == 1:
                        continue
                    if varies.setdefault(m, a.identity) != a.identity:
                        other, axis = holder[m]
                        self.refusals.append(
                            MeshAxisConflictError(
                                f"kernel {self.spec.name!r}: {mesh_axes_text((m,), self.sizes)} shards "
                                f"{axis_text(axis.name, axis.core)} of argument {other.label!r} and "
                                f"{axis_text(a.name, a.core)} of argument {x.label!r}, {a.origin}: each device would combine "
                                "one block of the one with one block of the other only, and most pairs would be missing."
                                + ways_out(
                                    (
                                        "keep one of them whole for this call",
                                        f'{self.spec.name}(..., axis_mapping={{**mapping, "{a.name}": None}})',
                                    ),
                                    (
                                        "let the kernel gather one",
                                        f"{self.spec.name}.with_policies({a.core or axis.core}=Gather())",
                                    )
                                    if a.core or axis.core
                                    else None,
                                )
                            )
                        )
                    holder.setdefault(m, (x, a))
        return varies

    def _check_keys(self, inputs: list[InputPlan], varies: dict[str, tuple[str, str]]) -> None:
        if self.spec.rng == "replicated" or not varies:
            return
        for x, info in zip(inputs, self.infos, strict=True):
            if info.looks_like_raw_key:
                self.refusals.append(
                    ArgumentError(
                        f"kernel {self.spec.name!r}: argument {x.label!r} is a uint32 array of shape {x.shape} without a "
                        "place in the signature: it looks like a raw PRNG key, which every shard would use to draw the "
                        "same numbers."
                        + ways_out(
                            ("pass a typed key, which is folded per shard", f"jax.random.wrap_key_data({x.label})"),
                            ("or say that all shards share it", 'named_kernel(..., rng="replicated")'),
                        )
                    )
                )

    # Outputs and gradients

    def _outputs(
        self, inputs: list[InputPlan], varies: dict[str, tuple[str, str]]
    ) -> tuple[tuple[OutputPlan, ...], frozenset[str]]:
        """The outputs, and the mesh axes over which only their slices differ."""
        known: dict[tuple[tuple[str, str], str], AxisPlan] = {}
        for x in inputs:
            for a in x.axes:
                if x.place is not None:
                    known.setdefault((a.identity, a.name), a)
                    if known[a.identity, a.name].shards == 1 < a.shards:
                        known[a.identity, a.name] = a
        cut: set[str] = set()
        drafts = []
        for out in self.spec.signature.outputs:
            axes, slices = [], []
            for name in self.bound.loop_axes:
                axes.append(known[("loop", name), name])
                slices.append(())
            for core in out.axes:
                for name in self.bound.names[core]:
                    size = self.bound.given.get((core, name), -1)
                    a = known.get((("core", core), name), AxisPlan(name, core, False, size, policy=self.policies[core]))
                    slices.append(())
                    if a.gathered:
                        if any(m in varies for m in a.mesh_axes):
                            a = replace(a, mesh_axes=(), shards=1)  # its mesh axes shard something else in the kernel
                        else:
                            slices[-1] = a.mesh_axes
                            cut.update(m for m in a.mesh_axes if self.sizes[m] > 1)
                    axes.append(a)
            summed = [m for m, (kind, core) in varies.items() if kind == "core" and core not in out.axes]
            drafts.append(OutputPlan(tuple(axes), tuple(summed), tuple(slices)))
        return tuple(
            replace(d, once=tuple(m for m in sorted(cut) if not any(m in s for s in d.slices))) for d in drafts
        ), frozenset(cut)

    def _with_gradient(self, x: InputPlan, work: frozenset[str], varies: dict[str, tuple[str, str]]) -> InputPlan:
        own = {m for a in x.axes for m in a.kernel_mesh_axes}
        order = self.mesh.axis_names if self.mesh is not None else ()
        info = next(i for i in self.infos if i.label == x.label)
        fold = tuple(m for m in order if m in varies and m not in own) if self.spec.rng == "fold" and info.is_key else ()
        return replace(x, fold=fold, grad_sum=tuple(m for m in order if m in work and m not in own))

    def _notes(self, work: frozenset[str]) -> tuple[str, ...]:
        if self.mesh is None or self.refusals:
            return ()
        idle = [n for n, s in self.mesh.sizes if s > 1 and n not in work]
        return tuple(
            f"{mesh_axes_text((m,), self.sizes)} is idle in this call: its devices all do the same work" for m in idle
        )

    def _reshard_text(self, x: InputPlan, info: ArrayInfo) -> str:
        found = ", ".join("+".join(d) or "-" for d in info.placement.dims or ())
        wanted = ", ".join("+".join(a.mesh_axes) or "-" for a in x.axes) or "replicated"
        origin = next((a.origin for a in x.axes if a.origin), FROM_ARGUMENT)
        return f"argument {x.label!r}: ({found}) in its type, ({wanted}) {origin}"
