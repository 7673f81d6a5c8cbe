# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""A case's kernel on local arrays, and its float64 reference on whole ones: a product of the arguments, after an
elementwise function and an operation along each core axis, summed over what the output lacks."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fuzz.cases import Case, Core
from haliax_kernels import Gather, Halo, Local, Manual, NamedKernel, Parallel, ShardContext, Sum, named_kernel
from haliax_kernels.collectives import exclusive_prefix

FUNCTIONS = {"tanh": jnp.tanh, "sin": jnp.sin, "square": jnp.square, "id": lambda x: x}


def _policy(case: Case, core: Core):
    match core.policy:
        case "Halo":
            return Halo(*core.halo)
        case "Aligned":
            return Halo(*core.halo, aligned_with=core.leader)
        case "Manual":
            return Manual(reduces=any(core.name not in out for out in case.outputs))
        case "Sum" if all(core.name in out for out in case.outputs):
            return Parallel()
        case name:
            return {"Local": Local, "Parallel": Parallel, "Gather": Gather, "Sum": Sum}[name]()


def make_kernel(case: Case) -> NamedKernel:
    star = "*batch " if case.loop_mode == "batch" else ""
    signature = ", ".join(star + " ".join(x.cores) or "()" for x in case.inputs)
    signature += " -> " + ", ".join(star + " ".join(out) or "()" for out in case.outputs)
    policies = {c.name: _policy(case, c) for c in case.cores}
    loop = "collapse" if case.loop_mode == "collapse" else "vmap"

    def kernel(*xs: jax.Array, shard: ShardContext) -> tuple[jax.Array, ...]:
        return _with_backward(case, lambda *xs: _local(case, xs, shard))(*xs)

    made = named_kernel(signature, policies=policies, loop=loop, name="fuzzed")(kernel)
    return made.bind(**{c.name: tuple(n for n, _ in c.parts) for c in case.cores})


def _with_backward(case: Case, f: Callable) -> Callable:
    if not case.custom_backward:
        return f
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda *xs: (f(*xs), xs), lambda xs, cts: jax.vjp(f, *xs)[1](cts))
    return wrapped


def _local(case: Case, xs: Sequence[jax.Array], shard: ShardContext) -> tuple[jax.Array, ...]:
    outputs = []
    for kept in case.outputs:
        factors, labels = [], []
        for x, given in zip(xs, case.inputs, strict=True):
            y = _widened(FUNCTIONS[given.function], x)
            for i, name in enumerate(given.cores):
                core, dim = case.core(name), i - len(given.cores)
                mesh_axes = shard[name].mesh_axes if name in shard else ()
                y = _along(core, y, dim)
                if core.policy == "Manual":
                    last = lax.index_in_dim(y, -1, dim, keepdims=True)
                    y = y + exclusive_prefix(jnp.add, last, 0.0, mesh_axes)
                leader = case.core(core.leader or name)
                if leader.policy == "Manual" and leader.name not in kept and mesh_axes:
                    y = lax.all_gather(y, mesh_axes, axis=y.ndim + dim, tiled=True)
                if case.positions and core.policy in ("Parallel", "Sum", "Halo") and len(core.parts) == 1:
                    y = y * _wave(shard[name].offset + jnp.arange(y.shape[dim]), dim)
            factors.append(y)
            labels.append("..." + _letters(case, given.cores))
        outputs.append(jnp.einsum(",".join(labels) + "->..." + "".join(kept), *factors))
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _letters(case: Case, cores: Sequence[str]) -> str:
    """Rows that are aligned go together: one index for both axes."""
    return "".join(case.core(name).leader or name for name in cores)


def _widened(function: Callable, x: jax.Array) -> jax.Array:
    return function(0.25 * x.astype(jnp.float32) if x.dtype == jnp.int32 else x.astype(jnp.float32))


def _along(core: Core, y: jax.Array, dim: int) -> jax.Array:
    before, after, _ = core.halo
    n = y.shape[dim] - before - after
    if before or after:
        y = sum((1 + 0.5 * i) * lax.slice_in_dim(y, i, i + n, axis=y.ndim + dim) for i in range(before + after + 1))
    match core.operation:
        case "cumsum":
            return jnp.cumsum(y, axis=dim)
        case "flip":
            return jnp.flip(y, axis=dim)
        case "center":
            return y - 0.5 * jnp.mean(y, axis=dim, keepdims=True)  # not centred: its sum would be rounding only
    return y


def _wave(position: jax.Array, dim: int) -> jax.Array:
    return (1 + 0.1 * position).reshape([-1] + [1] * (-1 - dim))


def reference(case: Case, xs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The outputs on whole arrays, each argument in its own axis order; loop axes first, then the core axes."""
    letters = {n: chr(ord("p") + i) for i, (n, _) in enumerate(case.loops)}
    factors, labels = [], []
    for x, given in zip(xs, case.inputs, strict=True):
        loops = [n for n, _ in case.loops if n in given.axes]
        parts = [n for name in given.cores for n, _ in case.core(name).parts]
        y = jnp.transpose(x.astype(jnp.float64), [given.axes.index(n) for n in loops + parts])
        y = y.reshape([dict(case.loops)[n] for n in loops] + [case.core(name).size for name in given.cores])
        if x.dtype == jnp.int32:
            y = 0.25 * y
        order = list(dict.fromkeys(name for x in case.inputs for name in x.cores))
        for i, name in sorted(enumerate(given.cores), key=lambda pair: order.index(pair[1])):
            before, after, edge = case.core(name).halo
            if given.dtype == "int32":
                edge = 0.25 * np.int32(edge)
            pad = [(before, after) if d == len(loops) + i else (0, 0) for d in range(y.ndim)]
            y = jnp.pad(y, pad, constant_values=edge)
        y = FUNCTIONS[given.function](y)
        for i, name in enumerate(given.cores):
            core = case.core(name)
            y = _along(core, y, i - len(given.cores))
            if case.positions and core.policy in ("Parallel", "Sum", "Halo") and len(core.parts) == 1:
                y = y * _wave(jnp.arange(core.size), i - len(given.cores))
        factors.append(y)
        labels.append("".join(letters[n] for n in loops) + _letters(case, given.cores))
    outputs = []
    for kept in case.outputs:
        out = jnp.einsum(",".join(labels) + "->" + "".join(letters.values()) + "".join(kept), *factors)
        outputs.append(
            out.reshape([s for _, s in case.loops] + [s for name in kept for _, s in case.core(name).parts])
        )
    return tuple(outputs)
