# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The kernel that takes states from chunk to chunk, and the states' gradients back."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from haliax_kernels.linear.contract import LinearState
from haliax_kernels.linear.pallas_gpu.channel import chunk_of
from haliax_kernels.linear.pallas_gpu.plan import Plan, call
from haliax_kernels.linear.pallas_gpu.tile import Span, fold, load, store


def states(
    plan: Plan,
    decay: dict[str, Array],
    state: LinearState,
    left: Float[Array, "heads pos key"],
    right: Float[Array, "heads pos value"],
    weights: Float32[Array, "heads pos"] | None = None,
    *,
    reverse: bool = False,
    interpret: bool,
) -> tuple[dict[str, Float32[Array, "chunks ..."]], LinearState]:
    """`({s_borders, z_borders}, last)`: the state at each chunk's start, and the one after the last chunk.

    A program for each block of a state, which runs through the chunks: a state decays, and what is added to it is the
    sum over heads and tokens of `left^T right`, and to its normaliser that of `left`.

    Args:
        plan: of the call.
        decay: of `decay_operands`.
        state: the first.
        left: keys, decayed to the chunk's end.
        right: values.
        weights: of each token in the normaliser; None for 1.
        reverse: from the last chunk to the first, for gradients: the borders are the chunks' ends, `left` are
            queries, which are decayed from the chunk's start, and scaled; `right` are the gradients of `q S`.
        interpret: run in Pallas' interpreter.
    """
    operands = {"left": left, "right": right, "s": state.s}
    if state.z is not None:
        operands["z"] = state.z
        if weights is not None:
            operands["weights"] = weights
    used = ("total", "log", "from_start" if reverse else "to_end")
    operands |= {name: a for name, a in decay.items() if name in used}
    names = [f"{a}_{of}" for of in ("borders", "last") for a in plan.sums]
    kernel = functools.partial(_kernel, reverse, left.shape[0])
    grid = (plan.key_blocks, plan.value_blocks)
    name = "linear_attention_dstates" if reverse else "linear_attention_states"
    found = call(kernel, name, plan, grid, operands, {n: plan.shape(n) for n in names}, interpret=interpret)
    last = LinearState(found.pop("s_last"), found.pop("z_last", None))
    return found, last


def _kernel(reverse: bool, heads: int, plan: Plan, refs: dict[str, Any]) -> None:
    keys, values = Span.keys(plan, pl.program_id(0)), Span.values(plan, pl.program_id(1))
    first = pl.program_id(1) == 0  # all programs of a block of keys have the same normaliser

    def of_chunk(step, state):
        index = plan.chunks - 1 - step if reverse else step
        chunk = chunk_of(plan, refs, index)
        s, z = state
        store(refs["s_borders"], s, index, keys, values)
        if z is not None:
            store(refs["z_borders"], z, index, keys, when=first)

        def of_head(head, state):
            s, z = state
            left = load(refs["left"], head, chunk.tokens, keys)
            right = load(refs["right"], head, chunk.tokens, values)
            left = chunk.from_start(left, keys) if reverse else chunk.to_end(left, keys)
            if reverse and plan.scale != 1:
                left = left.astype(jnp.float32) * plan.scale
            s = s + plan.dot(plan.operand(left), right, (0, 0))
            if z is not None:
                wide = left.astype(jnp.float32)
                if "weights" in refs:
                    wide = wide * load(refs["weights"], head, chunk.tokens)[:, None]
                z = z + wide.sum(0)
            return s, z

        return fold(heads, of_head, (chunk.carry(s, keys), None if z is None else chunk.carry(z, keys)))

    z = load(refs["z"], keys) if "z" in refs else None
    s, z = fold(plan.chunks, of_chunk, (load(refs["s"], keys, values), z))
    store(refs["s_last"], s, keys, values)
    if z is not None:
        store(refs["z_last"], z, keys, when=first)
