# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The online softmax of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691, algorithm 1)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.xla._blocks import GROUP_Q_K, Blocks, dot, keep_rows


def forward(
    options: AttentionOptions, x: AttentionOperands
) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
    """`(o, lse)` under the contract; float32, bfloat16 and float16."""
    blocks = Blocks.of(options, x, GROUP_Q_K)
    x = blocks.x
    group, padded_len, _ = x.q.shape
    value_size = x.v.shape[1]

    def q_block(i, outputs):
        q_i = blocks.q_block(x.q, i)

        def k_block(j, state, masked):
            total, largest, acc = state
            k_j, v_j = blocks.k_block(x.k, j), blocks.k_block(x.v, j)
            logits = blocks.capped(blocks.logits(dot("gqd,kd->gqk", q_i, k_j), i, j))
            if masked:
                mask = blocks.mask(i, j)
                logits = jnp.where(mask, logits, -jnp.inf)
                v_j = keep_rows(v_j, mask.any((0, 1)))
            new_largest = jnp.maximum(largest, logits.max(-1))
            # A row that has seen nothing yet has -inf here, and -inf - -inf is NaN.
            shift = jnp.where(new_largest == -jnp.inf, 0, new_largest)
            p = jnp.exp(logits - shift[..., None])
            shrink = jnp.exp(largest - shift)
            total = total * shrink + p.sum(-1)
            # Dropout is of the values' weights; the denominator is that of all probabilities.
            kept = blocks.keep(i, j)
            p = p if kept is None else jnp.where(kept, p, 0)
            return total, new_largest, acc * shrink[..., None] + dot("gqk,kd->gqd", p, v_j)

        rows = (group, blocks.q)
        start = (
            jnp.zeros(rows, jnp.float32),
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros((*rows, value_size), jnp.float32),
        )
        total, largest, acc = blocks.for_visible_k(i, k_block, start)
        dead = total == 0
        total = jnp.where(dead, 1, total)
        o, lse = outputs
        o_i = (acc / (total * blocks.kept)[..., None]).astype(o.dtype)
        lse_i = jnp.where(dead, -jnp.inf, largest + jnp.log(total))
        o = lax.dynamic_update_slice_in_dim(o, o_i, i * blocks.q, 1)
        return o, lax.dynamic_update_slice_in_dim(lse, lse_i, i * blocks.q, 1)

    # What no block writes, where there are no queries or no keys, is what a query that sees nothing gets.
    o = jnp.zeros((group, padded_len, value_size), options.out_dtype or x.q.dtype)
    lse = jnp.full((group, padded_len), -jnp.inf, jnp.float32)
    o, lse = lax.fori_loop(0, blocks.q_count, q_block, (o, lse))
    return o[:, : blocks.q_len], lse[:, : blocks.q_len]
