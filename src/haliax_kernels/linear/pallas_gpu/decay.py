# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The decays of a chunk inside a kernel, where there is none or one a token; those of channels are in `channel`."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from haliax_kernels.linear import decays
from haliax_kernels.linear.pallas_gpu.plan import Plan
from haliax_kernels.linear.pallas_gpu.tile import Span, load, store
from haliax_kernels.pallas_triton import Index


@dataclass(frozen=True)
class NoDecay:
    """A chunk without decay. What is `size` by `size` is of each pair of a query and a key, or of a key and a query.

    Attributes:
        plan: of the call.
        refs: what the kernel has, with `decay_operands`.
        index: the chunk's number.
    """

    plan: Plan
    refs: dict[str, Any]
    index: Index

    @property
    def tokens(self) -> Span:
        """Its place in an array as long as the operands."""
        return Span(self.index * self.plan.size, self.plan.size, self.plan.length)

    def pairs(self) -> tuple[Int32[Array, "size size"], Int32[Array, "size size"]]:
        """Numbers of tokens, of the first and the second dimension."""
        shape = (self.plan.size, self.plan.size)
        return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)

    def causal(self, keys_first: bool) -> Bool[Array, "size size"]:
        """Whether the query is not before the key."""
        first, second = self.pairs()
        return first <= second if keys_first else second <= first

    def carry(self, state: Float32[Array, "key_block ..."], keys: Span) -> Float32[Array, "key_block ..."]:
        """A state, or its gradient, taken through the chunk."""
        del keys
        return state

    def to_end(self, k: Float[Array, "size key_block"], keys: Span) -> Float[Array, "size key_block"]:
        """Keys as the chunk's end sees them."""
        del keys
        return k

    def from_start(self, q: Float[Array, "size key_block"], keys: Span) -> Float[Array, "size key_block"]:
        """Queries as they see the chunk's start."""
        del keys
        return q

    def products(
        self, q: Float[Array, "size key_block"], k: Float[Array, "size key_block"], keys: Span, *, keys_first: bool
    ) -> Float32[Array, "size size"]:
        """What these channels add to all products, which `weigh` takes."""
        del keys
        return self.plan.dot(k, q, (1, 1)) if keys_first else self.plan.dot(q, k, (1, 1))

    def weigh(self, x: Float32[Array, "size size"], *, keys_first: bool) -> Float32[Array, "size size"]:
        """Products, or gradients by scores: decayed, unless that is done elsewhere, and 0 where the key is later."""
        return jnp.where(self.causal(keys_first), x, 0.0)

    def queries(
        self,
        dproducts: Float32[Array, "q k"],
        dq: Float32[Array, "size key_block"],
        q: Float[Array, "size key_block"],
        k: Float[Array, "size key_block"],
        keys: Span,
    ) -> tuple[Float32[Array, "size key_block"], Array | None]:
        """The gradient by the queries, and what it says of that by the logs of decays, if wanted.

        Args:
            dproducts: the gradient by scores, after `weigh`.
            dq: the gradient through the state at the chunk's start.
            q: queries.
            k: keys.
            keys: the channels.
        """
        del q, keys
        return dq + self.plan.dot(self.plan.narrow(dproducts), k, (1, 0)), None

    def keys(
        self, dproducts: Float32[Array, "k q"], q: Float[Array, "size key_block"], k: Array, keys: Span
    ) -> tuple[Float32[Array, "size key_block"], Array | None]:
        """What a head's queries add to the gradient by the keys, and, if wanted, to that by the logs."""
        del k, keys
        return self.plan.dot(self.plan.narrow(dproducts), q, (1, 0)), None

    def log_of_end(self, through: Float32[Array, "size key_block"]) -> Array:
        """The gradient by the logs of what passes from each token to the chunk's end."""
        raise NotImplementedError

    def store_log(self, name: str, dlog: Array, block: Index, *lead: Index) -> None:
        """Write the gradient by the logs that comes from a block of channels."""
        store(self.refs[name], dlog, *lead, block, self.tokens)


class TokenDecay(NoDecay):
    """A chunk with one decay a token."""

    def _row(self, name: str) -> Float32[Array, " size"]:
        size = self.plan.size
        return load(self.refs[name], Span(self.index * size, size, self.plan.chunks * size))

    def carry(self, state: Array, keys: Span) -> Array:
        """As `NoDecay.carry`."""
        del keys
        return decays.decayed(state, load(self.refs["total"], self.index))

    def to_end(self, k: Array, keys: Span) -> Array:
        """As `NoDecay.to_end`."""
        del keys
        return k.astype(jnp.float32) * self._row("to_end")[:, None]

    def from_start(self, q: Array, keys: Span) -> Array:
        """As `NoDecay.from_start`."""
        del keys
        return q.astype(jnp.float32) * self._row("from_start")[:, None]

    def weigh(self, x: Float32[Array, "size size"], *, keys_first: bool) -> Float32[Array, "size size"]:
        """As `NoDecay.weigh`."""
        log = jnp.zeros((), jnp.float32)
        for name in ("exact", "rest"):
            row = self._row(name)
            log = log + (row[None, :] - row[:, None] if keys_first else row[:, None] - row[None, :])
        return x * jnp.exp(jnp.where(self.causal(keys_first), log, -jnp.inf))

    def queries(
        self, dproducts: Float32[Array, "q k"], dq: Array, q: Array, k: Array, keys: Span
    ) -> tuple[Array, Array | None]:
        """As `NoDecay.queries`."""
        total, _ = super().queries(dproducts, dq, q, k, keys)
        if not self.plan.want_log:
            return total, None
        # The decay of token t lies between all pairs j < t <= i, and between all i >= t and the chunk's start.
        first, second = self.pairs()
        through = dproducts * self.plan.dot(q, k, (1, 1))
        after = self.plan.dot(jnp.where(first <= second, 1.0, 0.0), through, (1, 0))
        between = jnp.where(second < first, after, 0.0).sum(1)
        through = (q.astype(jnp.float32) * dq).sum(1)
        return total, between + jnp.where(second <= first, through[:, None], 0.0).sum(0)

    def log_of_end(self, through: Float32[Array, "size key_block"]) -> Float32[Array, " size"]:
        """As `NoDecay.log_of_end`."""
        first, second = self.pairs()
        return jnp.where(first < second, through.sum(1)[:, None], 0.0).sum(0)
