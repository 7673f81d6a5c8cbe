# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What every implementation of attention computes: one pair, `forward` and `backward`, on one device's arrays.

The pair works on a block of queries and one of keys that may be parts of longer sequences, so that plain, windowed,
packed and ring attention share it. Its arrays belong to one key/value head and the group of query heads that share it;
`jax.vmap` the pair over batch and key/value heads.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from haliax_kernels.attention.block_sizes import BlockSizes


@dataclass(frozen=True)
class AttentionOptions:
    """The static part of a call.

    With `i` the position of a query and `j` that of a key, offsets included, the query sees the key if
    `i - left <= j <= i + right`, both segment ids are equal, and the mask, if there is one, says so.

    Attributes:
        scale: what `q @ k.T` is multiplied by.
        left: how many earlier positions a query sees; None for all of them.
        right: how many later ones; None for all, 0 for a causal mask.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after the bias and before the mask.
        dropout: the fraction of probabilities that are dropped; the others are divided by what is left.
        block_sizes: positions per block; None for what suits the shapes and the chip.
        out_dtype: the dtype of `o`; None for q's.
        grad_dtype: the dtype of dq, dk and dv; None for q's.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    block_sizes: BlockSizes | None = None
    out_dtype: DTypeLike | None = None
    grad_dtype: DTypeLike | None = None


class AttentionOperands(NamedTuple):
    """The arrays of a call.

    Attributes:
        q: the queries; float32 or bfloat16.
        k: the keys, in q's dtype.
        v: the values, in q's dtype; their size may differ from the keys'.
        q_offset: the position of the first query.
        k_offset: the position of the first key.
        q_segment_ids: given together with `k_segment_ids`.
        k_segment_ids: ids of the keys.
        mask: what a query may see, beside all else; a first dimension of 1 serves the whole group.
        bias: added to the scaled logits; a first dimension of 1 serves the whole group.
        seed: per query head, where its dropout begins. Which probabilities are dropped depends on the seed and on the
            two positions, nothing else: not on blocks, nor on how the sequence is cut.
    """

    q: Float[Array, "group q_pos key"]
    k: Float[Array, "k_pos key"]
    v: Float[Array, "k_pos value"]
    q_offset: Int32[Array, ""] | int = 0
    k_offset: Int32[Array, ""] | int = 0
    q_segment_ids: Int32[Array, " q_pos"] | None = None
    k_segment_ids: Int32[Array, " k_pos"] | None = None
    mask: Bool[Array, "group|1 q_pos k_pos"] | None = None
    bias: Float[Array, "group|1 q_pos k_pos"] | None = None
    seed: UInt32[Array, " group"] | None = None


class AttentionGradients(NamedTuple):
    """The gradients of `o` and `lse` together; `bias` is float32, of the bias' shape, or None where there is none."""

    q: Float[Array, "group q_pos key"]
    k: Float[Array, "k_pos key"]
    v: Float[Array, "k_pos value"]
    bias: Float32[Array, "group|1 q_pos k_pos"] | None = None


class AttentionImplementation(Protocol):
    """A module or object with the pair. It honours every option and operand, or raises `UnsupportedOptionError`."""

    def forward(
        self, options: AttentionOptions, x: AttentionOperands
    ) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
        """`(o, lse)`: the softmax of the logits times `v`, accumulated in float32, and the logits' logsumexp.

        A query that sees nothing has `o = 0` and `lse = -inf`. What is hidden may hold NaN or infinities.
        """
        ...

    def backward(
        self,
        options: AttentionOptions,
        x: AttentionOperands,
        lse: Float32[Array, "group q_pos"],
        do: Float[Array, "group q_pos value"],
        delta: Float32[Array, "group q_pos"],
    ) -> AttentionGradients:
        """The gradients, scores recomputed from `lse` (Dao 2023, https://arxiv.org/abs/2307.08691, algorithm 2).

        `delta` is `sum(do * o, value) - dlse`. It and `lse` may be those of a longer sequence of which these keys are
        a part: the gradients are then that part's. Those of a query that sees nothing are 0.
        """
        ...
