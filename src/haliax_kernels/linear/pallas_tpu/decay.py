# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Decays inside a kernel, where there is none or one a token; those of channels are in `channel`."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from haliax_kernels.linear.pallas_tpu.plan import Plan


class NoDecay:
    """A chunk without decay."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def _iota(self) -> tuple[Array, Array]:
        shape = (self.plan.size, self.plan.size)
        return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)

    def carry(self, x: Float32[Array, "rows key"]) -> Array:
        """A state, or its gradient, taken through the chunk."""
        return x

    def to_end(self, k: Array) -> Array:
        """Keys as the chunk's end sees them."""
        return k

    def from_start(self, q: Array, scale: float = 1.0) -> Array:
        """Queries as they see the chunk's start."""
        return q if scale == 1 else q.astype(jnp.float32) * scale

    def scores(self, q: Array, k: Array) -> Float32[Array, "q k"]:
        """The weights of values in results, queries first."""
        i, j = self._iota()
        return jnp.where(j <= i, self.plan.dot(q, k, (1, 1)), 0.0)

    def weigh(self, scale: float, *products: Float32[Array, "k q"]) -> list[Float32[Array, "k q"]]:
        """Products, keys first, scaled, decayed and masked."""
        j, i = self._iota()
        return [jnp.where(j <= i, p if scale == 1 else p * scale, 0.0) for p in products]


class TokenDecay(NoDecay):
    """A chunk with one decay a token; `rows` are those of `plan.decay_operands`."""

    def __init__(self, plan: Plan, rows: Float32[Array, "8 size"]):
        super().__init__(plan)
        self.rows, self.columns = rows, rows.T

    def carry(self, x: Array) -> Array:
        """As `NoDecay.carry`; twice, so that a weak decay is a small difference."""
        return x * self.rows[4:5, :1] + x * self.rows[5:6, :1]

    def to_end(self, k: Array) -> Array:
        """As `NoDecay.to_end`."""
        return k.astype(jnp.float32) * self.columns[:, 1:2]

    def from_start(self, q: Array, scale: float = 1.0) -> Array:
        """As `NoDecay.from_start`."""
        return q.astype(jnp.float32) * (self.columns[:, :1] * scale)

    def _decays(self, later: Array, earlier: Array, exact: Any, rest: Any) -> Array:
        return jnp.exp(jnp.where(earlier <= later, exact + rest, -jnp.inf))

    def scores(self, q: Array, k: Array) -> Float32[Array, "q k"]:
        """As `NoDecay.scores`."""
        i, j = self._iota()
        exact, rest = (self.columns[:, r : r + 1] - self.rows[r : r + 1] for r in (2, 3))
        return self.plan.dot(q, k, (1, 1)) * self._decays(i, j, exact, rest)

    def weigh(self, scale: float, *products: Array) -> list[Array]:
        """As `NoDecay.weigh`."""
        j, i = self._iota()
        exact, rest = (self.rows[r : r + 1] - self.columns[:, r : r + 1] for r in (2, 3))
        decay = self._decays(i, j, exact, rest)
        decay = decay if scale == 1 else decay * scale
        return [p * decay for p in products]

    def between(self, through: Float32[Array, "k q"]) -> Float32[Array, "1 size"]:
        """For each token the sum over pairs between which its decay lies, `j < t <= i`."""
        plan = self.plan
        i, t = self._iota()
        tri = jnp.where(i >= t, 1.0, 0.0)
        later = plan.dot(plan.narrow(through), plan.narrow(tri), (1, 0))
        return jnp.where(i < t, later, 0.0).sum(0, keepdims=True)
