# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the kernels share: loads and stores of blocks, and loops."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool

from haliax_kernels.linear.pallas_gpu.plan import Plan
from haliax_kernels.pallas_triton import Index, positions


@dataclass(frozen=True)
class Span:
    """A block of a dimension: `count` places from `start`, of which those below `size` are there."""

    start: Index
    count: int
    size: int

    @staticmethod
    def keys(plan: Plan, block: Index) -> "Span":
        return Span(block * plan.key_block, plan.key_block, plan.key)

    @staticmethod
    def values(plan: Plan, block: Index) -> "Span":
        return Span(block * plan.value_block, plan.value_block, plan.value)


def load(ref: Any, *at: Index | Span) -> Array:
    """A vector or matrix; 0 where there is nothing."""
    ref, mask = _place(ref, at)
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0)


def store(ref: Any, value: Array, *at: Index | Span, when: Bool[Array, ""] | None = None) -> None:
    """Write what there is room for, if `when` says so."""
    place, mask = _place(ref, at)
    if when is not None:
        when = jnp.broadcast_to(when, value.shape)
        mask = when if mask is None else mask & when
    plgpu.store(place, value.astype(ref.dtype), mask=mask)


def _place(ref: Any, at: tuple[Index | Span, ...]) -> tuple[Any, Bool[Array, "..."] | None]:
    index = tuple(pl.ds(a.start, a.count) if isinstance(a, Span) else a for a in at)
    spans = [a for a in at if isinstance(a, Span)]
    shape, mask = tuple(s.count for s in spans), None
    for axis, span in enumerate(spans):
        if span.size % span.count == 0:
            continue
        there = positions(span.start, span.count) < span.size
        there = jnp.broadcast_to(jnp.expand_dims(there, [a for a in range(len(spans)) if a != axis]), shape)
        mask = there if mask is None else mask & there
    return ref.at[index], mask


def fold(count: int, body: Any, state: Any) -> Any:
    """Fold `body(i, state)` over `count` numbers."""
    if count == 1:
        return body(np.int32(0), state)
    return lax.fori_loop(np.int32(0), np.int32(count), body, state)  # int64 under x64 else
