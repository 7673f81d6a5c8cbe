# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The pair made differentiable, for causal masks and segments."""

from jaxtyping import Array, Float, Float32, Int32

from haliax_kernels.attention import differentiable, xla
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions


def attention(
    q: Float[Array, "group q_pos key"],
    k: Float[Array, "k_pos key"],
    v: Float[Array, "k_pos value"],
    q_segment_ids: Int32[Array, " q_pos"] | None = None,
    k_segment_ids: Int32[Array, " k_pos"] | None = None,
    *,
    causal: bool,
    scale: float,
    block_sizes: BlockSizes | None = None,
) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
    """Attention of a group of query heads to one key/value head, in memory linear in the lengths.

    `o = softmax(scale * q @ k.T, over the keys each query may see) @ v`, and `lse` the logsumexp of the same logits.
    Both are differentiable and may stand in one loss. Products of 16-bit inputs are accumulated in float32, and the
    softmax is float32. `jax.vmap` it over batch and key/value heads: what is not mapped is shared.

    A query that sees no key has `o = 0` and `lse = -inf` and sends no gradient.

    Args:
        q: queries; float32, bfloat16 or float16. The group is the query heads that share the key/value head.
        k: keys, in q's dtype.
        v: values, in q's dtype. Their size may differ from the keys'.
        q_segment_ids: int32 ids; a query sees the keys of its own id only. Given together with `k_segment_ids`.
        k_segment_ids: int32 ids of the keys.
        causal: whether query i sees keys j <= i only, both counted from the start, also if the lengths differ.
        scale: what the logits are multiplied by.
        block_sizes: positions per block; by default what suits the platform. Lengths need not be multiples of them.

    Returns:
        `(o, lse)`, in q's dtype and float32. For `jax.checkpoint` policies they are named `flash_attention_out` and
        `flash_attention_lse`.
    """
    options = AttentionOptions(scale=scale, right=0 if causal else None, block_sizes=block_sizes)
    operands = AttentionOperands(q, k, v, q_segment_ids=q_segment_ids, k_segment_ids=k_segment_ids)
    return differentiable.attention(xla, options, operands)
