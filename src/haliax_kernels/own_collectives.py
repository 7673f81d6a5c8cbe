# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The collectives that a kernel calls itself (`Manual`), read from its traced program and that of its pullback."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from haliax_kernels import _compat
from haliax_kernels.layout import kernel_shape
from haliax_kernels.local_kernel import Arrays, LocalKernel
from haliax_kernels.mesh import as_mesh_axes
from haliax_kernels.plan import Collective

_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


@dataclass(frozen=True)
class Traced:
    """What tracing a kernel showed.

    Attributes:
        outputs: the shapes of its outputs on one device, in the plan's axis order, before any cut.
        collectives: those it calls itself, forward and in its gradient with respect to every floating-point argument.
        note: why there is nothing to say of its gradient, if so.
    """

    outputs: tuple[jax.ShapeDtypeStruct, ...]
    collectives: tuple[Collective, ...]
    note: str | None = None


def trace_kernel(local: LocalKernel) -> Traced:
    """Trace a kernel under its plan's mesh, on local shapes, without running anything."""
    plan = local.plan
    assert plan.mesh is not None
    mesh = plan.mesh.mesh
    shapes = [jax.ShapeDtypeStruct(kernel_shape(x), x.dtype) for x in plan.inputs]
    moving = [i for i, x in enumerate(plan.inputs) if x.differentiable]

    def on_device(f: Callable[..., Any]) -> Callable[..., Any]:
        # Every array is declared to be the same everywhere: shapes are then local ones, within and without.
        return _compat.shard_map(f, mesh, PartitionSpec(), PartitionSpec())

    def program(f: Callable[..., Any], phase: str, *args: Any) -> tuple[tuple[Collective, ...], Any]:
        jaxpr, out = jax.make_jaxpr(on_device(f), return_shape=True)(*args)
        sizes = dict(plan.mesh.sizes) if plan.mesh is not None else {}
        found, _ = _collectives(jaxpr.jaxpr, phase, sizes, [True] * len(jaxpr.jaxpr.outvars))
        return tuple(found), out

    def returned(*xs: jax.Array) -> Arrays:
        return local(*(layout(v) for layout, v in zip(local.layouts, xs, strict=True)))

    forward, raw = program(returned, "forward", *shapes)
    outputs = jax.eval_shape(local.in_output_order, *raw)
    if not moving:
        return Traced(outputs, forward)
    trees = []

    def saving(*xs: jax.Array) -> list[jax.Array]:
        def differentiable(*some: jax.Array) -> Arrays:
            merged = list(xs)
            for i, v in zip(moving, some, strict=True):
                merged[i] = v
            return returned(*merged)

        _, pullback = jax.vjp(differentiable, *(xs[i] for i in moving))
        leaves, tree = jax.tree_util.tree_flatten(pullback)
        trees.append(tree)
        return leaves

    def pulled_back(leaves: Sequence[jax.Array], cts: Sequence[jax.Array]) -> Arrays:
        whole = [
            ct if jax.numpy.issubdtype(r.dtype, jax.numpy.inexact) else np.zeros(r.shape, jax.dtypes.float0)
            for r, ct in zip(raw, cts, strict=True)
        ]
        return jax.tree_util.tree_unflatten(trees[-1], leaves)(tuple(whole))

    try:
        _, leaves = program(saving, "forward", *shapes)
        backward, _ = program(pulled_back, "backward", leaves, list(raw))
    except Exception as e:
        reason = str(e).strip().splitlines()
        return Traced(outputs, forward, f"cannot be differentiated: {reason[0] if reason else type(e).__name__}")
    return Traced(outputs, forward + backward)


def _collectives(
    jaxpr: Any, phase: str, sizes: dict[str, int], live: Sequence[bool], steps: int | None = 1
) -> tuple[list[Collective], list[bool]]:
    """The collectives that the live outputs need, as JAX drops the others, and which inputs they need."""
    found: list[Collective] = []
    needed = {v for v, wanted in zip(jaxpr.outvars, live, strict=True) if wanted and not _is_literal(v)}
    for eqn in reversed(jaxpr.eqns):
        wanted = [v in needed for v in eqn.outvars]
        # That it names a mesh axis is an effect of a collective, too.
        if any(wanted) or any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects):
            own, used = _of_equation(eqn, phase, sizes, wanted, steps)
            found = own + found
            needed |= {v for v, u in zip(eqn.invars, used, strict=True) if u and not _is_literal(v)}
    return found, [v in needed for v in jaxpr.invars]


def _of_equation(
    eqn: Any, phase: str, sizes: dict[str, int], wanted: list[bool], steps: int | None
) -> tuple[list[Collective], list[bool]]:
    name, params = eqn.primitive.name, eqn.params
    everything = [True] * len(eqn.invars)
    if name in _KINDS:
        named = as_mesh_axes(params.get("axes", params.get("axis_name")))
        mesh_axes = tuple(m for m in named if isinstance(m, str) and sizes.get(m, 1) > 1)
        found = []
        for out, want in zip(eqn.outvars, wanted, strict=True):
            if mesh_axes and want:
                size = math.prod(out.aval.shape) * out.aval.dtype.itemsize
                found.append(Collective(_KINDS[name], phase, mesh_axes, "the kernel itself", size, steps))
        return found, wanted if len(wanted) == len(everything) else everything
    loop = name in ("scan", "while")
    if name == "scan":
        steps = None if steps is None else steps * params["length"]
    elif name == "while":
        steps = None
    found, used = [], everything
    bodies = [s for s in map(_body, _leaves(params)) if s is not None]
    for body in bodies:
        # What one turn of a loop leaves the next one may need.
        live = wanted if not loop and len(wanted) == len(body.outvars) else [True] * len(body.outvars)
        own, inputs = _collectives(body, phase, sizes, live, steps)
        found += own
        if not loop and len(bodies) == 1 and len(inputs) == len(everything):
            used = inputs
    return found, used


def _leaves(params: Any) -> list[Any]:
    return jax.tree.leaves(list(params.values()), is_leaf=lambda v: hasattr(v, "jaxpr") or hasattr(v, "eqns"))


def _body(value: Any) -> Any:
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None


def _is_literal(v: Any) -> bool:
    return hasattr(v, "val")
