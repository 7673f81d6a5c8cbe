# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What several test modules share: meshes, collectives of a compiled program, a kernel to wrap."""

import importlib.util
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8, "s64": 8}
BOTH_MESHES = (AxisType.Auto, AxisType.Explicit)


def make_mesh(axis_type: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(axis_type,) * len(sizes))


def load_benchmark(name: str) -> ModuleType:
    """The module `benchmarks/NAME.py`, which is not in a package."""
    path = pathlib.Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cuda_text(f: Callable[..., Any], *args: Any) -> str:
    """The program of `f` lowered for an H200, on a machine without one."""
    gpu = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(gpu):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def collectives(hlo: str) -> dict[str, tuple[int, int]]:
    """{kind: (results, their bytes on one device)}; a combined collective counts once per array it carries."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    pattern = r"\s*(?:ROOT )?%?[\w.\-]+ = (.*?) (" + "|".join(COLLECTIVES) + r")(-start)?\("
    for line in hlo.splitlines():
        found = re.match(pattern, line)
        if not found:
            continue
        shapes = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", found.group(1))
        if found.group(3):  # asynchronous: operands, results, and on TPU the semaphores of a permute
            shapes = [s for s in shapes if s != ("u32", "")]
            shapes = shapes[len(shapes) // 2 :]
        counts[found.group(2)] += len(shapes)
        for dtype, dims in shapes:
            sizes[found.group(2)] += WIDTH[dtype] * int(np.prod([int(d) for d in filter(None, dims.split(","))]))
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def instructions(hlo: str, kind: str) -> int:
    """How many instructions of a kind the compiled program has."""
    return len(re.findall(rf" {kind}(?:-start)?\(", hlo))


def planned(plan: Any, *phases: str) -> dict[str, tuple[int, int]]:
    """The plan's collectives in the form of `collectives`."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for c in plan.collectives:
        if c.phase in phases:
            counts[c.kind] += 1
            sizes[c.kind] += c.bytes_per_device
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def check_against_reference(
    kernel: Any,
    reference: Callable[..., Any],
    arrays: Sequence[NamedArray],
    mapping: dict[str, Any],
    axis_type: AxisType,
    sizes: dict[str, int],
    out_axes: Sequence[Axis],
) -> tuple[Any, tuple[str, str]]:
    """Values and gradients of all arguments under a random cotangent, against a float64 `reference` of plain arrays.

    Returns:
        the plan, and the compiled programs of the values and of both together.
    """
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a.array), jnp.float64) for a in arrays]
        want, pullback = jax.vjp(reference, *wide)
        ct = np.random.default_rng(5).normal(size=want.shape)
        wanted = [np.asarray(g) for g in pullback(jnp.asarray(ct))]
        want = np.asarray(want)

    def run(*xs):
        return kernel(*xs).rearrange(out_axes).array

    def both(ct, *xs):
        out, back = jax.vjp(run, *xs)
        if axis_type is AxisType.Explicit:
            ct = jax.sharding.reshard(ct, jax.typeof(out).sharding)
        return out, back(ct)

    with jax.set_mesh(make_mesh(axis_type, **sizes)), hax.axis_mapping(mapping):
        xs = [hax.shard(a) for a in arrays]
        ct = hax.shard(NamedArray(jnp.asarray(ct, jnp.float32), out_axes)).array
        got, grads = jax.jit(both)(ct, *xs)
        plan = kernel.plan(*xs)
        hlo = jax.jit(run).lower(*xs).compile().as_text(), jax.jit(both).lower(ct, *xs).compile().as_text()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for g, w in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(g.array, w, rtol=1e-4, atol=1e-4)
    return plan, hlo


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention on plain arrays, q (q_pos, key), k (k_pos, key), v (k_pos, value), with its backward."""
    return _weights(q, k) @ v


def _weights(q: jax.Array, k: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.T, axis=-1)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    o = attention(q, k, v)
    return o, (q, k, v, o)


def _backward(saved: tuple[jax.Array, ...], do: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, o = saved
    p = _weights(q, k)
    ds = p * (do @ v.T - jnp.sum(do * o, axis=-1, keepdims=True))
    return ds @ k, ds.T @ q, p.T @ do


attention.defvjp(_forward, _backward)
ATTENTION = "q_pos key, k_pos key, k_pos value -> q_pos value"
