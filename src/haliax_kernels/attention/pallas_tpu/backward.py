# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The backward kernel: all gradients in one pass (Dao 2023, arXiv 2307.08691, algorithm 2, with its loops exchanged).

Query blocks are the outer loop. The sums for dk and dv of all keys stay in vector memory, where all heads of the group
add to them; each key block's is written once, at its last use. Logits are (keys, rows), so that only the product for
dq needs a transpose.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.contract import AttentionGradients, AttentionOperands
from haliax_kernels.attention.pallas_tpu.blocks import (
    LOG2_E,
    Chunk,
    Plan,
    View,
    as_rows,
    compiler_params,
    dot,
    extras,
    hide_outside_window,
    k_spec,
    pad,
    q_spec,
    row_spec,
    visible_keys,
)
from haliax_kernels.attention.pallas_tpu.schedule import (
    CLOSES,
    LAST,
    OPENS,
    SPECIAL,
    closing_block,
    k_block,
    q_block,
)
from haliax_kernels.attention.soft_cap import tanh_slope


def backward(
    plan: Plan,
    x: AttentionOperands,
    lse: Float32[Array, "group q_pos"],
    do: Float[Array, "group q_pos value"],
    delta: Float32[Array, "group q_pos"],
    dq: Float32[Array, "group q_pos key"] | None,
    dq_dtype: Any,
    vmem: int | None,
    interpret: bool,
) -> AttentionGradients:
    """As in the contract, for lengths above 0, added to `dq` if it is given."""
    t = plan.tiles
    key_size, value_size = x.q.shape[2], x.v.shape[1]
    k, v = hide_outside_window(plan, x)
    more = extras(plan, x)
    steps = t.steps(x.q_offset - x.k_offset, every=plan.bias_heads > 0)
    offsets = jnp.stack([jnp.asarray(x.q_offset, jnp.int32), jnp.asarray(x.k_offset, jnp.int32)])
    # lse = +inf makes the probabilities of a row exp(-inf) = 0: for rows that see nothing, and for the padding.
    dead = lse == -jnp.inf
    rows = [
        as_rows(plan, jnp.where(dead, jnp.inf, lse * LOG2_E), jnp.inf),
        as_rows(plan, jnp.where(dead, 0, delta)),
    ]
    q_size, k_size = t.q_count * t.q, t.k_count * t.k
    q = pad(jnp.where(dead[..., None], 0, x.q), 1, q_size)
    do = pad(jnp.where(dead[..., None], 0, do).astype(x.q.dtype), 1, q_size)
    arrays = [q, do, *rows, pad(k, 0, k_size), pad(v, 0, k_size), *more.arrays]
    in_specs = [
        q_spec(plan, key_size),
        q_spec(plan, value_size),
        row_spec(plan),
        row_spec(plan),
        k_spec(plan, key_size),
        k_spec(plan, value_size),
        *more.specs,
    ]
    aliases = {}
    if dq is not None:
        aliases = {3 + len(arrays): 0}
        arrays.append(pad(dq, 1, q_size))
        in_specs.append(q_spec(plan, key_size))

    def closing(g, s, p, flags, *_):
        return closing_block(flags[jnp.where(g == plan.head_blocks - 1, s, 0)]), 0

    grad_dtype = plan.options.grad_dtype or x.q.dtype
    out_shape = [
        jax.ShapeDtypeStruct((plan.group, q_size, key_size), dq_dtype),
        jax.ShapeDtypeStruct((k_size, key_size), grad_dtype),
        jax.ShapeDtypeStruct((k_size, value_size), grad_dtype),
    ]
    out_specs = [
        q_spec(plan, key_size),
        pl.BlockSpec((t.k, key_size), closing),
        pl.BlockSpec((t.k, value_size), closing),
    ]
    if plan.bias_heads:
        # A bias that the group shares has its gradient summed in the kernel over the heads of a block.
        heads = plan.heads if plan.bias_heads > 1 else 1
        out_shape.append(jax.ShapeDtypeStruct((plan.head_blocks * heads, q_size, k_size), jnp.float32))
        out_specs.append(pl.BlockSpec((heads, t.q, t.k), lambda g, s, p, *_: (g, q_block(p[s]), k_block(p[s]))))
    outputs = pl.pallas_call(
        functools.partial(_kernel, plan, steps.bodies, more.names, dq is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(plan.head_blocks, len(steps)),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((plan.rows, key_size), jnp.float32),
                pltpu.VMEM((k_size, key_size), jnp.float32),
                pltpu.VMEM((k_size, value_size), jnp.float32),
            ],
        ),
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=compiler_params(("arbitrary", "arbitrary"), vmem, interpret),
        name="attention_backward",
        metadata={} if plan.bias_heads else steps.metadata(plan.head_blocks, True, math.prod(out_shape[0].shape)),
    )(steps.pairs, steps.flags, offsets, *arrays)
    dbias = None
    if plan.bias_heads:
        dbias = outputs[3][:, : t.q_len, : t.k_len]
        dbias = dbias.sum(0, keepdims=True) if plan.bias_heads == 1 else dbias
    return AttentionGradients(outputs[0][:, : t.q_len], outputs[1][: t.k_len], outputs[2][: t.k_len], dbias)


def _kernel(
    plan: Plan, bodies: tuple[int, ...], names: tuple[str, ...], continued: bool, pairs, flags, offsets, *refs
):
    q, do, lse, delta, k, v, *refs = refs
    named = dict(zip(names, refs, strict=False)) | {"lse": lse, "delta": delta}
    refs = refs[len(names) :]
    dq_before = refs.pop(0) if continued else None
    dq, dk, dv = refs[:3]
    dbias = refs[3] if plan.bias_heads else None
    dq_sum, dk_sum, dv_sum = refs[-3:]
    head_block, step = pl.program_id(0), pl.program_id(1)
    pair, flag = pairs[step], flags[step]
    scale = plan.options.scale
    keys = pl.ds(pl.multiple_of(k_block(pair) * plan.tiles.k, plan.tiles.k), plan.tiles.k)

    @pl.when(step == 0)
    def _():
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when((flag & OPENS != 0) & (head_block == 0))
    def _():
        dk_sum[keys, :] = jnp.zeros((plan.tiles.k, dk_sum.shape[1]), jnp.float32)
        dv_sum[keys, :] = jnp.zeros((plan.tiles.k, dv_sum.shape[1]), jnp.float32)

    for body in bodies:

        @pl.when(flag & 15 == body)
        def _(body=body):
            view = View(plan, body, named, q_block(pair), k_block(pair), offsets, True)
            if dbias is not None and (body >= SPECIAL or dbias.shape[0] < plan.heads):
                dbias[...] = jnp.zeros_like(dbias)
            for chunk in plan.chunks(body):
                _chunk(view, chunk, q, do, k, v, dbias, dq_sum, dk_sum, dv_sum)

    if dbias is not None:

        @pl.when(flag & 15 == 0)
        def _():
            dbias[...] = jnp.zeros_like(dbias)

    @pl.when(flag & LAST != 0)
    def _():
        result = (dq_sum[...] * scale).reshape(dq.shape)
        dq[...] = (result if dq_before is None else result + dq_before[...]).astype(dq.dtype)
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when((flag & CLOSES != 0) & (head_block == plan.head_blocks - 1))
    def _():
        dk[...] = (dk_sum[keys, :] * scale).astype(dk.dtype)
        dv[...] = dv_sum[keys, :].astype(dv.dtype)


def _chunk(
    view: View, c: Chunk, q: Any, do: Any, k: Any, v: Any, dbias: Any, dq_sum: Any, dk_sum: Any, dv_sum: Any
) -> None:
    """Add what some rows and the keys of a block that they see give to each other's gradients."""
    plan = view.plan
    rows = pl.ds(c.g * plan.tiles.q + c.start, c.rows)
    q_c = q[c.g : c.g_stop, c.start : c.stop, :].reshape(c.rows, q.shape[2])
    do_c = do[c.g : c.g_stop, c.start : c.stop, :].reshape(c.rows, do.shape[2])
    lse, delta = view.row("lse", c), view.row("delta", c)
    dropout = plan.options.dropout
    dq = dq_sum[rows, :]
    for p in c.pieces:
        keys = pl.ds(view.k_index * plan.tiles.k + p.start, p.stop - p.start)
        k_p, v_p = k[p.start : p.stop, :], v[p.start : p.stop, :]
        s, ratio = view.logits(dot(plan, k_p, q_c, (1, 1)), c, p)
        mask = view.mask(c, p)
        if mask is not None:
            s = jnp.where(mask, s, -jnp.inf)
            if plan.filtered:
                k_p, v_p = (visible_keys(mask, x, keys_first=True) for x in (k_p, v_p))
        weights = jnp.exp2(s - lse)
        dp = dot(plan, v_p, do_c, (1, 1))
        dropped = weights
        if dropout:
            kept = view.kept(c, p)
            dropped = jnp.where(kept, weights * (1 / (1 - dropout)), 0.0)
            dp = jnp.where(kept, dp * (1 / (1 - dropout)), 0.0)
        dv_sum[keys, :] += dot(plan, dropped.astype(do_c.dtype), do_c, (1, 0))
        ds = weights * (dp - delta)
        if ratio is not None:
            ds = ds * tanh_slope(ratio if mask is None else jnp.where(mask, ratio, 0.0))
        dk_sum[keys, :] += dot(plan, ds.astype(q_c.dtype), q_c, (1, 0))
        if dbias is None:
            dq = dq + dot(plan, ds.astype(k_p.dtype), k_p, (0, 0))
        else:
            # One transpose for both: the compiler (libtpu 0.0.48) fails on one beside that inside a product.
            by_rows = ds.T
            _add_dbias(plan, dbias, by_rows, c, p.start, p.stop)
            dq = dq + dot(plan, by_rows.astype(k_p.dtype), k_p, (1, 0))
    dq_sum[rows, :] = dq


def _add_dbias(plan: Plan, dbias: Any, ds: Float32[Array, "rows keys"], c: Chunk, start: int, stop: int) -> None:
    ds = ds.reshape(c.g_stop - c.g, c.stop - c.start, stop - start)
    if plan.bias_heads > 1:
        dbias[c.g : c.g_stop, c.start : c.stop, start:stop] = ds
    else:
        dbias[:, c.start : c.stop, start:stop] += ds.sum(0, keepdims=True)
