# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What all our Pallas kernels for GPUs share: what they take, their blocks, and how they are called.

They run on Pallas' Triton backend.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32

SMALLEST_BLOCK = 16
"""The smallest side of a Triton matrix product."""
LARGEST_HEAD = 256
"""Larger heads leave no room for blocks in a multiprocessor's shared memory."""
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

Index = Int32[Array, ""] | int


def whole_block(size: int) -> int:
    """The block that holds `size` elements: Triton wants powers of two, its matrix products at least 16."""
    return max(SMALLEST_BLOCK, pl.next_power_of_2(size))


def positions(start: Index, count: int) -> Int32[Array, " count"]:
    """`start, start + 1, ...`"""
    return start + lax.iota(jnp.int32, count)


def call_on_arrays(
    body: Callable[[dict[str, Any], dict[str, Any]], None],
    name: str,
    grid: tuple[int, ...],
    operands: Mapping[str, Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    padded_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]],
    *,
    warps: int,
    stages: int,
    interpret: bool,
) -> dict[str, Array]:
    """Run `body(reads, writes)`, whose references are to whole arrays. On a GPU such a block is but a pointer.

    Args:
        body: the kernel.
        name: what profilers show.
        grid: of programs.
        operands: what is read, by name.
        outputs: what is written, by name.
        padded_shape: of an array's name and shape the shape in whole blocks.
        warps: of 32 threads, that share a program.
        stages: how many blocks are loaded ahead, plus one.
        interpret: run in Pallas' interpreter.
    """

    def spec(name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(padded_shape(name, shape), lambda *_: (0,) * len(shape))

    body.__name__ = body.__qualname__ = name
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=({n: spec(n, a.shape) for n, a in operands.items()},),
        out_specs={n: spec(n, a.shape) for n, a in outputs.items()},
        out_shape=dict(outputs),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(dict(operands))
