# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""One decay a token and key channel inside a kernel: `haliax_kernels.linear.decays.ChannelDecay` in matrix products.

A log between a token and the middle of its block is a product of the chunk's logs with a matrix of zeros and ones, so
that each is a sum of its own summands. Each halving of the chunk is a product of whole chunks, of which the squares of
that halving are taken: those pairs whose numbers differ in one bit, and none above it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from haliax_kernels.linear import decays
from haliax_kernels.linear.pallas_gpu.decay import NoDecay, TokenDecay
from haliax_kernels.linear.pallas_gpu.plan import Plan
from haliax_kernels.linear.pallas_gpu.tile import Span, load, store
from haliax_kernels.pallas_triton import Index

Square = Float32[Array, "size size"]
Channels = Float[Array, "size key_block"]


class ChannelDecay(NoDecay):
    """A chunk with one decay a token and key channel."""

    def carry(self, state: Float32[Array, "key_block ..."], keys: Span) -> Float32[Array, "key_block ..."]:
        """As `NoDecay.carry`."""
        total = load(self.refs["total"], self.index, keys)
        return decays.decayed(state, total if state.ndim == 1 else total[:, None])

    def to_end(self, k: Channels, keys: Span) -> Channels:
        """As `NoDecay.to_end`."""
        i, t = self.pairs()
        return k.astype(jnp.float32) * self._decay(t > i, keys)

    def from_start(self, q: Channels, keys: Span) -> Channels:
        """As `NoDecay.from_start`."""
        i, t = self.pairs()
        return q.astype(jnp.float32) * self._decay(t <= i, keys)

    def _decay(self, summed: Bool[Array, "size size"], keys: Span) -> Channels:
        """For token i the exponential of the sum over those logs t that `summed` says, by i and t."""
        ones = jnp.where(summed, 1.0, 0.0).astype(jnp.bfloat16)
        rest, total = load(self.refs["log"], self.tokens, keys), jnp.zeros((), jnp.float32)
        # Three parts of 8 bits are all of a float32; their products with ones are exact.
        for _ in range(3):
            part = rest.astype(jnp.bfloat16)
            rest = rest - part.astype(jnp.float32)
            total = total + self.plan.dot(ones, part, (1, 0))
        return jnp.exp(jnp.minimum(total, 0.0))

    def _reach(self, level: Index) -> Bool[Array, "size size"]:
        """By i and t, whether the decay of t lies between i and the middle of i's block of `2**(level + 1)`."""
        i, t = self.pairs()
        half = i >> level
        return (half == (t >> level)) & jnp.where((half & 1) == 1, t <= i, t > i)

    def _halvings(self, body: Any, state: Any) -> Any:
        """Fold `body(level, square, state)` over the halvings; `square` are its pairs, causal or not."""
        first, second = self.pairs()

        def of_level(level, state):
            return body(level, ((first ^ second) >> level) == 1, state)

        return lax.fori_loop(np.int32(0), np.int32(self.plan.size.bit_length() - 1), of_level, state)

    def _at(self, x: Channels, decay: Channels) -> Channels:
        return self.plan.narrow(x.astype(jnp.float32) * decay)

    def _diagonal(self, x: Square) -> Square:
        first, second = self.pairs()
        return jnp.where(first == second, x, 0.0)

    def products(self, q: Channels, k: Channels, keys: Span, *, keys_first: bool) -> Square:
        """As `NoDecay.products`, but decayed."""
        a, b = (k, q) if keys_first else (q, k)

        def of_level(level, square, products):
            decay = self._decay(self._reach(level), keys)
            return jnp.where(square, self.plan.dot(self._at(a, decay), self._at(b, decay), (1, 1)), products)

        return self._halvings(of_level, self._diagonal(self.plan.dot(a, b, (1, 1))))

    def queries(
        self, dproducts: Square, dq: Channels, q: Channels, k: Channels, keys: Span
    ) -> tuple[Channels, Channels | None]:
        """As `NoDecay.queries`."""
        dlog = None
        if self.plan.want_log:
            i, t = self.pairs()
            dlog = self._log(t <= i, q, dq)
        return self._gradient(dproducts, dq, dlog, q, k, keys)

    def keys(self, dproducts: Square, q: Channels, k: Channels, keys: Span) -> tuple[Channels, Channels | None]:
        """As `NoDecay.keys`."""
        zero = jnp.zeros(k.shape, jnp.float32)
        return self._gradient(dproducts, zero, zero if self.plan.want_log else None, k, q, keys)

    def _gradient(
        self, dproducts: Square, dx: Channels, dlog: Channels | None, x: Channels, other: Channels, keys: Span
    ) -> tuple[Channels, Channels | None]:
        """`dx` and `dlog` with what the products of `x` and `other` add, by the first dimension of `dproducts`."""

        def of_level(level, square, state):
            dx, dlog = state
            reach = self._reach(level)
            decay = self._decay(reach, keys)
            da = self.plan.narrow(jnp.where(square, dproducts, 0.0))
            here = decay * self.plan.dot(da, self._at(other, decay), (1, 0))
            return dx + here, None if dlog is None else dlog + self._log(reach, x, here)

        dx = dx + self.plan.dot(self.plan.narrow(self._diagonal(dproducts)), other, (1, 0))
        return self._halvings(of_level, (dx, dlog))

    def _log(self, summed: Bool[Array, "size size"], x: Channels, dx: Channels) -> Channels:
        """The gradient by the logs t of what `_decay(summed)` did to each token i of `x`."""
        return self.plan.dot(jnp.where(summed, 1.0, 0.0), x.astype(jnp.float32) * dx, (0, 0))

    def log_of_end(self, through: Channels) -> Channels:
        """As `NoDecay.log_of_end`."""
        i, t = self.pairs()
        return self._log(t > i, through, jnp.ones((), jnp.float32))

    def store_log(self, name: str, dlog: Channels, block: Index, *lead: Index) -> None:
        """As `NoDecay.store_log`."""
        store(self.refs[name], dlog, *lead, self.tokens, Span.keys(self.plan, block))


def chunk_of(plan: Plan, refs: dict[str, Any], index: Index) -> NoDecay:
    """A chunk with the plan's kind of decay."""
    return {"none": NoDecay, "token": TokenDecay, "channel": ChannelDecay}[plan.decay](plan, refs, index)
