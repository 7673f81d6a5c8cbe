# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`named_kernel(...).plain`: the kernel on plain arrays, wherever they lie, without an axis mapping.

Where the arrays or their types say how they lie (eager calls, Explicit meshes, manual code, one device) the call is
that of the named form. Under `jit` on an Auto mesh only XLA knows, once it has laid out the whole program: there the
kernel is a `custom_partitioning` operation, planned when XLA asks how to split it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType

from haliax_kernels import _compat
from haliax_kernels.arguments import ArgumentReader, ArrayInfo, CallShape
from haliax_kernels.closures import refuse_closed_over_tracers
from haliax_kernels.errors import ArgumentError, AxisSizeError, TransformError, mesh_axes_text, ways_out
from haliax_kernels.execute import refusing_forward_mode
from haliax_kernels.mesh import MeshContext, ShardingSource, find_mesh
from haliax_kernels.plain_partition import partitioned
from haliax_kernels.plain_program import Form, PlainProgram, explained
from haliax_kernels.plan import KernelPlan
from haliax_kernels.planner import KernelSpec

_OWN = ShardingSource(None, None)


class PlainKernel:
    """A kernel that takes and returns plain arrays; the `plain` of a `NamedKernel`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        spec: KernelSpec,
        reader: ArgumentReader,
        ready: Callable[..., tuple[KernelPlan, Callable[..., Any] | None]],
    ):
        self._fn, self._reader, self._ready = fn, reader, ready
        self._spec = replace(spec, remedies=tuple({**_remedies(spec), **dict(spec.remedies)}.items()))
        self._program = functools.lru_cache(maxsize=256)(functools.partial(_make_program, fn, self._spec))

    def __repr__(self) -> str:
        return f'named_kernel({self._spec.name!r}, "{self._spec.signature}").plain'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel on plain arrays.

        Args:
            *args: the kernel's arguments. An array with a place in the signature has the core axes of that place as
                its last dimensions; the dimensions before them are loop axes, aligned from the right as NumPy does.
                One with fewer of them is shared along those it lacks. Other arguments: as in the named form.
            **kwargs: the kernel's keyword arguments, by the same rules.

        Returns:
            A plain array per output, of global size: the loop axes, then the output's core axes.

        Raises:
            NamedKernelError: a subclass, as the named form does. Under `jit` on an Auto mesh a sharding is known only
                while XLA compiles; a refusal then arrives inside XLA's own `JaxRuntimeError`.
        """
        shape, arrays = self._reader.read(args, kwargs)
        form = _form(self._spec, shape)
        refuse_closed_over_tracers(self._fn, self._spec.name)
        mesh = find_mesh(_typed_mesh(arrays), arrays)
        if _is_known(form.shape.infos, mesh):
            outs = self._run_planned(form, mesh, arrays)
        else:
            _refuse_blind(self._spec, mesh)
            outs = self._run_partitioned(form, arrays)
        return outs if self._spec.signature.several else outs[0]

    def _run_planned(self, form: Form, mesh: MeshContext | None, arrays: Sequence[jax.Array]) -> tuple[Any, ...]:
        plan, run = self._ready(self._spec, form.shape, (), mesh, _OWN)
        if run is None:
            raise explained(plan.refusal())
        return form.outputs_in_order(plan, run(*arrays))

    def _run_partitioned(self, form: Form, arrays: Sequence[jax.Array]) -> tuple[Any, ...]:
        with refusing_forward_mode(self._spec.name, ".plain"):
            return self._program(form.without_placements())(*arrays)


def _make_program(fn: Callable[..., Any], spec: KernelSpec, form: Form) -> Callable[..., tuple[jax.Array, ...]]:
    program = PlainProgram(fn, spec, form)
    forward = jax.jit(partitioned(program.forward))

    @functools.cache
    def backward(moved: tuple[int, ...]) -> Callable[..., tuple[jax.Array, ...]]:
        return jax.jit(partitioned(program.backward(moved)))

    @jax.custom_vjp
    def call(*xs: jax.Array) -> tuple[jax.Array, ...]:
        return program.outputs(forward(*program.raw(xs)))

    def call_forward(*xs: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        results = forward(*program.raw(xs))
        return program.outputs(results), (xs, results)

    def call_backward(saved: Any, cts: Sequence[Any]) -> tuple[jax.Array | None, ...]:
        xs, results = saved
        moved = tuple(j for j, ct in enumerate(cts) if ct.dtype != jax.dtypes.float0)
        return program.gradients(backward(moved)(*program.raw(xs), *results, *(cts[j] for j in moved)))

    call.defvjp(call_forward, call_backward)
    return call


def _form(spec: KernelSpec, shape: CallShape) -> Form:
    """The call's form with names for the dimensions of arrays that have a place.

    Raises:
        ArgumentError: a NamedArray, or an array with fewer dimensions than its place has core axes.
        AxisSizeError: a loop axis of two sizes.
    """
    sizes: dict[int, tuple[int, str]] = {}
    infos = tuple(_named_info(spec, info, sizes) for info in shape.infos)
    return Form(replace(shape, infos=infos), tuple(_loop_name(i) for i in reversed(range(len(sizes)))))


def _named_info(spec: KernelSpec, info: ArrayInfo, loops: dict[int, tuple[int, str]]) -> ArrayInfo:
    if info.named:
        raise ArgumentError(
            f"kernel {spec.name!r}: argument {info.label!r} of a .plain call is a NamedArray."
            + ways_out(("call the kernel itself", f"{spec.name}(...)"), ("or pass the array", f"{info.label}.array"))
        )
    if info.place is None:
        return info
    cores = spec.signature.inputs[info.place].axes
    shape = tuple(n for _, n in info.axes)
    count = len(shape) - len(cores)
    if count < 0:
        raise ArgumentError(
            f"kernel {spec.name!r}: argument {info.label!r} has shape {shape}, but its place in the signature "
            f'"{spec.signature}" has {len(cores)} core axes ({" ".join(cores)}).'
        )
    for i, size in enumerate(reversed(shape[:count])):
        known, who = loops.setdefault(i, (size, info.label))
        if known != size:
            raise AxisSizeError(
                f"kernel {spec.name!r}: loop axis {i}, counted from the core axes outwards, has size {known} in "
                f"argument {who!r}, but {size} in argument {info.label!r}. Sizes must agree, and 1 is not stretched."
                + ways_out(("an argument that lacks outer loop axes is shared along them", "x[0] in place of x[:1]"))
            )
    names = (*(_loop_name(i) for i in reversed(range(count))), *cores)
    return replace(info, named=True, axes=tuple(zip(names, shape, strict=True)))


def _loop_name(i: int) -> str:
    return f"loop {i}"  # no core axis can have this name


def _typed_mesh(arrays: Sequence[Any]) -> Any:
    """The mesh in the arrays' types where it has Explicit axes: under `jit` there may be no other trace of it."""
    meshes = [typed[0] for x in arrays if (typed := _compat.type_spec(x)) is not None]
    return next((m for m in meshes if AxisType.Explicit in m.axis_types), None)


def _is_known(infos: Sequence[ArrayInfo], mesh: MeshContext | None) -> bool:
    """Whether it can be seen where the arrays lie, as far as it matters."""
    if mesh is not None and mesh.auto_devices == 1:
        return True  # an Explicit mesh, one device, or an enclosing shard_map that is manual over all
    return not any(info.placement.unknown for info in infos if info.axes)


def _refuse_blind(spec: KernelSpec, mesh: MeshContext | None) -> None:
    """Where neither a type nor XLA's callback would say how the arrays lie."""
    if mesh is None or not (mesh.manual or len(mesh.auto) < len(mesh.sizes)):
        return
    if mesh.manual:
        why = f"inside a shard_map that is manual over {mesh_axes_text(*_names_and_sizes(mesh.manual))} only"
    else:
        why = "on a mesh with both Auto and Explicit axes"
    raise TransformError(
        f"kernel {spec.name!r}: .plain does not work {why}: JAX does not say how arrays lie on the Auto axes."
        + ways_out(
            ("name the axes", f'{spec.name}(haliax.named(x, ("batch", ...)), ..., axis_mapping={{"batch": "..."}})')
        )
    )


def _names_and_sizes(mesh_axes: Sequence[tuple[str, int]]) -> tuple[list[str], dict[str, int]]:
    return [name for name, _ in mesh_axes], dict(mesh_axes)


def _remedies(spec: KernelSpec) -> dict[str, tuple[tuple[str, str], ...]]:
    """The ways out where a core axis is sharded that the kernel needs whole."""
    found = {}
    for core in spec.signature.core_axes:
        ways = [
            ("keep it whole", "jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(...)))"),
            ("let the kernel gather it", f"{spec.name}.with_policies({core}=Gather()).plain(...)"),
        ]
        if all(core in out.axes for out in spec.signature.outputs):
            ways.append(("only if its indices are independent", f"{spec.name}.with_policies({core}=Parallel())"))
        else:
            ways.append(("only if the kernel is additive over it", f"{spec.name}.with_policies({core}=Sum())"))
        found[core] = tuple(ways)
    return found
