# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""A kernel's forward and its gradient on plain arrays as two operations that XLA can split."""

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from haliax_kernels.arguments import ArrayInfo, CallShape
from haliax_kernels.errors import NamedKernelError
from haliax_kernels.execute import local_functions
from haliax_kernels.local_kernel import LocalKernel
from haliax_kernels.mesh import MeshAxes, MeshContext, Placement, ShardingSource
from haliax_kernels.plain_partition import Arrays, Dims, Names, Operation, Split
from haliax_kernels.plan import AxisPlan, KernelPlan
from haliax_kernels.planner import KernelSpec, make_plan
from haliax_kernels.policies import Gather, Halo, Local
from haliax_kernels.shard_context import with_shard

_NO_MESH = MeshContext(None, (), frozenset(), (), "no mesh")


class _Compiled(ShardingSource):
    """What XLA says in a callback."""

    def mesh_axes(self, name: str, dim: int, placement: Placement, mesh: MeshContext) -> tuple[MeshAxes, str]:
        found, _ = super().mesh_axes(name, dim, placement, mesh)
        return found, "as the compiler lays it out"


_COMPILED = _Compiled(None, None)


@dataclass(frozen=True)
class Form:
    """The form of a call of plain arrays, with names for all dimensions of those that have a place.

    Attributes:
        shape: the call's form.
        loops: the names of the loop axes, outermost first.
    """

    shape: CallShape
    loops: tuple[str, ...]

    def order(self, plan: KernelPlan, output: int) -> tuple[int, ...]:
        """The permutation that puts the loop axes of an output into NumPy's order."""
        names = [a.name for a in plan.outputs[output].axes]
        return (*(names.index(n) for n in self.loops), *range(len(self.loops), len(names)))

    def outputs_in_order(self, plan: KernelPlan, outs: Sequence[jax.Array]) -> Arrays:
        return tuple(_transposed(v, self.order(plan, j)) for j, v in enumerate(outs))

    def without_placements(self) -> "Form":
        """For a call of which only XLA will know where its arrays lie."""
        infos = tuple(replace(info, placement=Placement()) for info in self.shape.infos)
        return Form(replace(self.shape, infos=infos), self.loops)


class PlainProgram:
    """The two operations of one form of call, and what passes between them and the caller."""

    def __init__(self, fn: Callable[..., Any], spec: KernelSpec, form: Form):
        self._fn, self._spec, self._form = fn, spec, form
        plan = make_plan(spec, form.shape.infos, (), None, ShardingSource(None, None))
        if plan.refusals:
            raise explained(plan.refusal())
        self._plan = replace(plan, mesh=_NO_MESH)
        self._keys = {i: _key_data(info) for i, info in enumerate(form.shape.infos) if info.is_key}
        self._guarded = bool(self._keys) and spec.rng == "fold"
        self._moving = tuple(i for i, x in enumerate(plan.inputs) if x.differentiable)
        self._inputs: tuple[Names, ...] = tuple(
            _once(_factor(a, i) for a in x.axes) or (None,) * len(x.shape) for i, x in enumerate(plan.inputs)
        )
        # An output that has a gathered axis comes back in parts as the first argument that has it.
        owner = {a.core: i for i, x in reversed(list(enumerate(plan.inputs))) for a in x.axes}
        self._outputs: tuple[Names, ...] = tuple(
            _once(_factor(a, owner.get(a.core)) for a in (out.axes[d] for d in form.order(plan, j)))
            for j, out in enumerate(plan.outputs)
        )
        # What arguments may lie in different ways and are made to agree; the others stay as they are.
        self._sizes = {
            _factor(a, None): a.size for x in plan.inputs for a in x.axes if not isinstance(a.policy, Gather)
        }
        self._sizes.pop(None, None)

    # Between the caller and the operations

    def raw(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """The arguments as XLA can split them: the data of PRNG keys."""
        return [jax.random.key_data(v) if i in self._keys else v for i, v in enumerate(xs)]

    def outputs(self, results: Arrays) -> Arrays:
        return results[: len(self._outputs)]

    def gradients(self, results: Arrays) -> tuple[jax.Array | None, ...]:
        """One gradient per argument; None for those that have none."""
        found = dict(zip(self._moving, results, strict=True))
        return tuple(found.get(i) for i in range(len(self._inputs)))

    # The operations

    @functools.cached_property
    def forward(self) -> Operation:
        """From the arguments to the outputs and, for kernels with PRNG keys, a witness of the layout.

        A shard's index is folded into its keys: the gradient is right only if it is split like the forward was.
        """

        def split(mesh: Mesh, operands: Sequence[Dims], results: Sequence[Dims], busy: frozenset[str]) -> Split:
            plan = self._planned(mesh, operands, results, busy)
            return Split(self._forward_local(plan), self._in_specs(plan), self._out_specs(plan))

        return Operation(self._spec.name, self._operands, self._results, self._forward_local(self._plan), split)

    def backward(self, moved: Sequence[int]) -> Operation:
        """From arguments, forward results, and cotangents of the outputs `moved`, to the gradients."""
        count = len(self._operands)
        end = count + len(self._results)

        def split(mesh: Mesh, operands: Sequence[Dims], results: Sequence[Dims], busy: frozenset[str]) -> Split:
            plan = self._planned(mesh, operands[:count], operands[count:end], busy)
            ins, outs = self._in_specs(plan), self._out_specs(plan)
            gradients = tuple(ins[i] for i in self._moving)
            return Split(self._backward_local(plan, moved), (*ins, *outs, *(outs[j] for j in moved)), gradients)

        return Operation(
            self._spec.name,
            (*self._operands, *self._results, *(self._outputs[j] for j in moved)),
            tuple(self._inputs[i] for i in self._moving),
            self._backward_local(self._plan, moved),
            split,
        )

    @property
    def _operands(self) -> tuple[Names, ...]:
        return tuple((*n, *[None] * self._keys[i][1]) if i in self._keys else n for i, n in enumerate(self._inputs))

    @property
    def _results(self) -> tuple[Names, ...]:
        return (*self._outputs, ()) if self._guarded else self._outputs

    # How XLA splits them

    def _planned(
        self, mesh: Mesh, inputs: Sequence[Dims], outputs: Sequence[Dims], busy: frozenset[str]
    ) -> KernelPlan:
        agreed = self._agreed(mesh, inputs, outputs, busy)
        infos = [
            replace(info, placement=Placement(dims[: len(info.axes)]))
            for info, dims in zip(self._form.shape.infos, agreed, strict=True)
        ]
        sizes = tuple(mesh.shape.items())
        context = MeshContext(mesh, sizes, frozenset(mesh.axis_names), (), "the compiled program")
        plan = make_plan(self._spec, infos, (), context, _COMPILED)
        if plan.refusals:
            raise explained(plan.refusal())
        return plan

    def _agreed(self, mesh: Mesh, inputs: Sequence[Dims], outputs: Sequence[Dims], busy: frozenset[str]) -> list[Dims]:
        """The arguments' layout, with one layout for each axis that several share: the first one found.

        Where no argument splits an axis but an output is wanted in parts, the arguments are cut: that is free.
        """
        chosen: dict[str | None, MeshAxes] = {}
        for names, dims in zip(self._inputs, inputs, strict=True):
            for name, mesh_axes in zip(names, dims, strict=False):
                if mesh_axes and name in self._sizes:
                    chosen.setdefault(name, mesh_axes)
        taken = {m for dims in inputs for mesh_axes in dims for m in mesh_axes} | busy
        for names, dims in zip(self._outputs, outputs, strict=False):
            for name, mesh_axes in zip(names, dims, strict=True):
                if name is None or name in chosen or name not in self._sizes or taken.intersection(mesh_axes):
                    continue
                if self._sizes[name] % math.prod(mesh.shape[m] for m in mesh_axes) == 0:
                    chosen[name] = mesh_axes
                    taken.update(mesh_axes)
        return [
            tuple(chosen.get(name, mesh_axes) for name, mesh_axes in zip(names, dims, strict=False))
            for names, dims in zip(self._inputs, inputs, strict=True)
        ]

    def _in_specs(self, plan: KernelPlan) -> tuple[PartitionSpec, ...]:
        return tuple(x.spec for x in plan.inputs)

    def _out_specs(self, plan: KernelPlan) -> tuple[PartitionSpec, ...]:
        specs = [
            PartitionSpec(*(out.axes[d].mesh_axes or None for d in self._form.order(plan, j)))
            for j, out in enumerate(plan.outputs)
        ]
        return (*specs, PartitionSpec()) if self._guarded else tuple(specs)

    # What one device does

    def _forward_local(self, plan: KernelPlan) -> Callable[..., Arrays]:
        forward, _ = local_functions(LocalKernel(with_shard(self._fn, self._spec, plan), plan, self._form.shape))

        def run(*xs: jax.Array) -> Arrays:
            outs = self._form.outputs_in_order(plan, forward(*self._wrapped(xs)))
            return (*outs, jnp.int32(self._witness(plan))) if self._guarded else outs

        return run

    def _backward_local(self, plan: KernelPlan, moved: Sequence[int]) -> Callable[..., Arrays]:
        _, backward = local_functions(LocalKernel(with_shard(self._fn, self._spec, plan), plan, self._form.shape))
        count, outputs = len(self._operands), len(self._outputs)
        end = count + len(self._results)

        def in_plan_order(j: int, v: jax.Array) -> jax.Array:
            order = self._form.order(plan, j)
            return _transposed(v, tuple(order.index(d) for d in range(len(order))))

        def run(*flat: jax.Array) -> Arrays:
            outs = [in_plan_order(j, v) for j, v in enumerate(flat[count : count + outputs])]
            cts = {j: in_plan_order(j, v) for j, v in zip(moved, flat[end:], strict=True)}
            grads = backward(self._wrapped(flat[:count]), outs, [cts.get(j) for j in range(outputs)])
            if not self._guarded:
                return grads
            same = flat[end - 1] == self._witness(plan)
            return tuple(jnp.where(same, g, jnp.full_like(g, jnp.nan)) for g in grads)

        return run

    def _wrapped(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        keys = self._keys
        return [jax.random.wrap_key_data(v, impl=keys[i][0]) if i in keys else v for i, v in enumerate(xs)]

    def _witness(self, plan: KernelPlan) -> int:
        """A number for the layout; forward and gradient of a kernel with PRNG keys must have the same."""
        return zlib.crc32(repr(self._in_specs(plan)).encode()) & 0x7FFFFFFF


def explained(error: NamedKernelError) -> NamedKernelError:
    """A refusal of a call of plain arrays, which takes no mapping."""
    told = type(error)(
        f"{error}\n  (a .plain call takes no axis_mapping=: place the arrays, or inside jit constrain them with "
        "jax.lax.with_sharding_constraint)"
    )
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def _factor(a: AxisPlan, argument: int | None) -> str | None:
    """The name under which a dimension shares its layout with others; None where sharding must not spread at all.

    What is gathered lies as it lies in each argument: it shares its layout with the argument's own gradient only.
    """
    if a.loop:
        return a.name.replace(" ", "_")
    if a.core is None or isinstance(a.policy, Local):
        return None
    if isinstance(a.policy, Gather):
        return f"gathered_{argument}_{a.core}"
    leader = a.policy.aligned_with if isinstance(a.policy, Halo) else None
    return f"core_{leader or a.core}"


def _once(names: Iterable[str | None]) -> Names:
    """A layout is shared by one dimension of an array only: of two axes that are aligned, by the first."""
    seen: set[str | None] = set()
    return tuple(None if n in seen or seen.add(n) else n for n in names)


def _key_data(info: ArrayInfo) -> tuple[Any, int]:
    """(implementation, number of dimensions of one key's data) of an array of PRNG keys."""
    found = []
    key = jax.ShapeDtypeStruct((), info.dtype)
    data = jax.eval_shape(lambda k: (found.append(jax.random.key_impl(k)), jax.random.key_data(k))[1], key)
    return found[0], len(data.shape)


def _transposed(v: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return v if order == tuple(range(v.ndim)) else jnp.transpose(v, order)
