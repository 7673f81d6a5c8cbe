# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Chunked linear attention in XLA operations, for every platform: the whole contract, in memory linear in the length.

Pieces of some chunks each are computed one after the other, and only the states at their borders are kept for the
gradients.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.linear import chunked, decays, delta
from haliax_kernels.linear.contract import LinearGradients, LinearOperands, LinearOptions, LinearState

# Scalar decays cost as much for large chunks as for small ones, those of channels a product for each halving.
_CHUNK, _CHANNEL_CHUNK = 64, 32
# So large that a step is worth its while on an accelerator, so small that what it computes fits in a cache.
_PIECE = 512


class Residuals(NamedTuple):
    """What the gradients need beside the operands.

    Attributes:
        starts: the states at the pieces' starts.
        y: the results, if they are normalised.
        normalizer: `q . z`.
    """

    starts: LinearState
    y: Float[Array, "group pos value"] | None
    normalizer: Float32[Array, "group pos"] | None


def forward(
    options: LinearOptions, x: LinearOperands, *, residuals: bool = False
) -> tuple[Float[Array, "group pos value"], LinearState, Residuals | None]:
    """As `LinearImplementation.forward`."""
    layout = Layout.of(options, x)

    def step(state: LinearState, of_piece: Any) -> Any:
        piece, beta = of_piece
        if beta is None:
            sums, normalizer, new = chunked.forward(_wide(piece), state, layout.dot)
        else:
            (sums, new), normalizer = delta.forward(_wide(piece), beta, state, layout.dot), None
        y = options.scale * sums
        if normalizer is not None:
            y = y / clamped(options, normalizer)[..., None]
        return new, (y.astype(options.out_dtype or x.q.dtype), normalizer, state)

    last, (y, normalizer, starts) = lax.scan(step, first_state(options, x), (layout.pieces(x), layout.betas(x)))
    y, normalizer = layout.joined(y, 1), None if normalizer is None else layout.joined(normalizer, 1)
    return y, last, Residuals(starts, None if normalizer is None else y, normalizer) if residuals else None


def backward(
    options: LinearOptions,
    x: LinearOperands,
    residuals: Residuals,
    dy: Float[Array, "group pos value"],
    dstate: LinearState,
) -> LinearGradients:
    """As `LinearImplementation.backward`."""
    layout = Layout.of(options, x)
    want_log = options.decay_gradient and x.log_decay is not None

    def step(dstate: LinearState, of_piece: Any) -> Any:
        piece, beta, state, *results = of_piece
        d = result_gradients(options, *results)
        if beta is None:
            grads, dfirst = chunked.backward(_wide(piece), state, d, dstate, layout.dot, want_log)
            dbeta = None
        else:
            _, pullback = jax.vjp(partial(delta.forward, dot=layout.dot), _wide(piece), beta, state)
            grads, dbeta, dfirst = pullback((d.sums, dstate))
        q, k, v = (g.astype(a.dtype) for g, a in zip(grads[:3], (x.q, x.k, x.v), strict=True))
        return dfirst, (chunked.PieceGradients(q, k, v, grads.log if want_log else None), dbeta)

    parts = (layout.pieces(x), layout.betas(x), residuals.starts, *layout.results(residuals, dy))
    dfirst, (grads, dbeta) = lax.scan(step, dstate, parts, reverse=True)
    dlog = None if grads.log is None else layout.joined(grads.log, 0)
    return LinearGradients(
        layout.joined(grads.q, 1),
        layout.joined(grads.k, 0),
        layout.joined(grads.v, 0),
        decays.per_operand(dlog, x.log_decay, x.segment_ids),
        dfirst,
        None if x.beta is None or dbeta is None else layout.joined(dbeta, 0).astype(x.beta.dtype),
    )


def final_state(options: LinearOptions, x: LinearOperands) -> LinearState:
    """`forward(...)[1]`, for much less than the whole forward: queries are not looked at.

    With `x.state` None it is what these tokens add to the state, for `haliax_kernels.linear.state`.
    """
    _refuse_beta(x)
    layout = Layout.of(options, x)

    def step(state: LinearState, piece: chunked.Piece) -> tuple[LinearState, None]:
        return chunked.final_state(_wide(piece), state, layout.dot), None

    # The scan drops what it does not use: the queries are never moved.
    return lax.scan(step, first_state(options, x), layout.pieces(x))[0]


def first_state_gradient(
    options: LinearOptions,
    x: LinearOperands,
    residuals: Residuals,
    dy: Float[Array, "group pos value"],
    dstate: LinearState | None = None,
) -> LinearState:
    """`backward(...).state`, for much less than the whole backward.

    With `dstate` None it is what these tokens add to the state's gradient, for `haliax_kernels.linear.state`.
    """
    _refuse_beta(x)
    layout = Layout.of(options, x)

    def step(dstate: LinearState, of_piece: Any) -> tuple[LinearState, None]:
        piece, *results = of_piece
        d = result_gradients(options, *results)
        return chunked.first_state_gradient(_wide(piece), d, dstate, layout.dot), None

    parts = (layout.pieces(x), *layout.results(residuals, dy))
    return lax.scan(step, zero_state(options, x.k, x.v) if dstate is None else dstate, parts, reverse=True)[0]


def _refuse_beta(x: LinearOperands) -> None:
    if x.beta is not None:
        raise UnsupportedOptionError("beta: what the delta rule makes of a state is more than a decay and a sum.")


# --- what the implementations share ----------------------------------------------------------------------------------


def zero_state(options: LinearOptions, k: Float[Array, "*pos key"], v: Float[Array, "*pos value"]) -> LinearState:
    """The state before any token, for keys and values like these."""
    key, value = k.shape[-1], v.shape[-1]
    return LinearState(
        jnp.zeros((key, value), jnp.float32), jnp.zeros(key, jnp.float32) if options.normalize else None
    )


def first_state(options: LinearOptions, x: LinearOperands) -> LinearState:
    """The operands' state, or zero."""
    if x.beta is not None and options.normalize:
        raise UnsupportedOptionError("normalize: results of the delta rule have no normaliser; pass normalize=False.")
    if x.state is None:
        return zero_state(options, x.k, x.v)
    if (x.state.z is None) == options.normalize:
        raise ValueError(f"state.z is {'missing' if x.state.z is None else 'given'}, with {options.normalize=}")
    return jax.tree.map(lambda a: a.astype(jnp.float32), x.state)


def clamped(options: LinearOptions, normalizer: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """The normaliser, of at least the size `epsilon`."""
    least = jnp.where(normalizer < 0, -options.epsilon, options.epsilon)
    return jnp.where(jnp.abs(normalizer) < options.epsilon, least, normalizer)


def result_gradients(
    options: LinearOptions, dy: Array, y: Array | None, normalizer: Array | None, dtype: DTypeLike = jnp.float32
) -> chunked.ResultGradients:
    """Gradients of the sums and the normaliser from those of their quotient.

    The sums' gradients have the digits of `dtype`, that of the products they go into, and the normaliser's is made of
    the same numbers: what the two give to a query all but cancels.
    """
    dsums = options.scale * dy.astype(jnp.float32)
    if normalizer is None or y is None:
        return chunked.ResultGradients(dsums.astype(dtype), None)
    dsums = (dsums / clamped(options, normalizer)[..., None]).astype(dtype)
    through = -(dsums.astype(jnp.float32) * y.astype(jnp.float32)).sum(-1) / (options.scale or 1.0)
    return chunked.ResultGradients(dsums, jnp.where(jnp.abs(normalizer) < options.epsilon, 0, through))


def _wide(piece: chunked.Piece) -> chunked.Piece:
    return jax.tree.map(lambda a: a.astype(jnp.float32), piece)


@dataclass(frozen=True)
class Layout:
    """How a sequence is cut into pieces, and these into chunks.

    Attributes:
        length: tokens without padding.
        count: pieces.
        n: chunks per piece.
        size: tokens per chunk.
        dot: an einsum of float32 operands, exact for 32-bit inputs and in the device's faster way for 16-bit ones.
    """

    length: int
    count: int
    n: int
    size: int
    dot: decays.Dot

    @staticmethod
    def of(options: LinearOptions, x: LinearOperands) -> "Layout":
        length = x.k.shape[0]
        channels = x.log_decay is not None and x.log_decay.ndim == 2
        size = options.chunk_size or min(
            _CHANNEL_CHUNK if channels else _CHUNK, max(8, 1 << (max(length, 1) - 1).bit_length())
        )
        chunks = max(1, -(-length // size))
        count = -(-chunks // max(1, _PIECE // size))
        wide = jnp.promote_types(x.q.dtype, x.v.dtype) == jnp.float32
        precision = lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT
        dot = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
        return Layout(length, count, -(-chunks // count), size, dot)

    def cut(self, x: Array, axis: int) -> Array:
        """`x` with its token axis cut into (n, size), and the pieces in front; what is missing at the end is 0."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.count * self.n * self.size - self.length)
        x = jnp.pad(x, widths)
        x = x.reshape(*x.shape[:axis], self.count, self.n, self.size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def joined(self, x: Array, axis: int) -> Array:
        """The inverse of `cut`."""
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 3 :])
        return lax.slice_in_dim(x, 0, self.length, axis=axis)

    def betas(self, x: LinearOperands) -> Float32[Array, "count n size"] | None:
        """Of all pieces; padding writes nothing."""
        return None if x.beta is None else self.cut(x.beta.astype(jnp.float32), 0)

    def pieces(self, x: LinearOperands) -> chunked.Piece:
        """All pieces; padding adds nothing to the state and lets it be."""
        log = decays.per_token(x.log_decay, x.segment_ids, self.length)
        log = None if log is None else self.cut(log, 0)
        return chunked.Piece(self.cut(x.q, 1), self.cut(x.k, 0), self.cut(x.v, 0), log)

    def results(self, residuals: Residuals, dy: Array) -> tuple[Array, Array | None, Array | None]:
        """The gradient of the results, the results, and the normalisers, in pieces."""
        y, normalizer = (None if a is None else self.cut(a, 1) for a in (residuals.y, residuals.normalizer))
        return self.cut(dy, 1), y, normalizer
