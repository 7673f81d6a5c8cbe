# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Algorithm 2 of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), in one pass over the blocks."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from haliax_kernels.attention.contract import AttentionGradients, AttentionOperands, AttentionOptions
from haliax_kernels.attention.soft_cap import tanh_slope
from haliax_kernels.attention.xla._blocks import K_GROUP_Q, Blocks, dot, keep_rows, pad


def backward(
    options: AttentionOptions,
    x: AttentionOperands,
    lse: Float32[Array, "group q_pos"],
    do: Float[Array, "group q_pos value"],
    delta: Float32[Array, "group q_pos"],
) -> AttentionGradients:
    """The gradients under the contract; float32, bfloat16 and float16."""
    blocks = Blocks.of(options, x, K_GROUP_Q)
    x = blocks.x
    group, _, key_size = x.q.shape
    dtype = options.grad_dtype or x.q.dtype
    # A product into (group, q, size) would transpose each block of ds. The other one XLA's CPU backend does not have
    # for 16-bit operands.
    size_first = x.k.dtype == jnp.float32

    # lse = +inf makes the probabilities of a row exp(-inf) = 0: for rows that see nothing, and for the padding.
    dead = lse == -jnp.inf
    lse = pad(jnp.where(dead, jnp.inf, lse), {1: blocks.q_padding}, jnp.inf)
    do = pad(jnp.where(dead[..., None], 0, do).astype(x.v.dtype), {1: blocks.q_padding})
    delta = pad(jnp.where(dead, 0, delta), {1: blocks.q_padding})

    def q_block(i, outputs):
        q_i, do_i, lse_i, delta_i = (blocks.q_block(a, i) for a in (x.q, do, lse, delta))

        def k_block(j, state, masked):
            dq_i, dk, dv, dbias = state
            k_j, v_j = blocks.k_block(x.k, j), blocks.k_block(x.v, j)
            logits = blocks.logits(dot("kd,gqd->kgq", k_j, q_i), i, j)
            mask, visible_k, visible_q, visible_do, p = None, k_j, q_i, do_i, jnp.exp(blocks.capped(logits) - lse_i)
            if masked:
                mask = blocks.mask(i, j)
                p = jnp.where(mask, p, 0)
                visible_k = keep_rows(k_j, mask.any((1, 2)))
                visible_q, visible_do = (keep_rows(a, mask.any(0)) for a in (q_i, do_i))
            dp = dot("kd,gqd->kgq", v_j, do_i)
            dropped = p
            kept = blocks.keep(i, j)
            if kept is not None:
                dp, dropped = (jnp.where(kept, a / blocks.kept, 0) for a in (dp, p))
            # Through the softmax: d loss / d logits.
            ds = p * (dp - delta_i)
            if options.soft_cap is not None:
                ds = ds * tanh_slope(logits / options.soft_cap)
            if mask is not None:
                ds = jnp.where(mask, ds, 0)
            if dbias is not None:
                dbias = _set_bias_block(dbias, ds, i * blocks.q, j * blocks.k)
            if size_first:
                dq_i = dq_i + dot("kd,kgq->dgq", visible_k, ds)
            else:
                dq_i = dq_i + dot("kgq,kd->gqd", ds, visible_k)
            dk = _add_block(dk, dot("kgq,gqd->kd", ds, visible_q), j * blocks.k)
            dv = _add_block(dv, dot("kgq,gqd->kd", dropped, visible_do), j * blocks.k)
            return dq_i, dk, dv, dbias

        dq, *others = outputs
        rows = (group, blocks.q)
        start = jnp.zeros((key_size, *rows) if size_first else (*rows, key_size), jnp.float32)
        dq_i, *others = blocks.for_visible_k(i, k_block, (start, *others))
        dq_i = (dq_i * options.scale).astype(dtype)
        dq_i = dq_i.transpose(1, 2, 0) if size_first else dq_i
        return lax.dynamic_update_slice_in_dim(dq, dq_i, i * blocks.q, 1), *others

    start = (
        jnp.zeros(x.q.shape, dtype),
        jnp.zeros(x.k.shape, jnp.float32),
        jnp.zeros(x.v.shape, jnp.float32),
        None if x.bias is None else jnp.zeros(x.bias.shape, jnp.float32),
    )
    dq, dk, dv, dbias = lax.fori_loop(0, blocks.q_count, q_block, start)
    q_len, k_len = blocks.q_len, blocks.k_len
    return AttentionGradients(
        q=dq[:, :q_len],
        k=(dk[:k_len] * options.scale).astype(dtype),
        v=dv[:k_len].astype(dtype),
        bias=None if dbias is None else dbias[:, :q_len, :k_len],
    )


def _add_block(x: Float32[Array, "k_pos size"], block: Float32[Array, "k_block size"], start: Int[Array, ""]) -> Array:
    old = lax.dynamic_slice_in_dim(x, start, block.shape[0])
    return lax.dynamic_update_slice_in_dim(x, old + block, start, 0)


def _set_bias_block(
    dbias: Float32[Array, "group|1 q_pos k_pos"],
    ds: Float32[Array, "k_block group q_block"],
    q_start: Int[Array, ""],
    k_start: Int[Array, ""],
) -> Array:
    """dbias with the block that is the bias' gradient; the bias is added after the scale."""
    block = ds.transpose(1, 2, 0)
    if dbias.shape[0] == 1:
        block = block.sum(0, keepdims=True)
    return lax.dynamic_update_slice(dbias, block, (0, q_start, k_start))
