# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""One operation under `custom_partitioning`: its sharding rule, how XLA splits it, `vmap`, and the refusal on TPU.

Knows nothing of kernels: an `Operation` says which dimensions of its arrays are laid out alike, and what runs on one
device once it is known how XLA lays them out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_kernels import _compat
from haliax_kernels.errors import MissingShardingError, NamedKernelError, UnsupportedOptionError, ways_out
from haliax_kernels.mesh import MeshAxes, as_mesh_axes

Arrays = tuple[jax.Array, ...]
Dims = tuple[MeshAxes, ...]  # of one array: the mesh axes of each dimension
Names = tuple[str | None, ...]  # of one array: the name of each dimension
Levels = tuple[tuple[bool, ...], ...]  # per enclosing vmap, outermost first: which operands it maps


@dataclass(frozen=True)
class Split:
    """How an operation is split over a mesh.

    Attributes:
        run: what one device does, from its shards of the operands to its shards of the results; mesh axes are manual.
        operands: how it takes the operands.
        results: how it leaves the results.
    """

    run: Callable[..., Arrays]
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]


@dataclass(frozen=True)
class Operation:
    """What is to be partitioned.

    Attributes:
        kernel: the kernel's name, for messages.
        operands: the dimensions of each operand: equal names are laid out alike. None shares its layout with no other.
        results: likewise.
        whole: the operation on whole arrays.
        split: from the mesh, how XLA lays out the operands and results, and the mesh axes that are taken already, to
            what each device does; raises where it cannot be.
    """

    kernel: str
    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    whole: Callable[..., Arrays]
    split: Callable[[Mesh, Sequence[Dims], Sequence[Dims], frozenset[str]], Split]


def partitioned(op: Operation, levels: Levels = ()) -> Callable[..., Arrays]:
    """The operation as a function of global arrays that XLA splits; `jax.vmap` of it is one again."""

    @custom_vmap
    def call(first: jax.Array, *rest: jax.Array) -> Arrays:
        flat = (_guard.bind(first, kernel=op.kernel), *rest)
        # custom_partitioning takes no constants: arrays that the kernel closes over become operands.
        whole = jax.make_jaxpr(_vmapped(op.whole, levels))(*flat)
        return _custom_partitioned(op, levels, whole)(*flat, *whole.consts)

    @call.def_vmap
    def _(axis_size: int, mapped: Sequence[bool], *flat: jax.Array) -> tuple[Arrays, tuple[bool, ...]]:
        del axis_size
        return partitioned(op, (tuple(mapped), *levels))(*flat), (True,) * len(op.results)

    return call


def _custom_partitioned(op: Operation, levels: Levels, whole: ClosedJaxpr) -> Callable[..., Arrays]:
    count = len(op.operands)

    @custom_partitioning
    def call(*flat: jax.Array) -> Arrays:
        return tuple(jaxpr_as_fun(ClosedJaxpr(whole.jaxpr, flat[count:]))(*flat[:count]))

    def partition(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        split = _split(op, levels, mesh, operands[:count], results)
        specs = (*split.operands, *[PartitionSpec()] * (len(operands) - count))
        # The constants are in `run` already.
        return mesh, lambda *flat: split.run(*flat[:count]), _shardings(mesh, split.results), _shardings(mesh, specs)

    def infer(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple[NamedSharding, ...]:
        # For GSPMD. An exception here would end the process; `partition` raises it.
        try:
            return _shardings(mesh, _split(op, levels, mesh, operands[:count], ()).results)
        except NamedKernelError:
            return _shardings(mesh, [PartitionSpec()] * len(results))

    call.def_partition(partition, infer, sharding_rule=_rule(op, levels, [_rank(c) for c in whole.consts]))
    return call


def _rank(constant: Any) -> int:
    is_key = jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
    return np.ndim(jax.random.key_data(constant) if is_key else constant)


def _vmapped(f: Callable[..., Arrays], levels: Levels) -> Callable[..., Arrays]:
    for mapped in reversed(levels):
        f = jax.vmap(f, in_axes=tuple(0 if m else None for m in mapped))
    return f


def _level_names(levels: Levels, operand: int | None) -> tuple[str, ...]:
    """The names of the leading dimensions that vmaps give to an operand, or (None) to every result."""
    return tuple(f"vmap_{i}" for i, mapped in enumerate(levels) if operand is None or mapped[operand])


def _rule(op: Operation, levels: Levels, constants: Sequence[int]) -> SdyShardingRule:
    # Shardy wants factors of its own for dimensions that have nothing to do with any other.
    count = 0

    def mapping(names: Sequence[str | None]) -> ArrayMapping:
        nonlocal count
        factors = []
        for name in names:
            count += name is None
            factors.append(f"alone_{count}" if name is None else name)
        return ArrayMapping(*factors)

    operands = [mapping((*_level_names(levels, i), *names)) for i, names in enumerate(op.operands)]
    operands += [mapping([None] * ndim) for ndim in constants]
    results = [mapping((*_level_names(levels, None), *names)) for names in op.results]
    return SdyShardingRule(tuple(operands), tuple(results))


def _split(op: Operation, levels: Levels, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Split:
    if mesh.empty:
        raise MissingShardingError(
            f"kernel {op.kernel!r}: XLA lays out the arguments of this .plain call over devices without a mesh, so "
            "their shardings name no mesh axes."
            + ways_out(
                ("give the arguments of jit NamedShardings", "jax.device_put(x, NamedSharding(mesh, P(...)))"),
                ("or set the mesh", "with jax.set_mesh(mesh): ..."),
            )
        )
    found = [_dims(x) for x in operands]
    wanted = [_dims(x) for x in results]
    lead = [_level_names(levels, i) for i in range(len(found))]
    every = _level_names(levels, None)
    busy = frozenset(
        m
        for dims, own in zip([*found, *wanted], [*lead, *[every] * len(wanted)], strict=True)
        for d in dims[: len(own)]
        for m in d
    )
    inner = op.split(
        mesh,
        [dims[len(own) :] for dims, own in zip(found, lead, strict=True)],
        [dims[len(every) :] for dims in wanted],
        busy,
    )
    if not levels:
        return inner
    free = set(mesh.axis_names) - {
        m for spec in (*inner.operands, *inner.results) for e in spec for m in as_mesh_axes(e)
    }
    outer: dict[str, MeshAxes] = {}
    for own, x in [*zip(lead, operands, strict=True), *((every, x) for x in results)]:
        for name, size, mesh_axes in zip(own, x.shape, _dims(x), strict=False):
            fits = free.issuperset(mesh_axes) and size % math.prod(mesh.shape[m] for m in mesh_axes) == 0
            if mesh_axes and fits and name not in outer:
                outer[name] = mesh_axes
                free.difference_update(mesh_axes)

    def whole_spec(own: Sequence[str], spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(outer.get(n) for n in own), *spec)

    return Split(
        _vmapped(inner.run, levels),
        tuple(whole_spec(own, spec) for own, spec in zip(lead, inner.operands, strict=True)),
        tuple(whole_spec(every, spec) for spec in inner.results),
    )


def _dims(x: Any) -> Dims:
    """How one array lies, as XLA says in a callback; as whole where it does not know yet (GSPMD)."""
    spec = () if x.sharding is None else tuple(x.sharding.spec)
    return tuple(as_mesh_axes(e) for e in (*spec, *[None] * (len(x.shape) - len(spec))))


def _shardings(mesh: Mesh, specs: Sequence[PartitionSpec]) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, spec) for spec in specs)


# The identity, except that it cannot be compiled for several TPU devices: XLA has no custom_partitioning there, and
# would say so in words that name no cause.
_guard = Primitive("plain_kernel_guard")
_guard.def_impl(lambda x, *, kernel: x)
_guard.def_abstract_eval(lambda x, *, kernel: x)


def _refuse_on_tpu(ctx: mlir.LoweringRuleContext, x: Any, *, kernel: str) -> list[Any]:
    if _compat.lowering_devices(ctx) == 1:
        return [x]
    raise UnsupportedOptionError(
        f"kernel {kernel!r}: .plain under jit on an Auto mesh of several devices needs custom_partitioning, which JAX "
        "does not support on TPU."
        + ways_out(
            ("name the axes", f'{kernel}(haliax.named(x, ("batch", ...)), ...)  # with haliax.axis_mapping'),
            ("or make the mesh Explicit", "jax.make_mesh(...)  # the arrays' types then say how they lie"),
        )
    )


mlir.register_lowering(_guard, lambda ctx, x, *, kernel: [x])
mlir.register_lowering(_guard, _refuse_on_tpu, platform="tpu")
