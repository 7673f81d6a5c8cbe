# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What several test modules share: meshes, collectives of a compiled program, a kernel to wrap."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8, "s64": 8}
BOTH_MESHES = (AxisType.Auto, AxisType.Explicit)


def make_mesh(axis_type: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(axis_type,) * len(sizes))


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
        if found.group(3):  # asynchronous: operands, then results
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
