# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""One decay a token and key channel inside a kernel: `haliax_kernels.linear.decays.ChannelDecay` for the matrix units.

In a halving of the chunk queries matter in the second halves and keys in the first ones. So there is one array of both,
`mixed`, with the decays from each token to the border between its halves. Its product with itself holds the scores with
queries first below the diagonal, and with keys first above it; and a symmetric array of the scores' gradients times it
holds the gradients by queries in the second halves and by keys in the first ones. Which pairs are of a halving is said
by masks of bits, since the operands of the matrix units are packed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32, Int32

from haliax_kernels.linear import decays
from haliax_kernels.linear.pallas_tpu.plan import Plan, column

_SUBLANES = 8


class ChannelDecay:
    """A chunk's decays; `log` is at most 0, and `masks` are those of `pair_masks`."""

    def __init__(self, plan: Plan, log: Float32[Array, "size key"], masks: Any):
        self.plan, self.masks = plan, masks
        *levels, (_, prefix, suffix) = _levels(log)
        self.start, self.end = jnp.exp(prefix), jnp.exp(suffix)
        self.total = prefix[plan.size - 1 :]
        self.levels = [(half, jnp.exp(exponent)) for half, exponent, _ in levels]

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
        for level, (half, decay) in enumerate(self.levels):
            here = self.plan.narrow(_mix(k, q, half) * decay)
            found = self._add_scores(found, level, here, 1)
        return self._unpacked(found & self.masks[len(self.levels)])

    def queries(
        self,
        scale: float,
        q: Array,
        k: Array,
        v: Array,
        dsums: Array,
        dnormalizer: Array | None,
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
            passed: is called for each halving, counted from the smallest, with what passed between each token and the
                border between its halves, for `log_gradient`.

        Returns:
            The gradients by q, k, and v.
        """
        plan = self.plan
        dot, narrow = plan.dot, plan.narrow
        i, j = self._tokens()
        by_query, by_key = dot(dsums, v, (1, 1)), dot(v, dsums, (1, 1))
        if dnormalizer is not None:
            by_query, by_key = by_query + column(dnormalizer), by_key + dnormalizer
        by_pair = jnp.where(i >= j, by_query, by_key)
        by_pair = by_pair if scale == 1 else by_pair * scale
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        by_itself = jnp.where(i == j, by_pair, 0.0).sum(1, keepdims=True)
        dq, dk = by_itself * k, by_itself * q
        by_pair = self._packed(narrow(by_pair))
        scores = self._diagonal((q * k).sum(1, keepdims=True))
        for level, (half, decay) in enumerate(self.levels):
            mixed = _mix(k, q, half)
            here = narrow(mixed * decay)
            scores = self._add_scores(scores, level, here, 0)
            d = dot(self._unpacked(by_pair & self.masks[level]), here, (1, 0)) * decay
            passed(level, mixed * d)
            dk, dq = _add_halves(dk, dq, d, half)
        scores = self._unpacked(scores & self.masks[len(self.levels)])
        dv = dot(scores, dsums, (1, 0))
        return dq, dk, dv if scale == 1 else dv * scale

    def log_gradient(self, through: Any, through_k: Array, through_all: Array) -> Float32[Array, "size key"]:
        """The gradient by the logs, from what passed through their sums: `_levels` the other way round.

        Args:
            through: for each halving what `queries` said, and then what passed from the start to each token.
            through_k: from each token to the end.
            through_all: from the start to the end, without the decay of the chunk.
        """
        token = lax.broadcasted_iota(jnp.int32, through_k.shape, 0)
        last = token == self.plan.size - 1
        by_prefix = through[len(self.levels)] + jnp.where(last, through_all * jnp.exp(self.total), 0.0)
        by_suffix = through_k
        for level, (half, _) in reversed(list(enumerate(self.levels))):
            # Below, the sum of a half goes to all tokens of the other one that need it.
            other = _sum_of_other_half(_mix(by_suffix, by_prefix, half), half)
            by_prefix = by_prefix + jnp.where((token & (half - 1)) == half - 1, other, 0.0)
            by_suffix, by_prefix = _add_halves(by_suffix, by_prefix, through[level], half)
        return by_prefix

    def _tokens(self) -> tuple[Int32[Array, "size size"], Int32[Array, "size size"]]:
        shape = (self.plan.size, self.plan.size)
        return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)

    def _diagonal(self, scores: Float32[Array, "size 1"]) -> Int32[Array, "words size"]:
        """The scores of each token with itself, which no halving has, as bits."""
        i, j = self._tokens()
        return self._packed(self.plan.narrow(jnp.where(i == j, scores, 0.0)))

    def _add_scores(self, scores: Int32[Array, "words size"], level: int, here: Array, rows: int) -> Array:
        """The scores, as bits, with those of a halving whose rows are in its first (0) or second halves (1)."""
        half, plan = self.levels[level][0], self.plan
        mask = self.masks[level]
        words = half * here.dtype.itemsize // 4
        if words < _SUBLANES:
            return scores | (self._packed(plan.narrow(plan.dot(here, here, (1, 1)))) & mask)
        # The other rows have none, and need no product.
        product = plan.dot(_half(here, half, rows), here, (1, 1))
        found = self._packed(plan.narrow(product)) & _half(mask, words, rows)
        return _with_half(scores, _half(scores, words, rows) | found, words, rows)

    def _packed(self, x: Array) -> Int32[Array, "words size"]:
        return pltpu.bitcast(x, jnp.int32)

    def _unpacked(self, x: Int32[Array, "words size"]) -> Array:
        return pltpu.bitcast(x, self.plan.dtype)


def pair_masks(plan: Plan, *, keys_first: bool) -> Int32[Array, "masks words size"]:
    """Bits of the pairs of each halving, both ways round; and then of those of a query not before its key."""
    i = np.arange(plan.size)
    halves = [1 << n for n in range(plan.size.bit_length() - 1)]
    causal = i[None, :] <= i[:, None]
    pairs = [square | square.T for square in (decays.square(plan.size, half) for half in halves)]
    pairs.append(causal.T if keys_first else causal)
    bits = np.dtype(plan.dtype).itemsize * 8
    masks = np.where(np.stack(pairs), np.uint32(2**bits - 1), np.uint32(0))
    if bits == 16:  # two rows a word, the first in its lower half
        masks = masks[:, ::2] | masks[:, 1::2] << 16
    return jnp.asarray(masks.view(np.int32))


def _mix(first: Array, second: Array, half: int) -> Array:
    """The one array in the first halves of blocks of `2 * half` tokens, and the other in the second ones."""
    if half < _SUBLANES:
        return jnp.where(_in_second(first.shape, half), second, first)
    return _with_half(first, _half(second, half, 1), half, 1)


def _add_halves(first: Array, second: Array, x: Array, half: int) -> tuple[Array, Array]:
    """Both arrays with `x` added, to the one in the first halves and to the other in the second ones."""
    if half < _SUBLANES:
        in_second = _in_second(x.shape, half)
        return first + jnp.where(in_second, 0.0, x), second + jnp.where(in_second, x, 0.0)
    return tuple(
        _with_half(a, _half(a, half, which) + _half(x, half, which), half, which)
        for which, a in enumerate((first, second))
    )  # pyright: ignore[reportReturnType]


def _in_second(shape: tuple[int, ...], half: int) -> Array:
    return (lax.broadcasted_iota(jnp.int32, shape, 0) & half) != 0


def _half(x: Array, half: int, which: int) -> Array:
    """The rows of the first or second halves; halves are whole tiles."""
    size, columns = x.shape
    return x.reshape(size // (2 * half), 2, half, columns)[:, which].reshape(size // 2, columns)


def _with_half(x: Array, rows: Array, half: int, which: int) -> Array:
    """`x` with these rows for those of the first or second halves."""
    size, columns = x.shape
    blocks = (size // (2 * half), 1, half, columns)
    rows, rest = rows.reshape(blocks), _half(x, half, 1 - which).reshape(blocks)
    return jnp.concatenate([rows, rest] if which == 0 else [rest, rows], 1).reshape(size, columns)


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


def _sum_of_other_half(x: Float32[Array, "size key"], half: int) -> Float32[Array, "size key"]:
    """At the last token of each half the sum over the other half; elsewhere anything."""
    size, key = x.shape
    if half >= _SUBLANES:
        sums = x.reshape(size // (2 * half), 2, half, key).sum(2, keepdims=True)
        sums = jnp.concatenate([sums[:, 1:], sums[:, :1]], 1)
        return jnp.broadcast_to(sums, (size // (2 * half), 2, half, key)).reshape(size, key)
    x = x.reshape(size // _SUBLANES, _SUBLANES, key)
    by = 1
    while by < half:
        x = x + jnp.roll(x, by, 1)
        by *= 2
    # The last token of the other half is `half` tokens away, in either direction.
    row = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((row & half) != 0, jnp.roll(x, half, 1), jnp.roll(x, -half, 1)).reshape(size, key)
