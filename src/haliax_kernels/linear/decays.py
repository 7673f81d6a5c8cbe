# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What decay does inside chunks, without an exponential above 1 or a quotient of decays.

A decay between two tokens is the exponential of a sum of logs over the tokens between them, and each such sum is made
of the summands themselves: the difference of two cumulative sums would lose the digits of small decays behind large
ones. A decay of 0, and the start of a segment, is a log of `FLOOR`, whose exponential is 0 in float32.

Arrays are those of `n` chunks of `size` tokens each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

Dot = Callable[[str, Array, Array], Float32[Array, "..."]]
Scores = Float32[Array, "group n size size"]

# exp(-128) underflows to 0. 256 tokens of it sum to 2**15, of which float32 still holds multiples of 2**-9.
FLOOR = -128.0
_QUANTUM = 2.0**-9
# Above this log a decay is applied as a small difference (see `decayed`).
WEAK = -0.5


def per_token(
    log_decay: Float32[Array, "..."] | None, segment_ids: Int32[Array, " pos"] | None, length: int
) -> Float32[Array, " pos"] | Float32[Array, "pos key"] | None:
    """Logs of each token (and channel), not below `FLOOR`, and `FLOOR` where a segment starts; None for no decay."""
    if log_decay is None and segment_ids is None:
        return None
    log = jnp.float32(0) if log_decay is None else jnp.maximum(log_decay.astype(jnp.float32), FLOOR)
    log = jnp.broadcast_to(log, (length,)) if log.ndim == 0 else log
    if segment_ids is None:
        return log
    starts = segment_starts(segment_ids)
    return jnp.where(starts if log.ndim == 1 else starts[:, None], FLOOR, log)


def segment_starts(segment_ids: Int32[Array, " pos"]) -> Bool[Array, " pos"]:
    """Whether a token's id is another than that of the token before; never at the first token."""
    return jnp.concatenate([jnp.zeros(1, bool), segment_ids[1:] != segment_ids[:-1]])[: segment_ids.shape[0]]


def per_operand(dlog: Array | None, log_decay: Array | None, segment_ids: Array | None) -> Array | None:
    """The gradient by `log_decay` from that by the logs that `per_token` made of it."""
    if dlog is None or log_decay is None:
        return None
    if segment_ids is not None:
        starts = segment_starts(segment_ids)
        dlog = jnp.where(starts if dlog.ndim == 1 else starts[:, None], 0, dlog)
    return dlog.sum() if log_decay.ndim == 0 else dlog


@dataclass(frozen=True)
class NoDecay:
    """Scores are products; nothing else is scaled.

    Attributes:
        size: tokens per chunk.
        dot: an einsum in float32.
    """

    size: int
    dot: Dot
    # None stands for 1: decays from the chunk's start through a token, and from behind a token to its end; and the log
    # of the whole chunk's.
    from_start = to_end = total = None

    def scores(self, q: Array, k: Array) -> tuple[Scores, Any]:
        """The weight of each token's value in each token's result, 0 for later ones; and what `backward` needs."""
        return jnp.where(np.tri(self.size, dtype=bool), self.dot("gnid,njd->gnij", q, k), 0), None

    def backward(self, saved: Any, q: Array, k: Array, da: Scores, want_log: bool) -> tuple[Array, Array, None]:
        """Gradients by q, k, and the logs, from those by the scores (anything above the diagonal)."""
        da = jnp.where(np.tri(self.size, dtype=bool), da, 0)
        return self.dot("gnij,njd->gnid", da, k), self.dot("gnij,gnid->njd", da, q), None


class TokenDecay:
    """One decay a token; `from_start` and `to_end` are (n, size, 1), `total` is a log, (n, 1)."""

    def __init__(self, log: Float32[Array, "n size"], dot: Dot):
        self.size, self.dot = log.shape[-1], dot
        sums = token_sums(log)
        self.from_start = jnp.exp(sums.prefix)[..., None]
        self.to_end = jnp.exp(sums.suffix)[..., None]
        self.total = sums.prefix[..., -1:]
        between = sum(c[..., :, None] - c[..., None, :] for c in (sums.exact, sums.rest))
        self.between = jnp.exp(jnp.where(np.tri(self.size, dtype=bool), between, -jnp.inf))

    def scores(self, q: Array, k: Array) -> tuple[Scores, Any]:
        """As `NoDecay.scores`."""
        scores = self.dot("gnid,njd->gnij", q, k) * self.between
        return scores, scores

    def backward(self, saved: Scores, q: Array, k: Array, da: Scores, want_log: bool) -> tuple[Array, Array, Any]:
        """As `NoDecay.backward`."""
        dqk = da * self.between
        dq, dk = self.dot("gnij,njd->gnid", dqk, k), self.dot("gnij,gnid->njd", dqk, q)
        if not want_log:
            return dq, dk, None
        # The decay of token t lies between all pairs j < t <= i.
        after = self.dot("ti,nij->ntj", jnp.tri(self.size, dtype=jnp.float32).T, (da * saved).sum(0))
        return dq, dk, jnp.where(np.tri(self.size, k=-1, dtype=bool), after, 0).sum(-1)


class TokenSums(NamedTuple):
    """Sums of a chunk's logs. The decay between tokens j and i is that of `exact_i - exact_j + (rest_i - rest_j)`.

    Attributes:
        prefix: through each token.
        suffix: from behind each token.
        exact: through each token, of the nearest multiples of the quantum; differences of these are exact.
        rest: through each token, of what is left; it is small.
    """

    prefix: Float32[Array, "n size"]
    suffix: Float32[Array, "n size"]
    exact: Float32[Array, "n size"]
    rest: Float32[Array, "n size"]


def token_sums(log: Float32[Array, "n size"]) -> TokenSums:
    """The sums of one log a token."""
    exact = jnp.round(log / _QUANTUM) * _QUANTUM
    return TokenSums(
        lax.cumsum(log, 1), _shift(after(log, 1), 1, -1), lax.cumsum(exact, 1), lax.cumsum(log - exact, 1)
    )


class ChannelDecay:
    """One decay a token and key channel; `from_start` and `to_end` are (n, size, key), `total` is a log, (n, key).

    The pairs below the diagonal are cut into squares: a chunk's second half sees its first half, and so on in each
    half. In a square the decay is that from a query back to the border between both halves, times that from the border
    back to a key. This is the secondary chunking of GLA (Yang et al. 2024, https://arxiv.org/abs/2312.06635, section
    4.3) carried on down to single tokens: there is no pair left whose decays must be computed by themselves.
    """

    def __init__(self, log: Float32[Array, "n size key"], dot: Dot):
        self.size, self.dot = log.shape[-2], dot
        *levels, (_, prefix, suffix) = _levels(log)
        self.from_start, self.to_end, self.total = jnp.exp(prefix), jnp.exp(suffix), prefix[:, -1]
        second = np.arange(self.size)[:, None]
        self.levels = [(h, jnp.exp(jnp.where(second // h % 2 == 1, p, s))) for h, p, s in levels]

    def scores(self, q: Array, k: Array) -> tuple[Scores, Any]:
        """As `NoDecay.scores`."""
        scores = jnp.where(np.eye(self.size, dtype=bool), jnp.sum(q * k, -1, keepdims=True), 0)
        for half, decay in self.levels:
            scores = jnp.where(square(self.size, half), self.dot("gnid,njd->gnij", q * decay, k * decay), scores)
        return scores, None

    def backward(self, saved: Any, q: Array, k: Array, da: Scores, want_log: bool) -> tuple[Array, Array, Any]:
        """As `NoDecay.backward`."""
        diagonal = jnp.where(np.eye(self.size, dtype=bool), da, 0).sum(-1, keepdims=True)
        dq, dk, dlog = diagonal * k, (diagonal * q).sum(0), jnp.zeros_like(k) if want_log else None
        for half, decay in self.levels:
            da_here = jnp.where(square(self.size, half), da, 0)
            dq_here = decay * self.dot("gnij,njd->gnid", da_here, k * decay)
            dk_here = decay * self.dot("gnij,gnid->njd", da_here, q * decay)
            dq, dk = dq + dq_here, dk + dk_here
            if dlog is not None:
                # One of the two is 0: the first half has no query in the square, and the second no key.
                through = (q * dq_here).sum(0) + k * dk_here
                dlog = dlog + self.dot("ti,nid->ntd", jnp.asarray(reach(self.size, half)), through)
        return dq, dk, dlog


def square(size: int, half: int) -> Bool[np.ndarray, "size size"]:
    """The pairs of a query in a second half and a key in the first half of the same block of `2 * half` tokens."""
    i, j = np.arange(size)[:, None], np.arange(size)[None, :]
    return (i // (2 * half) == j // (2 * half)) & (i // half % 2 == 1) & (j // half % 2 == 0)


def reach(size: int, half: int) -> Float32[np.ndarray, "size size"]:
    """At (t, i), 1 if the decay of token t lies between token i and the middle of i's block of `2 * half` tokens."""
    t, i = np.arange(size)[:, None], np.arange(size)[None, :]
    return ((t // half == i // half) & np.where(i // half % 2 == 1, i >= t, i < t)).astype(np.float32)


def _levels(log: Float32[Array, "n size key"]) -> Iterator[tuple[int, Array, Array]]:
    """For halves of 1, 2, ... `size` tokens: sums from a half's start through a token, and from behind it to the end.

    By additions alone, each sum of its own summands.
    """
    n, size, key = log.shape
    half, prefix, suffix = 1, log, jnp.zeros_like(log)
    while True:
        yield half, prefix, suffix
        if half == size:
            return
        prefix, suffix = (x.reshape(n, size // (2 * half), 2, half, key) for x in (prefix, suffix))
        first, second = prefix[:, :, 0, -1:], prefix[:, :, 1, -1:]
        prefix = jnp.stack([prefix[:, :, 0], prefix[:, :, 1] + first], 2).reshape(n, size, key)
        suffix = jnp.stack([suffix[:, :, 0] + second, suffix[:, :, 1]], 2).reshape(n, size, key)
        half *= 2


Decay = NoDecay | TokenDecay | ChannelDecay


def of(log: Array | None, size: int, dot: Dot) -> Decay:
    """The decays of chunks: `log` is None, (n, size) or (n, size, key)."""
    if log is None:
        return NoDecay(size, dot)
    return TokenDecay(log, dot) if log.ndim == 2 else ChannelDecay(log, dot)


def decayed(x: Array, log: Array) -> Array:
    """`x * exp(log)`, where this is done over and over: as `x` less a little if the decay is weak.

    The rounding of a factor near 1 would add up over thousands of chunks, a constant decay's always the same way.
    """
    return jnp.where(log > WEAK, x + x * jnp.expm1(log), x * jnp.exp(log))


def after(x: Array, axis: int) -> Array:
    """At t the sum over i >= t."""
    return lax.cumsum(x, axis % x.ndim, reverse=True)


def before(x: Array, axis: int) -> Array:
    """At t the sum over j < t."""
    return _shift(lax.cumsum(x, axis % x.ndim), axis, 1)


def _shift(x: Array, axis: int, by: int) -> Array:
    """`x` moved by one place to later or to earlier indices, with 0 in the place that is left."""
    axis = axis % x.ndim
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (by, -by, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), widths)
