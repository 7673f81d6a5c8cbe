# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Between an array's own axis order and the kernel's, for local arrays and their cotangents."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from haliax_kernels.errors import OutputError
from haliax_kernels.plan import AxisPlan, InputPlan, KernelPlan


@dataclass(frozen=True)
class Layout:
    """A linear rearrangement of a local array, or none.

    Attributes:
        apply: the rearrangement; None where it is the identity.
    """

    apply: Callable[[jax.Array], jax.Array] | None

    def __call__(self, x: jax.Array) -> jax.Array:
        return x if self.apply is None else self.apply(x)

    def transpose(self, ct: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The cotangent of an input of `shape`, from the cotangent of the output."""
        if self.apply is None:
            return ct
        (back,) = jax.linear_transpose(self.apply, jax.ShapeDtypeStruct(shape, ct.dtype))(ct)
        return back


def input_layout(plan: KernelPlan, x: InputPlan) -> Layout:
    """From the array's own axis order to: vmapped loop axes, leading dimensions, core axes (maybe flattened)."""
    if not x.axes:
        return Layout(None)
    at = {a.name: i for i, a in enumerate(x.axes)}
    if x.place is None:
        front = [n for n in plan.vmapped if n in at]
        order = [at[n] for n in front] + [i for i, a in enumerate(x.axes) if a.name not in front]
        return _rearrange(order, None)
    cores = plan.signature.inputs[x.place].axes
    loops = [n for n in (*plan.vmapped, *plan.leading) if n in at]
    order = [at[n] for n in loops] + [at[n] for core in cores for n in plan.bound(core)]
    sizes = [a.kernel_size for a in x.axes]
    core_shape = [math.prod(sizes[at[n]] for n in plan.bound(core)) for core in cores]
    if plan.collapse:
        return _collapse(plan, x, order, core_shape)
    flattens = any(len(plan.bound(core)) != 1 for core in cores)
    return _rearrange(order, [sizes[at[n]] for n in loops] + core_shape if flattens else None)


def _rearrange(order: list[int], shape: list[int] | None) -> Layout:
    moves = order != sorted(order)
    if not moves and shape is None:
        return Layout(None)

    def apply(x: jax.Array) -> jax.Array:
        x = jnp.transpose(x, order) if moves else x
        return x if shape is None else x.reshape(shape)

    return Layout(apply)


def _collapse(plan: KernelPlan, x: InputPlan, order: list[int], core_shape: list[int]) -> Layout:
    local = loop_sizes(plan)
    have = {a.name for a in x.axes}
    full = [local[n] for n in plan.leading]
    own = [local[n] if n in have else 1 for n in plan.leading]

    def apply(v: jax.Array) -> jax.Array:
        v = jnp.transpose(v, order).reshape(own + core_shape)
        return jnp.broadcast_to(v, full + core_shape).reshape([math.prod(full), *core_shape])

    return Layout(apply)


def loop_sizes(plan: KernelPlan) -> dict[str, int]:
    """The local size of every loop axis."""
    return {a.name: a.local_size for x in plan.inputs if x.place is not None for a in x.axes if a.loop}


def core_sizes(plan: KernelPlan) -> dict[str, int]:
    """The size that outputs have of every core axis that some argument has (or `axes=` gave)."""
    parts: dict[tuple[str, str], AxisPlan] = {}
    for axes in [x.axes for x in plan.inputs] + [out.axes for out in plan.outputs]:
        for a in axes:
            if a.core is not None and a.size >= 0:
                parts.setdefault((a.core, a.name), a)
    found = {}
    for core, names in plan.bindings:
        if all((core, n) in parts for n in names):
            found[core] = math.prod(parts[core, n].own_size for n in names)
    return found


def output_layout(plan: KernelPlan, index: int, shape: tuple[int, ...]) -> Layout:
    """From what the kernel returned (vmapped, leading, core axes; of `shape`) to the output's axis order.

    Gathered axes are whole still; they are cut afterwards.
    """
    cores = plan.signature.outputs[index].axes
    local = loop_sizes(plan)
    loops = [*plan.vmapped, *plan.leading]
    sizes = {a.name: a for a in plan.outputs[index].axes if not a.loop}
    lead = len(plan.vmapped) + (1 if plan.collapse else len(plan.leading))
    expanded: list[int] = [local[n] for n in loops]
    names = list(loops)
    for core, found in zip(cores, shape[lead:], strict=True):
        bound = plan.bound(core)
        expanded += [found] if len(bound) == 1 else _part_sizes(plan, index, core, [sizes[n] for n in bound])
        names += bound
    wanted = [a.name for a in plan.outputs[index].axes]
    order = [names.index(n) for n in wanted]
    moves = order != sorted(order)
    if not moves and tuple(expanded) == tuple(shape):
        return Layout(None)

    def apply(x: jax.Array) -> jax.Array:
        x = x.reshape(expanded)
        return jnp.transpose(x, order) if moves else x

    return Layout(apply)


def _part_sizes(plan: KernelPlan, index: int, core: str, parts: list[AxisPlan]) -> list[int]:
    if any(a.size < 0 for a in parts):
        raise OutputError(
            f"kernel {plan.kernel!r}: output {index} has core axis {core!r}, which no argument has and which is bound "
            f"to several array axes {plan.bound(core)}: their sizes are not known. Bind it to axes with sizes, "
            f'axes={{"{core}": (Axis(...), Axis(...))}}.'
        )
    # An output axis that is gathered and not cut again carries no shards: its plan's size is the whole one either way.
    return [a.size if a.gathered or a.shards == 1 else a.local_size for a in parts]


def check_outputs(plan: KernelPlan, returned: object) -> tuple[jax.Array, ...]:
    """The kernel's outputs as a tuple, checked against its signature.

    Raises:
        OutputError: another number of outputs, no plain array, another rank, or an axis of another size.
    """
    signature, name = plan.signature, plan.kernel
    outs = tuple(returned) if signature.several and isinstance(returned, tuple | list) else (returned,)
    if len(outs) != len(signature.outputs):
        raise OutputError(
            f'kernel {name!r} returned {len(outs)} outputs, but its signature "{signature}" has '
            f"{len(signature.outputs)}. Return as many, or write what it returns behind the '->'."
        )
    known = core_sizes(plan)
    loops = loop_sizes(plan)
    lead = [math.prod(loops[n] for n in plan.leading)] if plan.collapse else [loops[n] for n in plan.leading]
    for i, (out, spec) in enumerate(zip(outs, signature.outputs, strict=True)):
        if not isinstance(out, jax.Array):
            raise OutputError(
                f"kernel {name!r} returned a {type(out).__name__} as output {i}; it must return plain local "
                "jax.Arrays (the decorator adds the axes)."
            )
        wanted = [("leading dimension", n) for n in lead] + [(f"axis {c!r}", known.get(c, -1)) for c in spec.axes]
        if out.ndim != len(wanted):
            raise OutputError(
                f"kernel {name!r} returned output {i} of shape {out.shape}, but its signature says {len(wanted)} "
                f"dimensions: ({', '.join(what for what, _ in wanted)}). Return these, or write the axes that it "
                "returns behind the '->'."
            )
        for (what, size), found in zip(wanted, out.shape, strict=True):
            if size >= 0 and size != found:
                raise OutputError(
                    f"kernel {name!r} returned output {i} of shape {out.shape}: its {what} has size {found}, but is "
                    f"{size} on each device. Return that size; a size of its own needs an axis of its own behind the "
                    "'->', one that no argument has."
                )
    return outs  # type: ignore[return-value]


def kernel_shape(x: InputPlan) -> tuple[int, ...]:
    """The local shape in the array's own axis order, gathered axes whole, halos included."""
    return tuple(a.kernel_size for a in x.axes) if x.axes else x.shape
