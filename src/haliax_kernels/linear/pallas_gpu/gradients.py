# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The kernels of the gradients by q, k and v: each chunk by itself, with the states at its borders.

Every block is written once, so that the results do not depend on the order in which programs run: a kernel for dq, one
for dk, and one for dv, the latter two summing over the group. What queries and keys say of the gradient by the logs of
decays is written by the first two.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32

from haliax_kernels.linear.pallas_gpu.channel import chunk_of
from haliax_kernels.linear.pallas_gpu.decay import NoDecay
from haliax_kernels.linear.pallas_gpu.plan import Plan, call
from haliax_kernels.linear.pallas_gpu.tile import Span, fold, load, store


def gradients(plan: Plan, operands: dict[str, Array], *, interpret: bool) -> dict[str, Array]:
    """`{dq, dk, dv}`; and `dlog_q` and `dlog_k`, whose sum is the gradient by the logs but for what passes through a
    whole chunk.

    Args:
        plan: of the call.
        operands: q, k, v, `decay_operands`; `dsums` by `q S` (by `scale * q S` where nothing is normalised), and
            `dnormalizer` if normalised; the states at the chunks' starts, and their gradients at the chunks' ends.
        interpret: run in Pallas' interpreter.
    """
    states, dstates = [f"{a}_borders" for a in plan.sums], [f"d{a}_borders" for a in plan.sums]
    decay = [n for n in ("from_start", "to_end", "exact", "rest", "log") if n in operands]
    dnormalizer = ["dnormalizer"] if plan.options.normalize else []

    def run(kernel: Any, name: str, grid: tuple[int, ...], reads: list[str], writes: list[str]) -> dict[str, Array]:
        shapes = {n: plan.shape(n, plan.dtype if n == name else jnp.float32) for n in writes}
        given = {n: operands[n] for n in [*reads, *decay]}
        return call(kernel, f"linear_attention_{name}", plan, grid, given, shapes, interpret=interpret)

    by_query = ["dlog_q"] if plan.want_log else []
    by_key = ["dlog_k"] if plan.want_log else []
    reads = ["q", "k", "v", "dsums", *dnormalizer]
    queries_grid = (plan.chunks, plan.group, plan.key_blocks)
    found = run(_dq_kernel, "dq", queries_grid, [*reads, *states], ["dq", *by_query])
    found |= run(_dk_kernel, "dk", (plan.chunks, plan.key_blocks), [*reads, *dstates], ["dk", *by_key])
    found |= run(_dv_kernel, "dv", (plan.chunks, plan.value_blocks), ["q", "k", "dsums", "ds_borders"], ["dv"])
    return found


def _scores_gradient(
    plan: Plan, refs: dict[str, Any], chunk: NoDecay, head: Any, *, keys_first: bool
) -> Float32[Array, "size size"]:
    """The gradient by what each pair of tokens contributes, `dsums v^T`; scaled, decayed and masked."""

    def of_values(block, da):
        values = Span.values(plan, block)
        dsums, v = load(refs["dsums"], head, chunk.tokens, values), load(refs["v"], chunk.tokens, values)
        return da + (plan.dot(v, dsums, (1, 1)) if keys_first else plan.dot(dsums, v, (1, 1)))

    da = fold(plan.value_blocks, of_values, jnp.zeros((plan.size, plan.size), jnp.float32))
    if plan.options.normalize:
        dnormalizer = load(refs["dnormalizer"], head, chunk.tokens)
        da = da + (dnormalizer[None, :] if keys_first else dnormalizer[:, None])
    return chunk.weigh(da, keys_first=keys_first) * plan.scale


def _state_product(
    plan: Plan, refs: dict[str, Any], index: Any, keys: Span, rows: Any, state: str
) -> Float32[Array, "size key_block"]:
    """`rows state^T`, where `rows(values)` are those of a block of values."""

    def of_values(block, sums):
        values = Span.values(plan, block)
        s = plan.narrow(load(refs[state], index, keys, values))
        return sums + plan.dot(rows(values), s, (1, 1))

    return fold(plan.value_blocks, of_values, jnp.zeros((plan.size, plan.key_block), jnp.float32))


def _dq_kernel(plan: Plan, refs: dict[str, Any]) -> None:
    index, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    chunk, keys = chunk_of(plan, refs, index), Span.keys(plan, block)

    dq = _state_product(
        plan, refs, index, keys, lambda values: load(refs["dsums"], head, chunk.tokens, values), "s_borders"
    )
    if plan.options.normalize:
        dnormalizer = load(refs["dnormalizer"], head, chunk.tokens)
        dq = dq + dnormalizer[:, None] * load(refs["z_borders"], index, keys)[None, :]
    dq = chunk.from_start(dq, keys) * plan.scale
    dproducts = _scores_gradient(plan, refs, chunk, head, keys_first=False)
    k = load(refs["k"], chunk.tokens, keys)
    q = load(refs["q"], head, chunk.tokens, keys)
    dq, dlog = chunk.queries(dproducts, dq, q, k, keys)
    if dlog is not None:
        chunk.store_log("dlog_q", dlog, block, head)
    store(refs["dq"], dq, head, chunk.tokens, keys)


def _dk_kernel(plan: Plan, refs: dict[str, Any]) -> None:
    index, block = pl.program_id(0), pl.program_id(1)
    chunk, keys = chunk_of(plan, refs, index), Span.keys(plan, block)

    dk = _state_product(plan, refs, index, keys, lambda values: load(refs["v"], chunk.tokens, values), "ds_borders")
    if plan.options.normalize:
        dk = dk + load(refs["dz_borders"], index, keys)[None, :]
    dk = chunk.to_end(dk, keys)
    k = load(refs["k"], chunk.tokens, keys)
    dlog = chunk.log_of_end(k.astype(jnp.float32) * dk) if plan.want_log else None

    def of_head(head, state):
        dproducts = _scores_gradient(plan, refs, chunk, head, keys_first=True)
        q = load(refs["q"], head, chunk.tokens, keys)
        dk, dlog = state
        here, dlog_here = chunk.keys(dproducts, q, k, keys)
        return dk + here, dlog if dlog is None or dlog_here is None else dlog + dlog_here

    dk, dlog = fold(plan.group, of_head, (dk, dlog))
    if dlog is not None:
        chunk.store_log("dlog_k", dlog, block)
    store(refs["dk"], dk, chunk.tokens, keys)


def _dv_kernel(plan: Plan, refs: dict[str, Any]) -> None:
    index = pl.program_id(0)
    chunk, values = chunk_of(plan, refs, index), Span.values(plan, pl.program_id(1))

    def of_state(block, dv):
        keys = Span.keys(plan, block)
        k = load(refs["k"], chunk.tokens, keys)
        k = plan.operand(chunk.to_end(k, keys))
        return dv + plan.dot(k, plan.narrow(load(refs["ds_borders"], index, keys, values)), (1, 0))

    dv = fold(plan.key_blocks, of_state, jnp.zeros((plan.size, plan.value_block), jnp.float32))

    def of_head(head, dv):
        def of_keys(block, scores):
            keys = Span.keys(plan, block)
            q, k = load(refs["q"], head, chunk.tokens, keys), load(refs["k"], chunk.tokens, keys)
            return scores + chunk.products(q, k, keys, keys_first=True)

        scores = fold(plan.key_blocks, of_keys, jnp.zeros((plan.size, plan.size), jnp.float32))
        scores = plan.narrow(chunk.weigh(scores, keys_first=True) * plan.scale)
        return dv + plan.dot(scores, load(refs["dsums"], head, chunk.tokens, values), (1, 0))

    store(refs["dv"], fold(plan.group, of_head, dv), chunk.tokens, values)
