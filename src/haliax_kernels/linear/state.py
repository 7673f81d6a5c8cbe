# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The law by which the states of adjacent parts of a sequence compose, for a sequence that is cut into shards.

A part takes the state `S` before it to `exp(log_decay) * S + added`: `log_decay` is the sum over its tokens, and
`added` the state after it that starts from zero. Of two parts one after the other

    log_decay = log_decay_a + log_decay_b
    added     = exp(log_decay_b) * added_a + added_b

(the operator of Blelloch's scan of first-order recurrences, 1990, section 1.4), where a segment that starts between
the parts is a decay of 0. Nothing here depends on the parts' lengths. Gradients of states obey the same law from the
other end: a part takes the gradient after it to `exp(log_decay) * dS + added`, with what its own results add.

Forward and backward of sharded parts, with `haliax_kernels.collectives`:

    before = exclusive_prefix(compose, summary(options, x), identity(options, x), mesh_axes)
    y, last, saved = forward(options, x._replace(state=entering(before, state, summary.segments)), residuals=True)

    behind = gradient_summary(options, x, saved, dy)
    behind = exclusive_suffix(lambda a, b: compose(b, a), behind, identity(options, x), mesh_axes)
    grads = backward(options, x, saved, dy, entering(behind, dstate, gradient_summary.segments))

where `last` of the last shard is the whole sequence's state, and `grads.state` of the first one its first state's
gradient.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from haliax_kernels.linear import decays, xla
from haliax_kernels.linear.contract import LinearOperands, LinearOptions, LinearState


class Segments(NamedTuple):
    """Where the segments of a part of a sequence begin and end; integers of one dtype, which travel together.

    Attributes:
        first: the segment id of the first token.
        last: of the last one.
        empty: 1 where there is no token at all, else 0.
    """

    first: Int32[Array, ""]
    last: Int32[Array, ""]
    empty: Int32[Array, ""]


class Summary(NamedTuple):
    """What a part of a sequence does to the state before it.

    Attributes:
        log_decay: the sum of the logs of decays, of the head or of each key channel; at most `decays.FLOOR` (a decay
            of 0) if a segment starts inside. None where there is neither decay nor segment.
        state: the state after the part that starts from zero.
        segments: None without segments.
    """

    log_decay: Float32[Array, ""] | Float32[Array, " key"] | None
    state: LinearState
    segments: Segments | None


def summary(options: LinearOptions, x: LinearOperands) -> Summary:
    """Of these tokens; the queries and the first state are not looked at.

    Not for differentiation: the gradients of a sharded sequence come from `gradient_summary` and `backward`.
    """
    state = xla.final_state(options, x._replace(state=None))
    return Summary(_log_decay(x), state, _segments(x, 0, -1))


def gradient_summary(
    options: LinearOptions, x: LinearOperands, residuals: Any, dy: Float[Array, "group pos value"]
) -> Summary:
    """What these tokens do to the gradient of the state behind them; first and last are exchanged.

    Args:
        options: of the call.
        x: its operands.
        residuals: of its forward.
        dy: the gradient of its results.
    """
    state = xla.first_state_gradient(options, x, residuals, dy)
    return Summary(_log_decay(x), state, _segments(x, -1, 0))


def identity(options: LinearOptions, x: LinearOperands) -> Summary:
    """Of no tokens: `compose` leaves alone what is composed with it."""
    shape = () if x.log_decay is None or x.log_decay.ndim < 2 else (x.k.shape[1],)
    decayed = x.log_decay is not None or x.segment_ids is not None
    log_decay = jnp.zeros(shape, jnp.float32) if decayed else None
    segments = None if x.segment_ids is None else Segments(*map(jnp.int32, (0, 0, 1)))
    return Summary(log_decay, xla.zero_state(options, x.k, x.v), segments)


def compose(a: Summary, b: Summary) -> Summary:
    """Of the part `a` and, right behind it, the part `b`. Associative."""
    log_decay, segments = b.log_decay, None
    if a.segments is not None and b.segments is not None:
        assert b.log_decay is not None
        log_decay = jnp.where((b.segments.empty == 1) | _joined(a, b.segments), b.log_decay, decays.FLOOR)
        segments = Segments(
            jnp.where(a.segments.empty == 1, b.segments.first, a.segments.first),
            jnp.where(b.segments.empty == 1, a.segments.last, b.segments.last),
            a.segments.empty * b.segments.empty,
        )
    state = _through(log_decay, a.state, b.state)
    total = None if a.log_decay is None or log_decay is None else a.log_decay + log_decay
    return Summary(total, state, segments)


def entering(before: Summary, first: LinearState | None, segments: Segments | None) -> LinearState:
    """The state that a part begins with.

    Args:
        before: of everything before the part.
        first: the state before everything; None for zero.
        segments: the part's own, as its `Summary` has them. The state is zero if its segment does not begin before it.
    """
    state = before.state if first is None else _through(before.log_decay, first, before.state)
    if segments is None:
        return state
    joined = _joined(before, segments)
    return jax.tree.map(lambda a: jnp.where(joined, a, 0), state)


def _joined(a: Summary, b: Segments) -> Bool[Array, ""]:
    """Whether what follows `a` goes on with its last segment."""
    assert a.segments is not None
    return (a.segments.empty == 1) | (a.segments.last == b.first)


def _through(log_decay: Array | None, old: LinearState, added: LinearState) -> LinearState:
    if log_decay is None:
        return jax.tree.map(jnp.add, old, added)
    decay = jnp.exp(log_decay)
    s = (decay if decay.ndim == 0 else decay[:, None]) * old.s + added.s
    return LinearState(s, None if old.z is None or added.z is None else decay * old.z + added.z)


def _log_decay(x: LinearOperands) -> Array | None:
    log = decays.per_token(x.log_decay, x.segment_ids, x.k.shape[0])
    return None if log is None else log.sum(0)


def _segments(x: LinearOperands, first: int, last: int) -> Segments | None:
    if x.segment_ids is None:
        return None
    ids = x.segment_ids.astype(jnp.int32)
    return Segments(ids[first], ids[last], jnp.int32(0))
