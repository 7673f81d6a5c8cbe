# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Make the plan of a call from its arrays' axes, the kernel's signature and policies, and the mesh."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from haliax_kernels.arguments import ArrayInfo
from haliax_kernels.binding import Bound, FrozenAxes, bind
from haliax_kernels.errors import NamedKernelError, mesh_axes_text
from haliax_kernels.mesh import MeshAxes, MeshContext, ShardingSource
from haliax_kernels.plan import AxisPlan, InputPlan, KernelPlan, OutputPlan
from haliax_kernels.policies import Gather, Halo, Local, Manual, Parallel, Policy
from haliax_kernels.refusals import Refusals
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
        takes_shard: whether the kernel has a keyword `shard` for its `ShardContext`.
    """

    name: str
    signature: KernelSignature
    policies: tuple[tuple[str, Policy], ...]
    multiple_of: tuple[tuple[str, int], ...] = ()
    loop: Literal["vmap", "collapse"] = "vmap"
    rng: Literal["fold", "replicated"] = "fold"
    remedies: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    takes_shard: bool = False


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
        self.leaders = {c: p.aligned_with for c, p in spec.policies if isinstance(p, Halo) and p.aligned_with}
        self.refuse = Refusals(spec.name, spec.signature, mesh)
        self.refusals: list[NamedKernelError] = []

    def plan(self) -> KernelPlan:
        spec, signature = self.spec, self.spec.signature
        self._check_known()
        inputs = [self._input(i) for i in range(len(self.infos))]
        if not self.refusals:
            inputs = self._unify(inputs)
        self._check_contiguous()
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
        inputs = [self._with_gradient(x, info, work, varies) for x, info in zip(inputs, self.infos, strict=True)]
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
            reshards=tuple(
                self._reshard_text(x, info)
                for x, info in zip(inputs, self.infos, strict=True)
                if self._disagrees(x, info, self.sizes)
            ),
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
        for info in self.infos:
            if info.placement.opaque is not None:
                self.refusals.append(self.refuse.opaque_sharding(info))
            elif info.placement.unknown and info.axes and (info.named or info.place is not None):
                self.refusals.append(self.refuse.nothing_known(info))
                return

    def _input(self, i: int) -> InputPlan:
        info, roles = self.infos[i], self.bound.roles[i]
        shape = tuple(n for _, n in info.axes)
        # A plain array without a place has no roles: it is replicated.
        axes = tuple(
            self._axis(info, dim, AxisPlan(name, core, loop, size, policy=self._policy(core, loop)))
            for dim, ((name, core, loop), size) in enumerate(zip(roles, shape, strict=False))
        )
        self._check_plain(info)
        return InputPlan(info.label, info.place, info.named, axes, shape, info.dtype)

    def _policy(self, core: str | None, loop: bool) -> Policy | None:
        if loop:
            return None
        return self.policies[core] if core is not None else Local()

    def _axis(self, info: ArrayInfo, dim: int, plain: AxisPlan) -> AxisPlan:
        """`plain` with its sharding, if it has any."""
        if self.context is None:
            return plain
        mesh_axes, origin = self.source.mesh_axes(plain.name, dim, info.placement, self.context)
        unknown = [m for m in mesh_axes if m not in self.sizes]
        if unknown:
            self.refusals.append(self.refuse.unknown_mesh_axis(info, plain, unknown[0], origin))
            return plain
        manual = dict(self.context.manual)
        taken = tuple(m for m in mesh_axes if manual.get(m, 1) > 1)
        # The shard of a shard may be computed apart just as well, but where it lies in the whole is not known here.
        apart = isinstance(plain.policy, Parallel) and not self.spec.takes_shard
        if taken and not (plain.loop or apart):
            self.refusals.append(self.refuse.already_manual(info, plain, taken, origin))
        mesh_axes = tuple(m for m in mesh_axes if m not in manual)
        if self.mesh is None or not mesh_axes:
            return plain
        shards = math.prod(self.sizes[m] for m in mesh_axes)
        return replace(plain, mesh_axes=mesh_axes, shards=shards, origin=origin)

    def _check_plain(self, info: ArrayInfo) -> None:
        """A plain array without a place is replicated; one that is sharded cannot be."""
        if info.named or info.place is not None or self.mesh is None or info.placement.dims is None:
            return
        sharded = tuple(m for dim in info.placement.dims for m in dim if self.sizes.get(m, 1) > 1)
        if sharded:
            self.refusals.append(self.refuse.sharded_plain_array(info, sharded))

    # The checks

    def _check_input(self, x: InputPlan) -> None:
        remedies = dict(self.spec.remedies)
        used: dict[str, str] = {}
        for a in x.axes:
            for m in a.mesh_axes:
                if m in used:
                    self.refusals.append(self.refuse.mesh_axis_twice(x, a, m, used[m]))
                used[m] = a.name
            if a.size % a.shards:
                self.refusals.append(self.refuse.uneven(x, a))
            if isinstance(a.policy, Local) and a.shards > 1:
                self.refusals.append(self.refuse.sharded(x, a, remedies.get(a.core) if a.core else None))
        for core, divisor in self.spec.multiple_of:
            parts = [a for a in x.axes if a.core == core and not a.loop]
            if parts and math.prod(a.own_size for a in parts) % divisor:
                self.refusals.append(self.refuse.not_a_multiple(x, core, parts, divisor))

    def _check_contiguous(self) -> None:
        """Where rows have neighbours, or an offset, they are rows of one array axis; aligned ones are as many."""
        for core, policy in self.policies.items():
            names = self.bound.names[core]
            if len(names) > 1 and (isinstance(policy, Halo | Manual) or core in self.leaders.values()):
                self.refusals.append(self.refuse.flattened(core, policy, names))
        sizes = {
            core: next(
                s
                for i, r in zip(self.infos, self.bound.roles, strict=True)
                for (_, c, _), (_, s) in zip(r, i.axes, strict=False)
                if c == core
            )
            for pair in self.leaders.items()
            for core in pair
        }
        for core, leader in self.leaders.items():
            if sizes[core] != sizes[leader]:
                self.refusals.append(self.refuse.not_aligned(core, sizes[core], leader, sizes[leader]))

    def _lies_with(self, a: AxisPlan) -> tuple[tuple[str, str], str]:
        """What has the same sharding: an axis and its namesakes, and the axis that they are aligned with."""
        leader = self.leaders.get(a.core or "")
        return (a.identity, a.name) if leader is None else (("core", leader), self.bound.names[leader][0])

    def _group(self, a: AxisPlan) -> tuple[str, str]:
        """What one mesh axis may shard inside the kernel: axes that lie alike, or any that the kernel sees to."""
        core = self.leaders.get(a.core or "", a.core)
        if core is None:
            return a.identity
        return ("manual", "") if isinstance(self.policies[core], Manual) else ("core", core)

    def _unify(self, inputs: list[InputPlan]) -> list[InputPlan]:
        """Give an axis that several arguments share one sharding; one that has it whole is cut for free."""
        chosen: dict[tuple[tuple[str, str], str], tuple[InputPlan, AxisPlan]] = {}
        for x in inputs:
            for a in x.axes:
                if isinstance(a.policy, Gather | Local) or not a.mesh_axes:
                    continue
                first, axis = chosen.setdefault(self._lies_with(a), (x, a))
                if axis.mesh_axes != a.mesh_axes:
                    self.refusals.append(self.refuse.inconsistent(first, axis, x, a))

        def unified(a: AxisPlan) -> AxisPlan:
            known = chosen.get(self._lies_with(a))
            if known is None or isinstance(a.policy, Gather | Local):
                return a
            _, axis = known
            if axis.mesh_axes == a.mesh_axes:
                return a
            return replace(a, mesh_axes=axis.mesh_axes, shards=axis.shards, origin=axis.origin)

        found = []
        for x in inputs:
            axes = tuple(unified(a) for a in x.axes)
            same = all(a is b for a, b in zip(axes, x.axes, strict=True))
            found.append(x if same else replace(x, axes=axes))
        return found

    def _disagrees(self, x: InputPlan, info: ArrayInfo, among: Iterable[str]) -> bool:
        """Whether the array lies otherwise than planned, as far as the mesh axes `among` go."""
        if self.mesh is None or info.placement.dims is None:
            return False
        counted = {m for m in among if self.sizes.get(m, 1) > 1}
        wanted = [a.mesh_axes for a in x.axes] or [()] * len(x.shape)
        return any(
            [m for m in own if m in counted] != [m for m in new if m in counted]
            for own, new in zip(info.placement.dims, wanted, strict=True)
        )

    def _check_conflicts(self, inputs: list[InputPlan]) -> dict[str, tuple[str, str]]:
        """Which axis each mesh axis shards inside the kernel (its group): one only, or blocks of different axes would
        meet."""
        holder: dict[str, tuple[InputPlan, AxisPlan]] = {}
        for x in inputs:
            for a in x.axes:
                for m in a.kernel_mesh_axes:
                    if self.sizes[m] == 1:
                        continue
                    other, axis = holder.setdefault(m, (x, a))
                    if self._group(axis) != self._group(a):
                        self.refusals.append(self.refuse.conflict(m, other, axis, x, a))
        return {m: self._group(axis) for m, (_, axis) in holder.items()}

    def _check_keys(self, inputs: list[InputPlan], varies: dict[str, tuple[str, str]]) -> None:
        if self.spec.rng == "fold" and varies:
            self.refusals += [
                self.refuse.raw_key(x) for x, info in zip(inputs, self.infos, strict=True) if info.looks_like_raw_key
            ]

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
        for j, out in enumerate(self.spec.signature.outputs):
            axes: list[AxisPlan] = []
            slices: list[MeshAxes] = []
            used: dict[str, str] = {}
            for name in self.bound.loop_axes:
                axes.append(self._unused(known[("loop", name), name], used))
                slices.append(())
            for core in out.axes:
                for name in self.bound.names[core]:
                    size = self.bound.given.get((core, name), -1)
                    a = known.get(
                        (("core", core), name), AxisPlan(name, core, False, size, policy=self.policies[core])
                    )
                    if a.gathered and any(m in varies or m in used for m in self._several(a.mesh_axes)):
                        a = replace(a, mesh_axes=(), shards=1)  # they shard something else here
                    self._check_unused(j, a, used)
                    a = self._unused(a, used)
                    slices.append(a.mesh_axes if a.gathered else ())
                    cut.update(self._several(slices[-1]))
                    axes.append(a)
            lacking = {m: group for m, group in varies.items() if m not in used}
            summed = tuple(m for m, (kind, _) in lacking.items() if kind == "core")
            manual = tuple(m for m, (kind, _) in lacking.items() if kind == "manual")
            self._check_reduced(j, inputs, manual)
            drafts.append(OutputPlan(tuple(axes), summed, tuple(slices), once=manual))
        return tuple(
            replace(d, once=d.once + tuple(m for m in sorted(cut) if not any(m in s for s in d.slices)))
            for d in drafts
        ), frozenset(cut)

    def _unused(self, a: AxisPlan, used: dict[str, str]) -> AxisPlan:
        """`a` without the mesh axes of one device that an earlier axis of the output has; marks the others."""
        kept = tuple(m for m in a.mesh_axes if self.sizes[m] > 1 or m not in used)
        used.update(dict.fromkeys(kept, a.name))
        return a if kept == a.mesh_axes else replace(a, mesh_axes=kept)

    def _check_unused(self, index: int, a: AxisPlan, used: dict[str, str]) -> None:
        for m in self._several(a.mesh_axes):
            if m in used:
                self.refusals.append(self.refuse.twice_in_output(index, a, m, used[m]))

    def _check_reduced(self, index: int, inputs: list[InputPlan], mesh_axes: MeshAxes) -> None:
        """`Manual` axes that an output lacks must be reduced by the kernel."""
        seen: set[str] = set()
        for x in inputs:
            for a in x.axes:
                if not isinstance(a.policy, Manual) or a.policy.reduces or a.core is None or a.core in seen:
                    continue
                over = tuple(m for m in a.mesh_axes if m in mesh_axes)
                if over:
                    seen.add(a.core)
                    self.refusals.append(self.refuse.not_reduced(index, x, a, over))

    def _several(self, mesh_axes: MeshAxes) -> MeshAxes:
        return self.mesh.several(mesh_axes) if self.mesh is not None else ()

    def _with_gradient(
        self, x: InputPlan, info: ArrayInfo, work: frozenset[str], varies: dict[str, tuple[str, str]]
    ) -> InputPlan:
        """`x` with what is known once all inputs are: its reshard, the folding of a key, the sums of its gradient."""
        own = {m for a in x.axes for m in a.kernel_mesh_axes}
        order = self.mesh.axis_names if self.mesh is not None else ()
        explicit = [m for m in order if self.mesh is not None and m not in self.mesh.auto]
        folds = self.spec.rng == "fold" and info.is_key
        return replace(
            x,
            reshard=info.placement.typed and self._disagrees(x, info, explicit),
            fold=tuple(m for m in order if folds and m in varies and m not in own),
            grad_sum=tuple(m for m in order if m in work and m not in own),
        )

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
        origin = next((a.origin for a in x.axes if a.origin), "")
        return f"argument {x.label!r}: lies as ({found}), is needed as ({wanted}), {origin}".removesuffix(", ")
