# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The forward kernel: the online softmax of FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1), in base 2."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.contract import AttentionOperands
from haliax_kernels.attention.pallas_tpu.blocks import (
    LANES,
    LN_2,
    Chunk,
    Plan,
    View,
    compiler_params,
    dot,
    extras,
    from_rows,
    hide_outside_window,
    k_spec,
    pad,
    q_spec,
    row,
    row_spec,
    visible_keys,
)
from haliax_kernels.attention.pallas_tpu.schedule import LAST, k_block, q_block


def forward(
    plan: Plan, x: AttentionOperands, vmem: int | None, interpret: bool
) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
    """As in the contract, for lengths above 0."""
    t = plan.tiles
    value_size = x.v.shape[1]
    steps = t.steps(x.q_offset - x.k_offset)
    k, v = hide_outside_window(plan, x)
    more = extras(plan, x)
    offsets = jnp.stack([jnp.asarray(x.q_offset, jnp.int32), jnp.asarray(x.k_offset, jnp.int32)])
    o, lse = pl.pallas_call(
        functools.partial(_kernel, plan, steps.bodies, more.names),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(plan.head_blocks, len(steps)),
            in_specs=[q_spec(plan, x.q.shape[2]), k_spec(plan, k.shape[1]), k_spec(plan, value_size), *more.specs],
            out_specs=[q_spec(plan, value_size), row_spec(plan)],
            scratch_shapes=[
                pltpu.VMEM((plan.rows, LANES), jnp.float32),
                pltpu.VMEM((plan.rows, LANES), jnp.float32),
                pltpu.VMEM((plan.rows, value_size), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((plan.group, t.q_count * t.q, value_size), plan.options.out_dtype or x.q.dtype),
            jax.ShapeDtypeStruct((plan.head_blocks, t.q_count, 1, plan.rows), jnp.float32),
        ],
        compiler_params=compiler_params(("parallel", "arbitrary"), vmem, interpret),
        name="attention_forward",
        metadata=steps.metadata(plan.head_blocks, False, plan.group * t.q_count * t.q * value_size),
    )(
        steps.pairs,
        steps.flags,
        offsets,
        pad(x.q, 1, t.q_count * t.q),
        pad(k, 0, t.k_count * t.k),
        pad(v, 0, t.k_count * t.k),
        *more.arrays,
    )
    return o[:, : t.q_len], from_rows(plan, lse)


def _kernel(plan: Plan, bodies: tuple[int, ...], names: tuple[str, ...], pairs, flags, offsets, q, k, v, *refs):
    o, lse, largest, total, acc = refs[len(names) :]
    step = pl.program_id(1)
    pair, flag = pairs[step], flags[step]

    def start():
        largest[...] = jnp.full_like(largest, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    pl.when(step == 0)(start)

    for body in bodies:

        @pl.when(flag & 15 == body)
        def _(body=body):
            view = View(plan, body, dict(zip(names, refs, strict=False)), q_block(pair), k_block(pair), offsets, False)
            for chunk in plan.chunks(body):
                _chunk(view, chunk, q, k, v, largest, total, acc)

    @pl.when(flag & LAST != 0)
    def _():
        summed = total[...].sum(1, keepdims=True)
        dead = summed == 0
        summed = jnp.where(dead, 1, summed)
        kept = 1 - plan.options.dropout
        o[...] = (acc[...] * (1 / (summed * kept))).astype(o.dtype).reshape(o.shape)
        lse[...] = row(jnp.where(dead, -jnp.inf, largest[...] * LN_2 + jnp.log(summed)))
        start()  # for the next query block: here the stores find free slots


def _chunk(view: View, c: Chunk, q: Any, k: Any, v: Any, largest: Any, total: Any, acc: Any) -> None:
    """Fold the visible keys of a key block into the softmax of some rows."""
    plan = view.plan
    rows = pl.ds(c.g * plan.tiles.q + c.start, c.rows)
    q_c = q[c.g : c.g_stop, c.start : c.stop, :].reshape(c.rows, q.shape[2])
    logits, masks = [], []
    for p in c.pieces:
        s, _ = view.logits(dot(plan, q_c, k[p.start : p.stop, :], (1, 1)), c, p)
        mask = view.mask(c, p)
        logits.append(s if mask is None else jnp.where(mask, s, -jnp.inf))
        masks.append(mask)
    # First across registers, then across the lanes of one.
    new = functools.reduce(jnp.maximum, [s[:, i : i + LANES] for s in logits for i in range(0, s.shape[1], LANES)])
    old = largest[rows, :]
    new = jnp.maximum(old, new.max(1, keepdims=True))
    largest[rows, :] = new
    # A row that has seen nothing yet has -inf here, and -inf - -inf is NaN.
    safe = plan.bias_heads == 0 and all(m is None for m in masks)
    shift = new if safe else jnp.where(new == -jnp.inf, 0.0, new)
    shrink = jnp.exp2(old - shift)
    sums = shrink * total[rows, :]
    value_size = acc.shape[1]
    result = _widen(shrink, value_size) * acc[rows, :]
    for p, s, mask in zip(c.pieces, logits, masks, strict=True):
        weights = jnp.exp2(s - _widen(shift, s.shape[1]))
        # The sum over the lanes of a register is left to the end.
        sums = functools.reduce(jnp.add, [weights[:, i : i + LANES] for i in range(0, s.shape[1], LANES)], sums)
        if plan.options.dropout:
            weights = jnp.where(view.kept(c, p), weights, 0.0)
        v_p = v[p.start : p.stop, :]
        if plan.filtered and mask is not None:
            v_p = visible_keys(mask, v_p, keys_first=False)
        result = result + dot(plan, weights.astype(v_p.dtype), v_p, (1, 0))
    total[rows, :] = sums
    acc[rows, :] = result


def _widen(x: Float32[Array, "rows lanes"], size: int) -> Float32[Array, "rows size"]:
    """Lanes that all hold the same, to another number of them."""
    return jnp.concatenate([x] * -(-size // LANES), 1)[:, :size] if size != LANES else x
