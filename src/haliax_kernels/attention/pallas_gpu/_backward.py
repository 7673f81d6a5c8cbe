# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The backward kernels: FlashAttention-2's algorithm 2 (Dao 2023, https://arxiv.org/abs/2307.08691), in three parts.

With `p = exp(s - lse)` the probabilities, recomputed, `z` what dropout makes of a one (0 or `1 / (1 - dropout)`) and
`c` the derivative of the soft cap: `dv = sum_group (p * z).T @ do`, `ds = p * (z * (do @ v.T) - delta) * c`,
`dq = scale * ds @ k`, `dk = scale * sum_group ds.T @ q` and `dbias = ds`. Each kernel writes every block once, so that
the result does not depend on the order in which programs run: one for dk and dv, whose programs each own a block of
keys and run through the heads of the group and the queries; one for dq; and, only where there is a bias, one for its
gradient, whose programs each own a block of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32

from haliax_kernels.attention.contract import AttentionGradients, AttentionOperands
from haliax_kernels.attention.pallas_gpu._problem import Cut, Problem, arrays, call
from haliax_kernels.attention.pallas_gpu._tile import (
    Index,
    Tile,
    dot,
    exp,
    fold,
    keep_rows,
    load,
    load_rows,
    offsets,
    seeing_queries,
    seen_keys,
    store_block,
    store_rows,
    unit_of,
)


def backward(
    problem: Problem,
    x: AttentionOperands,
    lse: Float32[Array, "group q_pos"],
    do: Float[Array, "group q_pos value"],
    delta: Float32[Array, "group q_pos"],
    *,
    interpret: bool,
) -> AttentionGradients:
    """All gradients."""
    _, keys_cut, queries_cut = problem.cuts()
    operands = arrays(problem, x)
    operands |= {"lse": lse, "do": do.astype(problem.dtype), "delta": delta.astype(jnp.float32)}
    dtype = problem.options.grad_dtype or problem.dtype

    def like(array: Array, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, dtype)

    def run(kernel: Any, name: str, cut: Cut, grid: tuple[int, ...], **outputs: jax.ShapeDtypeStruct) -> Any:
        return call(kernel, f"attention_{name}", problem, cut, grid, operands, outputs, interpret=interpret)

    by_keys = run(_dkv_kernel, "dkv", keys_cut, (problem.blocks("k_pos", keys_cut),), dk=like(x.k), dv=like(x.v))
    q_blocks = problem.blocks("q_pos", queries_cut)
    by_queries = run(_dq_kernel, "dq", queries_cut, (q_blocks, problem.group), dq=like(x.q))
    dbias = None
    if x.bias is not None:
        grid = (problem.blocks("k_pos", queries_cut), q_blocks, x.bias.shape[0])
        dbias = run(_dbias_kernel, "dbias", queries_cut, grid, dbias=like(x.bias, jnp.float32))["dbias"]
    return AttentionGradients(by_queries["dq"], by_keys["dk"], by_keys["dv"], dbias)


def _statistics(
    tile: Tile, keep: Bool[Array, " q"] | None
) -> tuple[Float32[Array, " q"], Float32[Array, " q"], Bool[Array, " q"]]:
    """`lse` times `unit_of`, `delta`, and whether each query sees anything at all.

    For one that does not, lse = +inf makes its probabilities exp(-inf) = 0; its `delta` may be anything.
    """
    lse = load(tile.refs["lse"], tile.head, tile.q_start, tile.cut.q, keep)
    delta = load(tile.refs["delta"], tile.head, tile.q_start, tile.cut.q, keep)
    alive = lse != -jnp.inf
    return jnp.where(alive, lse * unit_of(tile.problem), jnp.inf), jnp.where(alive, delta, 0.0), alive


def _gradients(
    tile: Tile,
    q: Float[Array, "q key"],
    k: Float[Array, "k key"],
    v: Float[Array, "k value"],
    do: Float[Array, "q value"],
    lse: Float32[Array, " q"],
    delta: Float32[Array, " q"],
    mask: Bool[Array, "..."] | None,
) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    """The tile's probabilities, without those that dropout drops, and its ds."""
    s, slope = tile.logits(q, k)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    p = exp(tile.problem, s - tile.along_q(lse))
    dp = dot(v, do, (1, 1)) if tile.keys_first else dot(do, v, (1, 1))
    kept = p
    rate = tile.problem.options.dropout
    if rate:
        keep = tile.keep()
        kept = jnp.where(keep, p, 0.0)
        dp = jnp.where(keep, dp * (1 / (1 - rate)), 0.0)
    ds = p * (dp - tile.along_q(delta))
    if slope is not None:
        ds = ds * slope
    if mask is not None:
        # Where something else is NaN, a probability of 0 is not enough.
        ds = jnp.where(mask, ds, 0.0)
    return kept, ds


def _dkv_kernel(problem: Problem, cut: Cut, refs: dict[str, Any]) -> None:
    k_start = pl.program_id(0) * cut.k
    at = offsets(problem, refs)
    # Keys first, so that neither of the two sums over queries needs a transposed left operand.
    first = Tile(problem, cut, refs, at, 0, 0, k_start, keys_first=True)
    k_inside = first.k_inside()
    k = load_rows(refs["k"], None, k_start, cut.k, problem.key_size, k_inside)
    v = load_rows(refs["v"], None, k_start, cut.k, problem.value_size, k_inside)
    seen = seeing_queries(problem, cut, at, k_start)

    def body(head, i, state, masked):
        dk, dv = state
        tile = Tile(problem, cut, refs, at, head, i * cut.q, k_start, keys_first=True)
        keep = seen.holds(tile.q_index) if masked else None
        q = load_rows(refs["q"], head, tile.q_start, cut.q, problem.key_size, keep)
        do = load_rows(refs["do"], head, tile.q_start, cut.q, problem.value_size, keep)
        lse, delta, alive = _statistics(tile, keep)
        mask = tile.mask() if masked else None
        if problem.opaque or problem.biased:
            rows = alive if mask is None else alive & tile.some(mask, 0)
            q, do = keep_rows(q, rows), keep_rows(do, rows)
        p, ds = _gradients(tile, q, k, v, do, lse, delta, mask)
        return dk + dot(ds, q), dv + dot(p, do)

    def each_head(head, state):
        ranges = seen.ranges(cut.q, problem.q_len, problem.opaque)
        return fold(ranges, functools.partial(body, head), state)

    state = (
        jnp.zeros((cut.k, problem.padded("key", cut)), jnp.float32),
        jnp.zeros((cut.k, problem.padded("value", cut)), jnp.float32),
    )
    dk, dv = lax.fori_loop(np.int32(0), np.int32(problem.group), each_head, state)
    dv = dv * (1 / (1 - problem.options.dropout))
    store_rows(refs["dk"], None, k_start, dk * problem.options.scale, problem.key_size, problem.k_len)
    store_rows(refs["dv"], None, k_start, dv, problem.value_size, problem.k_len)


def _dq_kernel(problem: Problem, cut: Cut, refs: dict[str, Any]) -> None:
    i, head = pl.program_id(0), pl.program_id(1)
    if problem.right is not None:
        i = problem.blocks("q_pos", cut) - 1 - i  # as in the forward kernel
    q_start = i * cut.q
    at = offsets(problem, refs)
    seen = seen_keys(problem, cut, at, q_start)
    q, do, lse, delta = _load_queries(Tile(problem, cut, refs, at, head, q_start, 0))

    def body(j, dq, masked):
        tile = Tile(problem, cut, refs, at, head, q_start, j * cut.k)
        keep = seen.holds(tile.k_index) if masked else None
        k, v, mask = _load_keys(tile, keep, masked)
        _, ds = _gradients(tile, q, k, v, do, lse, delta, mask)
        return dq + dot(ds, k)

    start = jnp.zeros((cut.q, problem.padded("key", cut)), jnp.float32)
    dq = fold(seen.ranges(cut.k, problem.k_len, problem.opaque), body, start)
    store_rows(refs["dq"], head, q_start, dq * problem.options.scale, problem.key_size, problem.q_len)


def _dbias_kernel(problem: Problem, cut: Cut, refs: dict[str, Any]) -> None:
    j, i, bias_head = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    q_start, k_start = i * cut.q, j * cut.k
    at = offsets(problem, refs)
    seen = seen_keys(problem, cut, at, q_start)
    shared = len(refs["bias"].shape) == 2

    def body(g, dbias):
        tile = Tile(problem, cut, refs, at, g if shared else bias_head, q_start, k_start)
        q, do, lse, delta = _load_queries(tile)
        k, v, mask = _load_keys(tile, seen.holds(tile.k_index), True)
        return dbias + _gradients(tile, q, k, v, do, lse, delta, mask)[1]

    # A block that nothing sees is filled with zeros.
    visible = (k_start < seen.end) & (k_start + cut.k > seen.begin)
    heads: Index = jnp.where(visible, np.int32(problem.group if shared else 1), np.int32(0))
    dbias = lax.fori_loop(np.int32(0), heads, body, jnp.zeros((cut.q, cut.k), jnp.float32))
    store_block(refs["dbias"], bias_head, (q_start, k_start), dbias, (problem.q_len, problem.k_len))


def _load_queries(
    tile: Tile,
) -> tuple[Float[Array, "q key"], Float[Array, "q value"], Float32[Array, " q"], Float32[Array, " q"]]:
    problem, cut, inside = tile.problem, tile.cut, tile.q_inside()
    lse, delta, alive = _statistics(tile, inside)
    q = load_rows(tile.refs["q"], tile.head, tile.q_start, cut.q, problem.key_size, inside)
    do = load_rows(tile.refs["do"], tile.head, tile.q_start, cut.q, problem.value_size, inside)
    return q, keep_rows(do, alive), lse, delta


def _load_keys(
    tile: Tile, keep: Bool[Array, " k"] | None, masked: bool
) -> tuple[Float[Array, "k key"], Float[Array, "k value"], Bool[Array, "q k"] | None]:
    problem, cut = tile.problem, tile.cut
    k = load_rows(tile.refs["k"], None, tile.k_start, cut.k, problem.key_size, keep)
    v = load_rows(tile.refs["v"], None, tile.k_start, cut.k, problem.value_size, keep)
    if not masked:
        return k, v, None
    mask = tile.mask()
    if problem.opaque:
        rows = tile.some(mask, 0)
        k, v = keep_rows(k, rows), keep_rows(v, rows)
    return k, v, mask
