# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The kernel of the results: each chunk by itself, with the state at its start."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from haliax_kernels.linear.pallas_gpu.channel import chunk_of
from haliax_kernels.linear.pallas_gpu.plan import Plan, call
from haliax_kernels.linear.pallas_gpu.tile import Span, fold, load, store
from haliax_kernels.linear.xla import clamped


def outputs(plan: Plan, operands: dict[str, Array], dtype: Any, *, residuals: bool, interpret: bool) -> dict[str, Any]:
    """`{y, normalizer}`, the latter if results are normalised and `residuals` are asked for.

    A program for each chunk, query head and block of values.

    Args:
        plan: of the call.
        operands: q, k, v, `decay_operands`, and the states at the chunks' starts.
        dtype: of y.
        residuals: whether `normalizer` is wanted.
        interpret: run in Pallas' interpreter.
    """
    shapes = {"y": plan.shape("y", dtype)}
    if residuals and plan.options.normalize:
        shapes["normalizer"] = plan.shape("normalizer")
    grid = (plan.chunks, plan.group, plan.value_blocks)
    return call(_kernel, "linear_attention_outputs", plan, grid, operands, shapes, interpret=interpret)


def _kernel(plan: Plan, refs: dict[str, Any]) -> None:
    index, head, values = pl.program_id(0), pl.program_id(1), Span.values(plan, pl.program_id(2))
    chunk = chunk_of(plan, refs, index)

    def of_keys(block, state):
        scores, sums, normalizer = state
        keys = Span.keys(plan, block)
        q, k = load(refs["q"], head, chunk.tokens, keys), load(refs["k"], chunk.tokens, keys)
        scores = scores + chunk.products(q, k, keys, keys_first=False)
        q = chunk.from_start(q, keys)
        sums = sums + plan.dot(plan.operand(q), plan.narrow(load(refs["s_borders"], index, keys, values)), (1, 0))
        if normalizer is not None:
            z = load(refs["z_borders"], index, keys)
            normalizer = normalizer + (q.astype(jnp.float32) * z[None, :]).sum(1)
        return scores, sums, normalizer

    scores = jnp.zeros((plan.size, plan.size), jnp.float32)
    sums = jnp.zeros((plan.size, plan.value_block), jnp.float32)
    normalizer = jnp.zeros(plan.size, jnp.float32) if plan.options.normalize else None
    scores, sums, normalizer = fold(plan.key_blocks, of_keys, (scores, sums, normalizer))
    scores = plan.narrow(chunk.weigh(scores, keys_first=False))
    v = load(refs["v"], chunk.tokens, values)
    y = (sums + plan.dot(scores, v, (1, 0))) * plan.options.scale
    if normalizer is not None:
        # It sums what the product sees, so that a quotient is the mean that it should be.
        normalizer = normalizer + scores.astype(jnp.float32).sum(1)
        y = y / clamped(plan.options, normalizer)[:, None]
        if "normalizer" in refs:
            store(refs["normalizer"], normalizer, head, chunk.tokens, when=pl.program_id(2) == 0)
    store(refs["y"], y, head, chunk.tokens, values)
