# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's transformations as functions from one program of arrays to another, and what they mean without JAX's help."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Program = Callable[..., tuple[jax.Array, ...]]


def _moving(xs: tuple[jax.Array, ...]) -> list[int]:
    return [i for i, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.inexact)]


def scaled(xs: tuple[jax.Array, ...], k: jax.Array | float, which: int = -1) -> tuple[jax.Array, ...]:
    """The arguments whose bit is set in `which`, times 1 + k/4; integers as they are."""
    moving = _moving(xs)
    return tuple(
        (x * (1 + 0.25 * k)).astype(x.dtype) if i in moving and which >> i & 1 else x for i, x in enumerate(xs)
    )


def gradient(f: Program) -> Program:
    """The gradients of a weighted sum of all outputs, with respect to every floating-point argument."""

    def program(*xs: jax.Array) -> tuple[jax.Array, ...]:
        moving = _moving(xs)

        def loss(some: list[jax.Array]) -> jax.Array:
            merged = list(xs)
            for i, v in zip(moving, some, strict=True):
                merged[i] = v
            total = 0.0
            for j, out in enumerate(f(*merged)):
                # Small angles: that of thousands is rounded in float32.
                weight = jnp.cos(1.0 + j + 0.7 * (jnp.arange(out.size) % 29)).reshape(out.shape)
                total += jnp.sum(out.astype(weight.dtype) * weight)
            return total

        return tuple(jax.grad(loss)([xs[i] for i in moving]))

    return program


def mapped(f: Program, which: int) -> Program:
    def program(*xs: jax.Array) -> tuple[jax.Array, ...]:
        both = [scaled(xs, k, which) for k in (0.0, 1.0)]
        moving = _moving(xs)
        axes = tuple(0 if i in moving and which >> i & 1 else None for i in range(len(xs)))
        if not any(a == 0 for a in axes):
            return f(*xs)
        stacked = [
            jnp.stack(pair) if a == 0 else pair[0] for a, pair in zip(axes, zip(*both, strict=True), strict=True)
        ]
        return tuple(jax.vmap(lambda *xs: f(*xs), in_axes=axes)(*stacked))

    return program


def scanned(f: Program) -> Program:
    def program(*xs: jax.Array) -> tuple[jax.Array, ...]:
        return lax.scan(lambda c, k: (c, tuple(f(*scaled(xs, k)))), 0, jnp.arange(2, dtype=jnp.float32))[1]

    return program


def transformed(f: Program, names: tuple[str, ...], which: int) -> Program:
    for name in names:
        match name:
            case "jit":
                f = jax.jit(f)
            case "remat":
                f = jax.checkpoint(f)
            case "grad":
                f = gradient(f)
            case "vmap":
                f = mapped(f, which)
            case "scan":
                f = scanned(f)
    return f


def meant(f: Program, names: tuple[str, ...], which: int) -> Program:
    """What `transformed` must give: vmap and scan written out, jit and remat left out."""

    def looped(f: Program, which: int) -> Program:
        def program(*xs: jax.Array) -> tuple[jax.Array, ...]:
            if not any(which >> i & 1 for i in _moving(xs)):
                return f(*xs)
            return tuple(map(jnp.stack, zip(*(f(*scaled(xs, k, which)) for k in (0.0, 1.0)), strict=True)))

        return program

    for name in names:
        match name:
            case "grad":
                f = gradient(f)
            case "vmap":
                f = looped(f, which)
            case "scan":
                f = looped(f, -1)
    return f
