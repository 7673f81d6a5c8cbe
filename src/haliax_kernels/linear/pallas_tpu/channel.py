# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""One decay a token and key channel inside a kernel: `haliax_kernels.linear.decays.ChannelDecay` for the matrix units.

Each halving of the chunk is a product of whole chunks, of which the squares of that halving are taken: the matrix
units are as fast on all of it. Which halving a pair belongs to is the highest bit in which the two tokens' numbers
differ.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from haliax_kernels.linear import decays
from haliax_kernels.linear.pallas_tpu.plan import Plan, column

_SUBLANES = 8


class ChannelDecay:
    """A chunk's decays; `log` is at most 0."""

    def __init__(self, plan: Plan, log: Float32[Array, "size key"]):
        self.plan = plan
        *levels, (_, prefix, suffix) = _levels(log)
        self.start, self.end = jnp.exp(prefix), jnp.exp(suffix)
        self.total = prefix[plan.size - 1 :]
        # The first entry is for the diagonal.
        self.levels = [(0, None), *((half, jnp.exp(exponent)) for half, exponent, _ in levels)]

    def carry(self, x: Float32[Array, "rows key"]) -> Array:
        """As `NoDecay.carry`."""
        weak = self.total > decays.WEAK
        rest = jnp.where(weak, _expm1(self.total), jnp.exp(self.total))
        return x * jnp.where(weak, 1.0, 0.0) + x * rest

    def to_end(self, k: Array) -> Array:
        """As `NoDecay.to_end`."""
        return k.astype(jnp.float32) * self.end

    def from_start(self, q: Array, scale: float = 1.0) -> Array:
        """As `NoDecay.from_start`."""
        return q.astype(jnp.float32) * (self.start if scale == 1 else self.start * scale)

    def _pairs(self, queries: int) -> tuple[Array, Array]:
        """Of a square of pairs: whether the query is not before the key, and the exclusive or of both numbers."""
        shape = (self.plan.size, self.plan.size)
        i, j = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (queries, 1 - queries))
        return j <= i, i ^ j

    def _decayed(self, x: Array, decay: Array | None) -> Array:
        return x if decay is None else self.plan.narrow(x.astype(jnp.float32) * decay)

    def _scores(self, a: Array, b: Array, queries: int) -> Array:
        causal, different = self._pairs(queries)
        scores = jnp.zeros(causal.shape, jnp.float32)
        for half, decay in self.levels:
            product = self.plan.dot(self._decayed(a, decay), self._decayed(b, decay), (1, 1))
            scores = product if half == 0 else jnp.where(different >= half, product, scores)
        return jnp.where(causal, scores, 0.0)

    def scores(self, q: Array, k: Array) -> Float32[Array, "q k"]:
        """As `NoDecay.scores`."""
        return self._scores(q, k, 0)

    def queries(
        self, scale: float, q: Array, k: Array, v: Array, dsums: Array, dnormalizer: Array | None, reach: Any
    ) -> tuple[Array, Array, Array, Array | None]:
        """Gradients that a chunk's results send to what is in the chunk.

        Args:
            scale: of the results.
            q: queries.
            k: keys.
            v: values.
            dsums: gradients of the sums.
            dnormalizer: of the normaliser, a row.
            reach: for each halving `decays.reach`, if the gradient by the logs is wanted.

        Returns:
            The gradients by q, k, v, and by the logs.
        """
        plan = self.plan
        dot, narrow = plan.dot, plan.narrow
        # Both ways round: a product is cheaper than the transposes of all its parts.
        by_query, by_key = dot(dsums, v, (1, 1)), dot(v, dsums, (1, 1))
        if dnormalizer is not None:
            by_query, by_key = by_query + column(dnormalizer), by_key + dnormalizer
        (causal, different), (causal_k, different_k) = self._pairs(0), self._pairs(1)
        by_query, by_key = (jnp.where(c, d * scale, 0.0) for c, d in ((causal, by_query), (causal_k, by_key)))
        scores = dq = dk = jnp.zeros((), jnp.float32)
        dlog = None
        for level, (half, decay) in enumerate(self.levels):
            q_here, k_here = self._decayed(q, decay), self._decayed(k, decay)
            products = dot(k_here, q_here, (1, 1))
            here, here_k = (x == 0 if half == 0 else (x >= half) & (x < 2 * half) for x in (different, different_k))
            dq_here = dot(narrow(jnp.where(here, by_query, 0.0)), k_here, (1, 0))
            dk_here = dot(narrow(jnp.where(here_k, by_key, 0.0)), q_here, (1, 0))
            if decay is None:
                scores, dq, dk = products, dq_here, dk_here
                continue
            scores = jnp.where(different_k >= half, products, scores)
            dq_here, dk_here = dq_here * decay, dk_here * decay
            dq, dk = dq + dq_here, dk + dk_here
            if reach is not None:
                # One of the two is 0: a first half has no query in the square, and a second one no key.
                through = q.astype(jnp.float32) * dq_here + k.astype(jnp.float32) * dk_here
                part = dot(reach[level - 1], narrow(through), (1, 0))
                dlog = part if dlog is None else dlog + part
        scores = jnp.where(causal_k, scores * scale, 0.0)
        return dq, dk, dot(narrow(scores), dsums, (1, 0)), dlog

    def of_states(self, through_q: Array, through_k: Array, through: Array) -> Float32[Array, "size key"]:
        """The gradient by the logs from what passed between tokens and the states at the chunk's ends.

        Args:
            through_q: from the start to each token.
            through_k: from each token to the end.
            through: from the start to the end, without the decay of the chunk.
        """
        plan = self.plan
        shape = (plan.size, plan.size)
        t, i = lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)
        later, earlier = (plan.narrow(jnp.where(m, 1.0, 0.0)) for m in (i >= t, i < t))
        found = plan.dot(later, plan.narrow(through_q), (1, 0)) + plan.dot(earlier, plan.narrow(through_k), (1, 0))
        return found + through * jnp.exp(self.total)


def reaches(plan: Plan) -> Array:
    """What `ChannelDecay.queries` wants."""
    halves = [1 << n for n in range(plan.size.bit_length() - 1)]
    return jnp.asarray(np.stack([decays.reach(plan.size, half) for half in halves]), plan.dtype)


def _expm1(x: Array) -> Array:
    """By its series, to float32's precision above `decays.WEAK`: Mosaic has none."""
    found = jnp.ones_like(x)
    for n in range(8, 1, -1):
        found = 1 + x * found * (1 / n)
    return x * found


def _levels(log: Float32[Array, "size key"]) -> Iterator[tuple[int, Array, Array]]:
    """As `decays._levels`, but of each halving the two sums in one array: both halves have the one they need."""
    size = log.shape[0]
    token = lax.broadcasted_iota(jnp.int32, log.shape, 0)
    half, prefix, suffix = 1, log, jnp.zeros_like(log)
    while half < size:
        second = (token & half) != 0
        yield half, jnp.where(second, prefix, suffix), suffix
        other = _other_half(prefix, half)
        prefix, suffix = jnp.where(second, prefix + other, prefix), jnp.where(second, suffix, suffix + other)
        half *= 2
    yield half, prefix, suffix


def _other_half(x: Float32[Array, "size key"], half: int) -> Float32[Array, "size key"]:
    """For each token the last row of the other half of its block of `2 * half` tokens."""
    size, key = x.shape
    if half >= _SUBLANES:
        last = x.reshape(size // (2 * half), 2, half, key)[:, :, half - 1 :]
        last = jnp.concatenate([last[:, 1:], last[:, :1]], 1)
        return jnp.broadcast_to(last, (size // (2 * half), 2, half, key)).reshape(size, key)
    tiles = x.reshape(size // _SUBLANES, _SUBLANES, key)
    row = lax.broadcasted_iota(jnp.int32, tiles.shape, 1)
    found = jnp.zeros_like(tiles)
    for first in range(0, _SUBLANES, half):
        source = (first ^ half) + half - 1
        there = jnp.broadcast_to(tiles[:, source : source + 1], tiles.shape)
        found = there if first == 0 else jnp.where(row >= first, there, found)
    return found.reshape(size, key)
