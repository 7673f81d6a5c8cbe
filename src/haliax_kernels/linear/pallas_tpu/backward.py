# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The backward kernel: blocks from last to first, each block's states once more from the one at its start."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from haliax_kernels.linear.pallas_tpu.channel import ChannelDecay
from haliax_kernels.linear.pallas_tpu.chunks import chunk_decay
from haliax_kernels.linear.pallas_tpu.decay import TokenDecay
from haliax_kernels.linear.pallas_tpu.plan import ROWS, Plan, column, compiler_params, shape, spec


def backward(plan: Plan, operands: dict[str, Array], interpret: bool) -> dict[str, Array]:
    """Run the kernel.

    Args:
        plan: of the kernel.
        operands: q, k, v, what `decay_operands` says, and `masks` for `ChannelDecay.queries`; `dsums`, the gradient of
            `q S` (of `scale * q S` where nothing is normalised); `s_starts`, and the last state's gradient `s_dlast`;
            if normalised also `dnormalizer`, `z_starts` and `z_dlast`.
        interpret: for TPU interpret mode.

    Returns:
        `dq`, `dk`, `dv`, `s_dfirst`, `z_dfirst` if normalised; of the logs `dlog` for channels, and for tokens what
        passed through decays: in the rows of `drows` between tokens, from the chunk's start to each token, and from
        each token to its end; in `through` from its start to its end, but for the chunk's decay.
    """
    dtypes = dict.fromkeys(("dq", "dk", "dv"), plan.dtype)
    dtypes |= {f"{a}_dfirst": jnp.float32 for a in ("sz" if plan.normalize else "s")}
    if plan.want_log:
        names = ("dlog",) if plan.decay == "channel" else ("drows", "through")
        dtypes |= dict.fromkeys(names, jnp.float32)
    p = plan
    scratch = {
        "ds": (p.value, p.key),
        "dz": (1, p.key),
        "s_chunks": (p.n, p.value, p.key),
        "z_chunks": (p.n, 1, p.key),
        "ds_added": (p.n, p.value, p.key),
        "dz_added": (p.n, 1, p.key),
        "dk_sum": (p.block, p.key),
        "dv_sum": (p.block, p.value),
    }
    if plan.want_log and p.decay == "channel":
        scratch["through_log"] = (p.levels + 1, p.block, p.key)
    outputs = pl.pallas_call(
        functools.partial(_kernel, plan, (*operands, *dtypes, *scratch)),
        grid=(plan.blocks, plan.head_blocks),
        in_specs=[spec(plan, name, reverse=True) for name in operands],
        out_specs=[spec(plan, name, reverse=True) for name in dtypes],
        out_shape=[shape(plan, name, dtype) for name, dtype in dtypes.items()],
        scratch_shapes=[pltpu.VMEM(s, jnp.float32) for s in scratch.values()],
        compiler_params=compiler_params(interpret),
        name="linear_attention_backward",
    )(*operands.values())
    return dict(zip(dtypes, outputs, strict=True))


def _kernel(plan: Plan, names: tuple[str, ...], *refs: Any) -> None:
    r = dict(zip(names, refs, strict=True))
    block, head = pl.program_id(0), pl.program_id(1)
    chunks = [chunk_decay(plan, r, c) for c in range(plan.n)]

    @pl.when((block == 0) & (head == 0))
    def _():
        r["ds"][...] = r["s_dlast"][...]
        if plan.normalize:
            r["dz"][...] = r["z_dlast"][...]

    def begin():
        _states(plan, r, chunks)

    def end():
        for c in reversed(range(plan.n)):
            _keys(plan, r, chunks[c], c)

    if plan.head_blocks == 1:
        begin()
    else:
        pl.when(head == 0)(begin)
    for g in range(plan.heads):
        for c in range(plan.n):
            _queries(plan, r, chunks[c], g, c)
    if plan.head_blocks == 1:
        end()
    else:
        pl.when(head == plan.head_blocks - 1)(end)

    @pl.when((block == plan.blocks - 1) & (head == plan.head_blocks - 1))
    def _():
        r["s_dfirst"][...] = r["ds"][...]
        if plan.normalize:
            r["z_dfirst"][...] = r["dz"][...]


def _states(plan: Plan, r: dict[str, Any], chunks: list[Any]) -> None:
    """The states at the chunks' starts; and all sums over heads to zero, unless one assignment makes them."""
    s = r["s_starts"][...]
    z = r["z_starts"][...] if plan.normalize else None
    for c, decay in enumerate(chunks):
        r["s_chunks"][c] = s
        if z is not None:
            r["z_chunks"][c] = z
        if c == plan.n - 1:
            break
        k = decay.to_end(r["k"][plan.rows(c), :])
        s = decay.carry(s) + plan.dot(r["v"][plan.rows(c), :], plan.narrow(k), (0, 0))
        if z is not None:
            z = decay.carry(z) + k.astype(jnp.float32).sum(0, keepdims=True)
    if plan.group > 1:
        for name in ("ds_added", "dz_added", "dk_sum", "dv_sum", "drows", "through_log"):
            if name in r:
                r[name][...] = jnp.zeros_like(r[name])


def _add(plan: Plan, ref: Any, index: Any, x: Array) -> None:
    ref[index] = x if plan.group == 1 else ref[index] + x


def _queries(plan: Plan, r: dict[str, Any], decay: Any, g: int, c: int) -> None:
    """What a chunk's results give to its queries, its keys and values, and the state at its start."""
    rows, scale, dot, narrow = plan.rows(c), 1.0 if plan.normalize else plan.scale, plan.dot, plan.narrow
    q, k, v, dsums = r["q"][g, rows, :], r["k"][rows, :], r["v"][rows, :], r["dsums"][g, rows, :]
    dnormalizer = r["dnormalizer"][g, c : c + 1, :] if plan.normalize else None

    q_start = narrow(decay.from_start(q, scale))
    dq_state = dot(dsums, narrow(r["s_chunks"][c]), (1, 0))
    _add(plan, r["ds_added"], c, dot(dsums, q_start, (0, 0)))
    if dnormalizer is not None:
        dq_state += column(dnormalizer) * r["z_chunks"][c]
        rows_of_one = jnp.broadcast_to(dnormalizer, (ROWS, plan.size))
        _add(plan, r["dz_added"], c, dot(narrow(rows_of_one), q_start, (1, 0))[:1])
    dq_state = decay.from_start(dq_state, scale)

    if isinstance(decay, ChannelDecay):

        def passed(level: int, through: Array) -> None:
            if plan.want_log:
                _add(plan, r["through_log"], (level, rows, slice(None)), through)

        dq, dk, dv = decay.queries(scale, q, k, v, dsums, dnormalizer, r["masks"], passed)
        passed(plan.levels, q.astype(jnp.float32) * dq_state)
    else:
        products = dot(k, q, (1, 1))
        dscores = dot(v, dsums, (1, 1))
        if dnormalizer is not None:
            dscores += dnormalizer
        scores, dproducts = decay.weigh(scale, products, dscores)
        narrow_dproducts = narrow(dproducts)
        dv = dot(narrow(scores), dsums, (1, 0))
        dk = dot(narrow_dproducts, q, (1, 0))
        dq = dot(narrow_dproducts, k, (0, 0))
        if plan.want_log and isinstance(decay, TokenDecay):
            between = decay.between(dproducts * products)
            _add(plan, r["drows"], (c, slice(0, 1)), between)
            _add(plan, r["drows"], (c, slice(1, 2)), _sum_over_lanes(plan, q.astype(jnp.float32) * dq_state))
    r["dq"][g, rows, :] = (dq + dq_state).astype(plan.dtype)
    _add(plan, r["dk_sum"], (rows, slice(None)), dk)
    _add(plan, r["dv_sum"], (rows, slice(None)), dv)


def _keys(plan: Plan, r: dict[str, Any], decay: Any, c: int) -> None:
    """What the state at a chunk's end gives to its keys, values and decays, and to the state at its start."""
    rows, dot, narrow = plan.rows(c), plan.dot, plan.narrow
    k, v = r["k"][rows, :], r["v"][rows, :]
    ds = r["ds"][...]
    narrow_ds = narrow(ds)
    dk_state = dot(v, narrow_ds, (1, 0))
    if plan.normalize:
        dk_state += r["dz"][...]
    dk_state = decay.to_end(dk_state)
    r["dk"][rows, :] = (r["dk_sum"][rows, :] + dk_state).astype(plan.dtype)
    dv = r["dv_sum"][rows, :] + dot(narrow(decay.to_end(k)), narrow_ds, (1, 1))
    r["dv"][rows, :] = dv.astype(plan.dtype)
    if plan.want_log:
        through = (r["s_chunks"][c] * ds).sum(0, keepdims=True)
        if plan.normalize:
            through += r["z_chunks"][c] * r["dz"][...]
        through_k = k.astype(jnp.float32) * dk_state
        if isinstance(decay, ChannelDecay):
            through_log = [r["through_log"][level, rows, :] for level in range(plan.levels + 1)]
            r["dlog"][rows, :] = decay.log_gradient(through_log, through_k, through)
        else:
            r["drows"][c, 2:3] = _sum_over_lanes(plan, through_k)
            r["through"][c] = through
    r["ds"][...] = decay.carry(ds) + r["ds_added"][c]
    if plan.normalize:
        r["dz"][...] = decay.carry(r["dz"][...]) + r["dz_added"][c]


def _sum_over_lanes(plan: Plan, x: Array) -> Array:
    """As a row."""
    ones = jnp.ones((ROWS, x.shape[1]), plan.dtype)
    return plan.dot(ones, plan.narrow(x), (1, 1))[:1]
