# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Run one case: the right numbers, or a refusal of ours."""

import contextlib
import math

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fuzz.cases import Case
from fuzz.programs import make_kernel, reference
from fuzz.transforms import meant, transformed
from haliax_kernels import NamedKernelError


def arrays(case: Case) -> list[jax.Array]:
    random = np.random.default_rng(case.seed)
    found = []
    for x in case.inputs:
        shape = [case.sizes[n] for n in x.axes]
        value = random.integers(-3, 4, shape) if x.dtype == "int32" else random.uniform(-1, 1, shape)
        found.append(jnp.asarray(value, x.dtype))
    return found


def make_mesh(case: Case) -> Mesh | None:
    if not case.mesh:
        return None
    names, sizes = zip(*case.mesh, strict=True)
    types = tuple(AxisType.Explicit if n in case.explicit else AxisType.Auto for n in names)
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names, axis_types=types)


def placed(case: Case, mesh: Mesh | None, xs: list[jax.Array]) -> list[jax.Array]:
    """The arguments laid out as the mapping says, as far as that is possible."""
    mapping, found = dict(case.mapping), []
    for x, given in zip(xs, case.inputs, strict=True):
        used: set[str] = set()
        spec = []
        for n in given.axes:
            taken = mapping.get(n, ())
            shards = math.prod(dict(case.mesh)[m] for m in taken)
            fits = not used & set(taken) and case.sizes[n] % shards == 0
            spec.append((taken if fits else None) or None)
            used |= set(taken) if fits else set()
        found.append(x if mesh is None else jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))))
    return found


def expected_axes(case: Case) -> list[list[str]]:
    loops = list(dict.fromkeys(n for x in case.inputs for n in x.axes if n in dict(case.loops)))
    return [loops + [n for name in kept for n, _ in case.core(name).parts] for kept in case.outputs]


def wanted(case: Case, xs: list[jax.Array]) -> list[np.ndarray]:
    """Of the reference, in float64, on one device."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.int32 if x.dtype == jnp.int32 else jnp.float64) for x in xs]
        program = meant(lambda *xs: reference(case, xs), case.transforms, case.mapped)
        return [np.asarray(v) for v in jax.jit(program)(*wide)]


def check(case: Case) -> str:
    """`right`, or the class of the refusal.

    Raises:
        AssertionError: wrong numbers, wrong axes, a refusal without a reason, or an error that is none of ours.
    """
    kernel = make_kernel(case)
    xs = arrays(case)
    mesh = make_mesh(case)
    mapping = dict(case.mapping)
    axes = expected_axes(case)
    keywords = {"axis_mapping": mapping} if case.source == "argument" else {}

    def call(*xs: jax.Array) -> tuple[jax.Array, ...]:
        named = [
            hax.NamedArray(x, tuple(Axis(n, case.sizes[n]) for n in given.axes))
            for x, given in zip(xs, case.inputs, strict=True)
        ]
        outs = kernel(*named, **keywords)
        outs = outs if isinstance(outs, tuple) else (outs,)
        assert [[a.name for a in out.axes] for out in outs] == axes, "the axes of the outputs"
        order = [n for n, _ in case.loops]
        return tuple(
            jnp.transpose(out.array, [own.index(n) for n in [*order, *(n for n in own if n not in order)]])
            for out, own in zip(outs, axes, strict=True)
        )

    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        if case.source == "context":
            stack.enter_context(hax.axis_mapping(mapping))
        given = placed(case, mesh, xs) if case.placed or case.source == "arrays" else xs
        try:
            program = transformed(call, case.transforms, case.mapped)
            got = (program if case.eager else jax.jit(program))(*given)
        except NamedKernelError as e:
            idle = all(size == 1 for _, size in case.mesh)
            assert not idle, f"refused on one device: {e}"
            assert len(str(e)) > 40
            return type(e).__name__
        got = [np.asarray(v, np.float64) for v in got]
    for i, (found, right) in enumerate(zip(got, wanted(case, xs), strict=True)):
        assert found.shape == right.shape, (i, found.shape, right.shape)
        low = any(x.dtype == "bfloat16" for x in case.inputs) and bool(case.transforms)
        # Relative to the largest element: sums of alternating signs cancel.
        error = np.max(np.abs(found - right), initial=0) / max(np.max(np.abs(right), initial=0), 1e-3)
        assert error < (4e-2 if low else 2e-4), f"result {i} is off by {error:.2g} of its largest element"
    return "right"
