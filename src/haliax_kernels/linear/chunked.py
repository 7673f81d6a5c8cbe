# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The chunked algorithm for a piece of the sequence: chunks side by side, and the states at their borders in turn.

Within a chunk tokens see each other through a square of scores, and all before it through the state at its start:
Yang et al. 2024, https://arxiv.org/abs/2312.06635, equations 1 to 6; for scalar decays Dao and Gu 2024,
https://arxiv.org/abs/2405.21060, section 6. Unlike there, the gradient by the logs of decays is a sum of what passed
through each decay, and not the difference of two sums over whatever did not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from haliax_kernels.linear import decays
from haliax_kernels.linear.contract import LinearState


class Piece(NamedTuple):
    """`n` chunks of `size` tokens, in float32.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        log: logs of decays as `decays.of` takes them.
    """

    q: Float32[Array, "group n size key"]
    k: Float32[Array, "n size key"]
    v: Float32[Array, "n size value"]
    log: Float32[Array, "n size"] | Float32[Array, "n size key"] | None


class PieceGradients(NamedTuple):
    q: Float32[Array, "group n size key"]
    k: Float32[Array, "n size key"]
    v: Float32[Array, "n size value"]
    log: Float32[Array, "n size"] | Float32[Array, "n size key"] | None


class ResultGradients(NamedTuple):
    """Of the sums `q S` and of the normaliser `q . z` (None without one)."""

    sums: Float32[Array, "group n size value"]
    normalizer: Float32[Array, "group n size"] | None


def forward(
    piece: Piece, state: LinearState, dot: decays.Dot
) -> tuple[Float32[Array, "group n size value"], Float32[Array, "group n size"] | None, LinearState]:
    """`(q S, q . z, state)` of a piece that begins with `state`; no normaliser if that has no `z`."""
    decay = decays.of(piece.log, piece.k.shape[1], dot)
    scores, _ = decay.scores(piece.q, piece.k)
    starts, last = _states(decay, piece, state, dot)
    q = times(piece.q, decay.from_start)
    sums = dot("gnij,nje->gnie", scores, piece.v) + dot("gnid,nde->gnie", q, starts.s)
    normalizer = None if starts.z is None else scores.sum(-1) + dot("gnid,nd->gni", q, starts.z)
    return sums, normalizer, last


def final_state(piece: Piece, state: LinearState, dot: decays.Dot) -> LinearState:
    """The state alone."""
    return _states(decays.of(piece.log, piece.k.shape[1], dot), piece, state, dot)[1]


def first_state_gradient(piece: Piece, d: ResultGradients, dstate: LinearState, dot: decays.Dot) -> LinearState:
    """The gradient by the piece's first state alone; `dstate` is that by its last one."""
    return _state_gradients(decays.of(piece.log, piece.k.shape[1], dot), piece, d, dstate, dot)[1]


def backward(
    piece: Piece, state: LinearState, d: ResultGradients, dstate: LinearState, dot: decays.Dot, want_log: bool
) -> tuple[PieceGradients, LinearState]:
    """The gradients by a piece and by the state it begins with.

    Args:
        piece: the piece.
        state: what it begins with.
        d: the gradients of its results.
        dstate: that of the state after it.
        dot: an einsum in float32.
        want_log: whether the gradient by the logs is wanted.
    """
    q, k, v, _ = piece
    decay = decays.of(piece.log, k.shape[1], dot)
    scores, saved = decay.scores(q, k)
    starts, _ = _states(decay, piece, state, dot)
    dends, dfirst = _state_gradients(decay, piece, d, dstate, dot)

    da = dot("gnie,nje->gnij", d.sums, v)
    dq_state, dk_state = dot("gnie,nde->gnid", d.sums, starts.s), dot("nje,nde->njd", v, dends.s)
    if d.normalizer is not None and starts.z is not None and dends.z is not None:
        da = da + d.normalizer[..., None]
        dq_state = dq_state + d.normalizer[..., None] * starts.z[:, None]
        dk_state = dk_state + dends.z[:, None]
    dq_state, dk_state = times(dq_state, decay.from_start), times(dk_state, decay.to_end)
    dq, dk, dlog = decay.backward(saved, q, k, da, want_log)
    dv = dot("gnij,gnie->nje", scores, d.sums) + dot("njd,nde->nje", times(k, decay.to_end), dends.s)
    if dlog is not None and decay.total is not None:
        through_q, through_k = (q * dq_state).sum(0), k * dk_state
        through = jnp.einsum("nde,nde->nd", starts.s, dends.s)
        if starts.z is not None and dends.z is not None:
            through = through + starts.z * dends.z
        through = through * jnp.exp(decay.total)
        if dlog.ndim == 2:
            through_q, through_k, through = through_q.sum(-1), through_k.sum(-1), through.sum(-1)
        dlog = dlog + decays.after(through_q, 1) + decays.before(through_k, 1) + through[:, None]
    return PieceGradients(dq + dq_state, dk + dk_state, dv, dlog), dfirst


def times(x: Array, decay: Array | None) -> Array:
    """`x * decay`, where None stands for 1."""
    return x if decay is None else x * decay


def _states(decay: decays.Decay, piece: Piece, first: LinearState, dot: decays.Dot) -> tuple[LinearState, LinearState]:
    """The states at the chunks' starts, and the last one."""
    k = times(piece.k, decay.to_end)
    added = LinearState(dot("njd,nje->nde", k, piece.v), None if first.z is None else k.sum(1))
    last, starts = lax.scan(_advance, first, (decay.total, added))
    return starts, last


def _state_gradients(
    decay: decays.Decay, piece: Piece, d: ResultGradients, last: LinearState, dot: decays.Dot
) -> tuple[LinearState, LinearState]:
    """The gradients by the states at the chunks' ends, and by the first one."""
    q = times(piece.q, decay.from_start)
    dz = None if d.normalizer is None else dot("gnid,gni->nd", q, d.normalizer)
    added = LinearState(dot("gnid,gnie->nde", q, d.sums), dz)
    first, ends = lax.scan(_advance, last, (decay.total, added), reverse=True)
    return ends, first


def _advance(state: LinearState, step: tuple[Array | None, LinearState]) -> tuple[LinearState, LinearState]:
    """The next state of a scan in either direction, and the one before."""
    total, added = step  # the former a log

    def one(old: Array, new: Array) -> Array:
        if total is None:
            return old + new
        return decays.decayed(old, total if old.ndim == 1 else total[:, None]) + new

    return jax.tree.map(one, state, added), state
