# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The recurrence token by token in NumPy and float64, and its gradients: what the kernels are tested against."""

from typing import NamedTuple, TypedDict, Unpack

import numpy as np
from jaxtyping import Float, Int

_Decay = Float[np.ndarray, ""] | Float[np.ndarray, " pos"] | Float[np.ndarray, "pos key"]


class RecurrenceOptions(TypedDict, total=False):
    """The keywords of `recurrence` and `recurrence_grad`, as in `haliax_kernels.linear.contract`.

    Attributes:
        scale: what `q_t S_t` is multiplied by; 1 by default.
        normalize: whether results are divided by `q_t . z_t`.
        epsilon: the least size of the normaliser.
        log_decay: of the head, of each token, or of each token and key channel.
        segment_ids: where the id changes, the state starts anew.
        s: the first state.
        z: the first state of the normaliser.
        beta: for the delta rule.
    """

    scale: float
    normalize: bool
    epsilon: float
    log_decay: _Decay | None
    segment_ids: Int[np.ndarray, " pos"] | None
    s: Float[np.ndarray, "key value"] | None
    z: Float[np.ndarray, " key"] | None
    beta: Float[np.ndarray, " pos"] | None


class RecurrenceGradients(NamedTuple):
    """One gradient for each input; `log_decay` and `beta` are None where that input is."""

    q: Float[np.ndarray, "group pos key"]
    k: Float[np.ndarray, "pos key"]
    v: Float[np.ndarray, "pos value"]
    log_decay: _Decay | None
    s: Float[np.ndarray, "key value"]
    z: Float[np.ndarray, " key"]
    beta: Float[np.ndarray, " pos"] | None


class _Run(NamedTuple):
    """Everything that the recurrence went through; states are those before each token, and after the last one."""

    decay: Float[np.ndarray, "pos key"]
    s: Float[np.ndarray, "pos_and_1 key value"]
    z: Float[np.ndarray, "pos_and_1 key"]
    sums: Float[np.ndarray, "group pos value"]
    normalizer: Float[np.ndarray, "group pos"]
    clamped: Float[np.ndarray, "group pos"]
    missing: Float[np.ndarray, "pos value"]


def recurrence(
    q: Float[np.ndarray, "group pos key"],
    k: Float[np.ndarray, "pos key"],
    v: Float[np.ndarray, "pos value"],
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[np.ndarray, "group pos value"], Float[np.ndarray, "key value"], Float[np.ndarray, " key"]]:
    """`(y, s, z)`: the results and the last state."""
    run = _run(q, k, v, options)
    y = options.get("scale", 1.0) * run.sums
    if options.get("normalize"):
        y = y / run.clamped[..., None]
    return y, run.s[-1], run.z[-1]


def recurrence_grad(
    q: Float[np.ndarray, "group pos key"],
    k: Float[np.ndarray, "pos key"],
    v: Float[np.ndarray, "pos value"],
    dy: Float[np.ndarray, "group pos value"],
    ds: Float[np.ndarray, "key value"],
    dz: Float[np.ndarray, " key"],
    **options: Unpack[RecurrenceOptions],
) -> RecurrenceGradients:
    """The gradients of `sum(y * dy) + sum(s * ds) + sum(z * dz)`, from the last token to the first."""
    q, k, v, dy, ds, dz = (np.asarray(x, np.float64) for x in (q, k, v, dy, ds, dz))
    run = _run(q, k, v, options)
    scale = options.get("scale", 1.0)
    dsums, dnormalizer = scale * dy, np.zeros(q.shape[:2])
    if options.get("normalize"):
        dsums = dsums / run.clamped[..., None]
        active = run.clamped == run.normalizer
        dnormalizer = np.where(active, -(dsums * run.sums).sum(-1) / run.clamped, 0)
    beta, dbeta = options.get("beta"), np.zeros(k.shape[0])
    dq, dk, dv, dlog = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros(k.shape)
    for t in reversed(range(k.shape[0])):
        ds = ds + q[:, t].T @ dsums[:, t]
        dz = dz + q[:, t].T @ dnormalizer[:, t]
        dq[:, t] = dsums[:, t] @ run.s[t + 1].T + np.outer(dnormalizer[:, t], run.z[t + 1])
        if beta is None:
            dk[t] = ds @ v[t] + dz
            dv[t] = k[t] @ ds
        else:
            du = k[t] @ ds
            dbeta[t] = du @ run.missing[t]
            dv[t] = beta[t] * du
            dk[t] = ds @ (beta[t] * run.missing[t]) - run.decay[t] * (run.s[t] @ dv[t])
            ds = ds - np.outer(k[t], dv[t])
        dlog[t] = run.decay[t] * ((ds * run.s[t]).sum(1) + dz * run.z[t])
        ds, dz = run.decay[t][:, None] * ds, run.decay[t] * dz
    log_decay = options.get("log_decay")
    if log_decay is not None:
        rank = np.ndim(log_decay)
        log_decay = dlog if rank == 2 else dlog.sum(1) if rank == 1 else np.asarray(dlog.sum())
    return RecurrenceGradients(dq, dk, dv, log_decay, ds, dz, None if beta is None else dbeta)


def _run(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: RecurrenceOptions) -> _Run:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    length, key = k.shape
    log_decay, ids = options.get("log_decay"), options.get("segment_ids")
    log = np.zeros(()) if log_decay is None else np.asarray(log_decay, np.float64)
    decay = np.broadcast_to(np.exp(log[:, None] if log.ndim == 1 else log), k.shape).copy()
    if ids is not None:
        decay[1:][np.asarray(ids)[1:] != np.asarray(ids)[:-1]] = 0
    s, z = np.zeros((length + 1, key, v.shape[1])), np.zeros((length + 1, key))
    for state, first in ((s, options.get("s")), (z, options.get("z"))):
        state[0] = 0 if first is None else first
    beta, missing = options.get("beta"), np.zeros(v.shape)
    for t in range(length):
        s[t + 1] = decay[t][:, None] * s[t]
        missing[t] = v[t] - k[t] @ s[t + 1]
        s[t + 1] += np.outer(k[t], v[t] if beta is None else beta[t] * missing[t])
        z[t + 1] = decay[t] * z[t] + k[t]
    sums = np.einsum("gtk,tkv->gtv", q, s[1:])
    normalizer = np.einsum("gtk,tk->gt", q, z[1:])
    least = np.where(normalizer < 0, -1, 1) * options.get("epsilon", 1e-12)
    return _Run(
        decay, s, z, sums, normalizer, np.where(np.abs(normalizer) >= np.abs(least), normalizer, least), missing
    )
