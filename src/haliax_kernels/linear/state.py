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
    y, last, saved = forward(options, x._replace(state=entering(before, state, summary.ids)), residuals=True)

    behind = gradient_summary(options, x, saved, dy)
    behind = exclusive_suffix(lambda a, b: compose(b, a), behind, identity(options, x), mesh_axes)
    grads = backward(options, x, saved, dy, entering(behind, dstate, gradient_summary.ids))

where `last` of the last shard is the whole sequence's state, and `grads.state` of the first one its first state's
gradient.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from haliax_kernels.linear import decays, xla
from haliax_kernels.linear.contract import LinearOperands, LinearOptions, LinearState


class Summary(NamedTuple):
    """What a part of a sequence does to the state before it.

    Attributes:
        log_decay: the sum of the logs of decays, of the head or of each key channel; at most `decays.FLOOR` (a decay
            of 0) if a segment starts inside. None where there is neither decay nor segment.
        state: the state after the part that starts from zero.
        ids: the segment ids of the first and last token, and 1 where there is no token at all, else 0: in one array,
            so that one transfer moves them. None without segments.
    """

    log_decay: Float32[Array, ""] | Float32[Array, " key"] | None
    state: LinearState
    ids: Int32[Array, " 3"] | None


def summary(options: LinearOptions, x: LinearOperands) -> Summary:
    """Of these tokens; the queries and the first state are not looked at.

    Not for differentiation: the gradients of a sharded sequence come from `gradient_summary` and `backward`.
    """
    state = xla.final_state(options, x._replace(state=None))
    return Summary(_log_decay(x), state, _ids(x, (0, -1)))


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
    return Summary(_log_decay(x), state, _ids(x, (-1, 0)))


def identity(options: LinearOptions, x: LinearOperands) -> Summary:
    """Of no tokens: `compose` leaves alone what is composed with it."""
    shape = () if x.log_decay is None or x.log_decay.ndim < 2 else (x.k.shape[1],)
    decayed = x.log_decay is not None or x.segment_ids is not None
    log_decay = jnp.zeros(shape, jnp.float32) if decayed else None
    ids = None if x.segment_ids is None else jnp.array([0, 0, 1], jnp.int32)
    return Summary(log_decay, xla.zero_state(options, x.k, x.v), ids)


def compose(a: Summary, b: Summary) -> Summary:
    """Of the part `a` and, right behind it, the part `b`. Associative."""
    log_decay, ids = b.log_decay, None
    if a.ids is not None and b.ids is not None:
        assert b.log_decay is not None
        a_empty, b_empty = a.ids[2] == 1, b.ids[2] == 1
        log_decay = jnp.where(b_empty | _joined(a, b.ids), b.log_decay, decays.FLOOR)
        first, last = jnp.where(a_empty, b.ids[0], a.ids[0]), jnp.where(b_empty, a.ids[1], b.ids[1])
        ids = jnp.stack([first, last, a.ids[2] * b.ids[2]])
    state = _through(log_decay, a.state, b.state)
    total = None if a.log_decay is None or log_decay is None else a.log_decay + log_decay
    return Summary(total, state, ids)


def entering(before: Summary, first: LinearState | None, ids: Int32[Array, " 3"] | None) -> LinearState:
    """The state that a part begins with.

    Args:
        before: of everything before the part.
        first: the state before everything; None for zero.
        ids: the part's own, as its `Summary` has them. The state is zero if its segment does not begin before it.
    """
    state = before.state if first is None else _through(before.log_decay, first, before.state)
    if ids is None:
        return state
    joined = _joined(before, ids)
    return jax.tree.map(lambda a: jnp.where(joined, a, 0), state)


def _joined(a: Summary, ids: Int32[Array, " 3"]) -> Bool[Array, ""]:
    """Whether what follows `a` and has these ids goes on with a's last segment."""
    assert a.ids is not None
    return (a.ids[2] == 1) | (a.ids[1] == ids[0])


def _through(log_decay: Array | None, old: LinearState, added: LinearState) -> LinearState:
    if log_decay is None:
        return jax.tree.map(jnp.add, old, added)
    decay = jnp.exp(log_decay)
    s = (decay if decay.ndim == 0 else decay[:, None]) * old.s + added.s
    return LinearState(s, None if old.z is None or added.z is None else decay * old.z + added.z)


def _log_decay(x: LinearOperands) -> Array | None:
    log = decays.per_token(x.log_decay, x.segment_ids, x.k.shape[0])
    return None if log is None else log.sum(0)


def _ids(x: LinearOperands, places: tuple[int, int]) -> Array | None:
    if x.segment_ids is None:
        return None
    return jnp.stack([*(x.segment_ids[i].astype(jnp.int32) for i in places), jnp.int32(0)])
