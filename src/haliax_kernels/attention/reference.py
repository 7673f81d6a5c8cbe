# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Dense attention in NumPy and float64: what the kernels are tested against."""

import numpy as np
from jaxtyping import Bool, Float, Int


def dense_attention(
    q: Float[np.ndarray, "group q_pos key"],
    k: Float[np.ndarray, "k_pos key"],
    v: Float[np.ndarray, "k_pos value"],
    *,
    scale: float,
    causal: bool = False,
    q_segment_ids: Int[np.ndarray, " q_pos"] | None = None,
    k_segment_ids: Int[np.ndarray, " k_pos"] | None = None,
) -> tuple[Float[np.ndarray, "group q_pos value"], Float[np.ndarray, "group q_pos"]]:
    """`softmax(scale * q @ k.T) @ v` over the keys each query may see, and the logsumexp of the same logits.

    Args:
        q: queries of the heads that share one key/value head; any float dtype, computed in float64.
        k: keys.
        v: values.
        scale: what the logits are multiplied by.
        causal: whether query i sees keys j <= i only, both counted from the start.
        q_segment_ids: a query sees the keys of its own id only. Given together with `k_segment_ids`.
        k_segment_ids: ids of the keys.

    Returns:
        `(o, lse)` in float64. A query that sees nothing has `o = 0` and `lse = -inf`.
    """
    p, lse = _probabilities(q, k, scale, causal, q_segment_ids, k_segment_ids)
    return p @ np.asarray(v, np.float64), lse


def dense_attention_grad(
    q: Float[np.ndarray, "group q_pos key"],
    k: Float[np.ndarray, "k_pos key"],
    v: Float[np.ndarray, "k_pos value"],
    do: Float[np.ndarray, "group q_pos value"],
    dlse: Float[np.ndarray, "group q_pos"] | None = None,
    *,
    scale: float,
    causal: bool = False,
    q_segment_ids: Int[np.ndarray, " q_pos"] | None = None,
    k_segment_ids: Int[np.ndarray, " k_pos"] | None = None,
) -> tuple[Float[np.ndarray, "group q_pos key"], Float[np.ndarray, "k_pos key"], Float[np.ndarray, "k_pos value"]]:
    """Gradients of `dense_attention`, by formula.

    With `s` the scaled logits and `p` the probabilities: `dv = sum_group p.T @ do`; through the softmax
    `ds = p * (do @ v.T - sum_k(p * (do @ v.T)) + dlse)`, since `d lse / d s = p`; `dq = scale * ds @ k` and
    `dk = scale * sum_group ds.T @ q`.

    Args:
        q: as in `dense_attention`; likewise k, v, scale, causal and the segment ids.
        k: keys.
        v: values.
        do: the gradient of the loss by `o`.
        dlse: the gradient of the loss by `lse`; by default 0.
        scale: what the logits are multiplied by.
        causal: whether query i sees keys j <= i only.
        q_segment_ids: ids of the queries.
        k_segment_ids: ids of the keys.

    Returns:
        `(dq, dk, dv)` in float64; exactly 0 for a query that sees nothing, whatever its `dlse`.
    """
    p, lse = _probabilities(q, k, scale, causal, q_segment_ids, k_segment_ids)
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    dead = lse == -np.inf
    dlse = np.zeros_like(lse) if dlse is None else np.where(dead, 0, np.asarray(dlse, np.float64))
    dp = do @ v.T
    ds = p * (dp - np.sum(p * dp, -1, keepdims=True) + dlse[..., None])
    return scale * ds @ k, scale * np.einsum("gqk,gqd->kd", ds, q), np.einsum("gqk,gqd->kd", p, do)


def _probabilities(
    q: Float[np.ndarray, "group q_pos key"],
    k: Float[np.ndarray, "k_pos key"],
    scale: float,
    causal: bool,
    q_segment_ids: Int[np.ndarray, " q_pos"] | None,
    k_segment_ids: Int[np.ndarray, " k_pos"] | None,
) -> tuple[Float[np.ndarray, "group q_pos k_pos"], Float[np.ndarray, "group q_pos"]]:
    mask = _mask(q.shape[1], k.shape[0], causal, q_segment_ids, k_segment_ids)
    logits = np.where(mask, scale * np.asarray(q, np.float64) @ np.asarray(k, np.float64).T, -np.inf)
    largest = np.max(logits, -1, keepdims=True, initial=-np.inf)
    weights = np.where(mask, np.exp(logits - np.where(np.any(mask, -1, keepdims=True), largest, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    seen = total > 0
    p = np.divide(weights, total, out=np.zeros_like(weights), where=seen)
    log_total = np.log(total, out=np.full_like(total, -np.inf), where=seen)
    return p, np.where(seen, largest + log_total, -np.inf)[..., 0]


def _mask(
    q_len: int,
    k_len: int,
    causal: bool,
    q_segment_ids: Int[np.ndarray, " q_pos"] | None,
    k_segment_ids: Int[np.ndarray, " k_pos"] | None,
) -> Bool[np.ndarray, "q_pos k_pos"]:
    mask = np.ones((q_len, k_len), bool)
    if causal:
        mask &= np.arange(k_len)[None, :] <= np.arange(q_len)[:, None]
    if q_segment_ids is not None and k_segment_ids is not None:
        mask &= np.asarray(q_segment_ids)[:, None] == np.asarray(k_segment_ids)[None, :]
    return mask
