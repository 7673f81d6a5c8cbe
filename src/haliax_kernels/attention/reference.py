# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Dense attention in NumPy and float64, with every feature of the contract: what the kernels are tested against."""

from typing import NamedTuple, Required, TypedDict, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int


class DenseOptions(TypedDict, total=False):
    """The keywords of `dense_attention` and `dense_attention_grad`; only `scale` must be given.

    Attributes:
        scale: what the logits are multiplied by.
        causal: whether a query sees no later position than its own; the same as `right=0`.
        left: how many earlier positions a query sees; None for all of them.
        right: how many later ones.
        q_offset: the position of the first query.
        k_offset: the position of the first key.
        q_segment_ids: a query sees the keys of its own id only. Given together with `k_segment_ids`.
        k_segment_ids: ids of the keys.
        mask: what a query may see, beside all else.
        bias: added to the scaled logits.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after the bias and before the mask.
        keep: the probabilities that dropout keeps.
        dropout: the fraction that dropout drops on average; what is kept is divided by `1 - dropout`.
        sink: per query head, one more logit, that takes part in the softmax' denominator and has no value.
    """

    scale: Required[float]
    causal: bool
    left: int | None
    right: int | None
    q_offset: int
    k_offset: int
    q_segment_ids: Int[np.ndarray, " q_pos"] | None
    k_segment_ids: Int[np.ndarray, " k_pos"] | None
    mask: Bool[np.ndarray, "group|1 q_pos k_pos"] | None
    bias: Float[np.ndarray, "group|1 q_pos k_pos"] | None
    soft_cap: float | None
    keep: Bool[np.ndarray, "group q_pos k_pos"] | None
    dropout: float
    sink: Float[np.ndarray, " group"] | None


class DenseGradients(NamedTuple):
    """Gradients in float64; those of bias and sink are None where there is none."""

    q: Float[np.ndarray, "group q_pos key"]
    k: Float[np.ndarray, "k_pos key"]
    v: Float[np.ndarray, "k_pos value"]
    bias: Float[np.ndarray, "group|1 q_pos k_pos"] | None
    sink: Float[np.ndarray, " group"] | None


def dense_attention(
    q: Float[np.ndarray, "group q_pos key"],
    k: Float[np.ndarray, "k_pos key"],
    v: Float[np.ndarray, "k_pos value"],
    **options: Unpack[DenseOptions],
) -> tuple[Float[np.ndarray, "group q_pos value"], Float[np.ndarray, "group q_pos"]]:
    """`softmax(scale * q @ k.T) @ v` over the keys each query may see, and the logsumexp of the same logits.

    Args:
        q: queries of the heads that share one key/value head; any float dtype, computed in float64.
        k: keys.
        v: values.
        **options: see `DenseOptions`.

    Returns:
        `(o, lse)` in float64. A query that sees nothing has `o = 0` and `lse = -inf`; with a sink, `lse = sink`.
    """
    p, lse, _ = _softmax(q, k, options)
    return _dropped(p, options) @ np.asarray(v, np.float64), lse


def dense_attention_grad(
    q: Float[np.ndarray, "group q_pos key"],
    k: Float[np.ndarray, "k_pos key"],
    v: Float[np.ndarray, "k_pos value"],
    do: Float[np.ndarray, "group q_pos value"],
    dlse: Float[np.ndarray, "group q_pos"] | None = None,
    **options: Unpack[DenseOptions],
) -> DenseGradients:
    """Gradients of `dense_attention`, by formula.

    With `p` the probabilities, `m` the dropout's multiplier of each (0 or `1 / (1 - dropout)`; 1 without), and `x` the
    capped logits: `dv = sum_group (m p).T @ do`, and with `dp = m * (do @ v.T)`, through the softmax
    `dx = p * (dp - sum_k(p * dp) + dlse)`, since `d lse / d x = p`. The sink is one more logit, of probability
    `p_sink` and `dp = 0`, so that its gradient is `sum_q p_sink * (dlse - sum_k(p * dp))`. With a soft cap,
    `ds = dx * (1 - (x / soft_cap)^2)`, else `ds = dx`; then `dbias = ds`, `dq = scale * ds @ k` and
    `dk = scale * sum_group ds.T @ q`.

    Args:
        q: as in `dense_attention`; likewise k, v and the options.
        k: keys.
        v: values.
        do: the gradient of the loss by `o`.
        dlse: the gradient of the loss by `lse`; by default 0.
        **options: see `DenseOptions`.

    Returns:
        The gradients; exactly 0 for a query that sees nothing, whatever its `dlse`.
    """
    p, lse, capped = _softmax(q, k, options)
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    dlse = np.zeros_like(lse) if dlse is None else np.where(lse == -np.inf, 0, np.asarray(dlse, np.float64))
    dv = np.einsum("gqk,gqd->kd", _dropped(p, options), do)
    dp = _dropped(do @ v.T, options)
    of_softmax = dlse[..., None] - np.sum(p * dp, -1, keepdims=True)
    ds = p * (dp + of_softmax)
    soft_cap, bias, sink = options.get("soft_cap"), options.get("bias"), options.get("sink")
    if soft_cap is not None:
        ds = ds * (1 - (capped / soft_cap) ** 2)
    dbias = dsink = None
    if bias is not None:
        dbias = ds.sum(0, keepdims=True) if bias.shape[0] == 1 else ds
    if sink is not None:
        p_sink = np.exp(np.asarray(sink, np.float64)[:, None] - lse)
        dsink = np.sum(p_sink * of_softmax[..., 0], -1)
    scale = options["scale"]
    return DenseGradients(scale * ds @ k, scale * np.einsum("gqk,gqd->kd", ds, q), dv, dbias, dsink)


def _softmax(
    q: Float[np.ndarray, "group q_pos key"], k: Float[np.ndarray, "k_pos key"], options: DenseOptions
) -> tuple[
    Float[np.ndarray, "group q_pos k_pos"],
    Float[np.ndarray, "group q_pos"],
    Float[np.ndarray, "group q_pos k_pos"],
]:
    """The probabilities, the logsumexp, and the capped logits before the mask."""
    logits = options["scale"] * (np.asarray(q, np.float64) @ np.asarray(k, np.float64).T)
    bias, soft_cap, sink = options.get("bias"), options.get("soft_cap"), options.get("sink")
    if bias is not None:
        logits = logits + np.asarray(bias, np.float64)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    masked = np.where(_mask(q.shape[1], k.shape[0], options), logits, -np.inf)
    sinks = np.full(q.shape[:1], -np.inf) if sink is None else np.asarray(sink, np.float64)
    largest = np.maximum(np.max(masked, -1, keepdims=True, initial=-np.inf), sinks[:, None, None])
    largest = np.where(largest == -np.inf, 0, largest)
    weights = np.exp(masked - largest)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - largest)
    seen = total > 0
    p = np.divide(weights, total, out=np.zeros_like(weights), where=seen)
    lse = largest + np.log(total, out=np.full_like(total, -np.inf), where=seen)
    return p, lse[..., 0], logits


def _dropped(x: Float[np.ndarray, "group q_pos k_pos"], options: DenseOptions) -> np.ndarray:
    keep = options.get("keep")
    return x if keep is None else np.where(keep, x / (1 - options.get("dropout", 0.0)), 0)


def _mask(q_len: int, k_len: int, options: DenseOptions) -> Bool[np.ndarray, "group|1 q_pos k_pos"]:
    q_position = options.get("q_offset", 0) + np.arange(q_len)[:, None]
    k_position = options.get("k_offset", 0) + np.arange(k_len)[None, :]
    left, right = options.get("left"), 0 if options.get("causal") else options.get("right")
    mask = np.ones((1, q_len, k_len), bool)
    if left is not None:
        mask &= q_position - left <= k_position
    if right is not None:
        mask &= k_position <= q_position + right
    q_segment_ids, k_segment_ids = options.get("q_segment_ids"), options.get("k_segment_ids")
    if q_segment_ids is not None and k_segment_ids is not None:
        mask &= np.asarray(q_segment_ids)[:, None] == np.asarray(k_segment_ids)[None, :]
    explicit = options.get("mask")
    return mask if explicit is None else mask & np.asarray(explicit)
