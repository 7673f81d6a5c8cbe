# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""One decay a token and key channel inside a kernel: `haliax_kernels.linear.decays.ChannelDecay` for the matrix units.

In a halving of the chunk, queries matter in the second halves and keys in the first ones. So there is one array of
both, `mixed`, with the decays from each token to the border between its halves. Its product with itself holds the
scores with queries first below the diagonal, and with keys first above it; and a symmetric array of the scores'
gradients times it holds the gradients by queries in the second halves and by keys in the first ones. A halving's part
of that array is taken by masks of bits: packed operands of the matrix units have fewer registers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float32, Int32

from haliax_kernels.linear import decays
from haliax_kernels.linear.pallas_tpu import halves
from haliax_kernels.linear.pallas_tpu.plan import Plan, column


class ChannelDecay:
    """A chunk's decays; `log` is at most 0."""

    def __init__(self, plan: Plan, log: Float32[Array, "size key"]):
        self.plan = plan
        # Exponentials are powers of 2 to the hardware.
        *levels, (_, prefix, suffix) = halves.sums(log * math.log2(math.e))
        self.start, self.end = jnp.exp2(prefix), jnp.exp2(suffix)
        self.total = prefix[plan.size - 1 :] * math.log(2)
        self.levels = [(half, jnp.exp2(halves.mix(s, p, half))) for half, p, s in levels]

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

    def scores(self, q: Array, k: Array) -> Array:
        """As `NoDecay.scores`."""
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        found = self._diagonal((q * k).sum(1, keepdims=True))
        for half, decay in self.levels:
            here = halves.mix(k, q, half) * decay
            found = self._add_scores(found, half, here, 1)
        return jnp.where(self._causal(0), found, 0.0)

    def queries(
        self,
        scale: float,
        q: Array,
        k: Array,
        v: Array,
        dsums: Array,
        dnormalizer: Array | None,
        masks: Any,
        passed: Callable[[int, Float32[Array, "size key"]], None],
    ) -> tuple[Array, Array, Array]:
        """Gradients that a chunk's results send to what is in the chunk.

        Args:
            scale: of the results.
            q: queries.
            k: keys.
            v: values.
            dsums: gradients of the sums.
            dnormalizer: of the normaliser, a row.
            masks: those of `pair_masks`.
            passed: is called for each halving, counted from the smallest, with what passed between each token and the
                border between its halves, for `log_gradient`.

        Returns:
            The gradients by q, k, and v.
        """
        plan = self.plan
        dot, narrow = plan.dot, plan.narrow
        by_query, by_key = dot(dsums, v, (1, 1)), dot(v, dsums, (1, 1))
        if dnormalizer is not None:
            by_query, by_key = by_query + column(dnormalizer), by_key + dnormalizer
        by_pair = jnp.where(self._causal(0), by_query, by_key)
        by_pair = by_pair if scale == 1 else by_pair * scale
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        by_itself = self._diagonal(by_pair).sum(1, keepdims=True)
        dq, dk = by_itself * k, by_itself * q
        by_pair = pltpu.bitcast(narrow(by_pair), jnp.int32)
        scores = self._diagonal((q * k).sum(1, keepdims=True))
        for level, (half, decay) in enumerate(self.levels):
            mixed = halves.mix(k, q, half)
            here = mixed * decay
            scores = self._add_scores(scores, half, here, 0)
            here = narrow(here)
            of_level = pltpu.bitcast(by_pair & masks[level], plan.dtype)
            d = dot(of_level, here, (1, 0)) * decay
            passed(level, mixed * d)
            dk, dq = halves.add(dk, dq, d, half)
        dv = dot(narrow(jnp.where(self._causal(1), scores, 0.0)), dsums, (1, 0))
        return dq, dk, dv if scale == 1 else dv * scale

    def log_gradient(
        self, through: Sequence[Array], through_k: Array, through_all: Array
    ) -> Float32[Array, "size key"]:
        """The gradient by the logs, from what passed through their sums.

        Args:
            through: for each halving what `queries` said, and then what passed from the start to each token.
            through_k: from each token to the end.
            through_all: from the start to the end, without the decay of the chunk.
        """
        last = lax.broadcasted_iota(jnp.int32, through_k.shape, 0) == self.plan.size - 1
        by_prefix = through[-1] + jnp.where(last, through_all * jnp.exp(self.total), 0.0)
        return halves.gradient_of_sums(through[:-1], by_prefix, through_k)

    def _tokens(self) -> tuple[Int32[Array, "size size"], Int32[Array, "size size"]]:
        shape = (self.plan.size, self.plan.size)
        return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)

    def _causal(self, queries: int) -> Bool[Array, "size size"]:
        """Of pairs whose queries are in this dimension, whether the key is not after the query."""
        tokens = self._tokens()
        return tokens[1 - queries] <= tokens[queries]

    def _diagonal(self, x: Array) -> Float32[Array, "size size"]:
        """Of each token with itself, which no halving has; 0 elsewhere."""
        i, j = self._tokens()
        return jnp.where(i == j, x, 0.0)

    def _add_scores(self, scores: Float32[Array, "size size"], half: int, here: Array, rows: int) -> Array:
        """The scores with those of a halving whose rows are in its first (0) or second halves (1)."""
        plan = self.plan
        i, j = self._tokens()
        different = i ^ j
        narrow = plan.narrow(here)
        if half < halves.TILE:
            return jnp.where(different >= half, plan.dot(narrow, narrow, (1, 1)), scores)
        # The other rows have none, and need no product.
        product = plan.dot(plan.narrow(halves.pick(here, half, rows)), narrow, (1, 1))
        found = jnp.where(halves.pick(different, half, rows) >= half, product, halves.pick(scores, half, rows))
        return halves.replace(scores, found, half, rows)


def pair_masks(plan: Plan) -> Int32[Array, "levels words size"]:
    """Bits of the pairs of each halving, both ways round."""
    squares = np.stack([decays.square(plan.size, 1 << n) for n in range(plan.levels)])
    bits = np.dtype(plan.dtype).itemsize * 8
    masks = np.where(squares | squares.swapaxes(1, 2), np.uint32(2**bits - 1), np.uint32(0))
    if bits == 16:  # two rows a word, the first in its lower half
        masks = masks[:, ::2] | masks[:, 1::2] << 16
    return jnp.asarray(masks.view(np.int32))


def _expm1(x: Array) -> Array:
    """By its series, to float32's precision above `decays.WEAK`: Mosaic has none."""
    found = jnp.ones_like(x)
    for n in range(8, 1, -1):
        found = 1 + x * found * (1 / n)
    return x * found
