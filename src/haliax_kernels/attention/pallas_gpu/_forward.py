# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The forward kernel: the online softmax of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691, alg. 1)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.contract import AttentionOperands
from haliax_kernels.attention.pallas_gpu._problem import Cut, Problem, arrays, call
from haliax_kernels.attention.pallas_gpu._tile import (
    LOG2_E,
    Tile,
    dot,
    exp,
    fold,
    keep_rows,
    load_rows,
    offsets,
    seen_keys,
    store,
    store_rows,
    unit_of,
)


def forward(
    problem: Problem, x: AttentionOperands, *, interpret: bool
) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
    """One program for each block of queries of each head."""
    cut, _, _ = problem.cuts()
    o_shape = (problem.group, problem.q_len, problem.value_size)
    outputs = {
        "o": jax.ShapeDtypeStruct(o_shape, problem.options.out_dtype or problem.dtype),
        "lse": jax.ShapeDtypeStruct(o_shape[:2], jnp.float32),
    }
    grid = (problem.blocks("q_pos", cut), problem.group)
    found = call(_kernel, "attention_forward", problem, cut, grid, arrays(problem, x), outputs, interpret=interpret)
    return found["o"], found["lse"]


def _kernel(problem: Problem, cut: Cut, refs: dict[str, Any]) -> None:
    i, head = pl.program_id(0), pl.program_id(1)
    if problem.right is not None:
        # The last queries see the most keys: what takes longest starts first.
        i = problem.blocks("q_pos", cut) - 1 - i
    q_start = i * cut.q
    at = offsets(problem, refs)
    inside = Tile(problem, cut, refs, at, head, q_start, 0).q_inside()
    q = load_rows(refs["q"], head, q_start, cut.q, problem.key_size, inside)
    seen = seen_keys(problem, cut, at, q_start)

    def body(j, state, masked):
        total, largest, acc = state
        tile = Tile(problem, cut, refs, at, head, q_start, j * cut.k)
        keep = seen.holds(tile.k_index) if masked else None
        k = load_rows(refs["k"], None, tile.k_start, cut.k, problem.key_size, keep)
        v = load_rows(refs["v"], None, tile.k_start, cut.k, problem.value_size, keep)
        s, _ = tile.logits(q, k)
        if masked:
            mask = tile.mask()
            s = jnp.where(mask, s, -jnp.inf)
            if problem.opaque:
                v = keep_rows(v, tile.some(mask, 0))
        new_largest = jnp.maximum(largest, jnp.max(s, 1))
        # A row that has seen nothing yet has -inf here, and -inf - -inf is NaN.
        shift = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
        p = exp(problem, s - shift[:, None])
        shrink = exp(problem, largest - shift)
        total = total * shrink + jnp.sum(p, 1)
        if problem.options.dropout:
            p = jnp.where(tile.keep(), p, 0.0)
        return total, new_largest, acc * shrink[:, None] + dot(p, v)

    start = (
        jnp.zeros((cut.q,), jnp.float32),
        jnp.full((cut.q,), -jnp.inf, jnp.float32),
        jnp.zeros((cut.q, problem.padded("value", cut)), jnp.float32),
    )
    total, largest, acc = fold(seen.ranges(cut.k, problem.k_len, problem.opaque), body, start)
    dead = total == 0
    total = jnp.where(dead, 1.0, total)
    # What dropout keeps is divided by the fraction kept; here once, not at every probability.
    o = acc / (total * (1 - problem.options.dropout))[:, None]
    lse = jnp.where(dead, -jnp.inf, largest * (1 / unit_of(problem)) + jnp.log2(total) * (1 / LOG2_E))
    store_rows(refs["o"], head, q_start, o, problem.value_size, problem.q_len)
    store(refs["lse"], head, q_start, lse, problem.q_len)
