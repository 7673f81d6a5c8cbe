# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention on plain arrays, which may be sharded in any way under plain `jit`."""

import functools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.backends import IMPLEMENTATIONS, Request, pair_of
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.differentiable import attention
from haliax_kernels.context import strategy
from haliax_kernels.context.attend import sharded_attention
from haliax_kernels.errors import ArgumentError
from haliax_kernels.implementations import choose, current_platform
from haliax_kernels.kernel import NamedKernel, named_kernel
from haliax_kernels.policies import Manual, Parallel
from haliax_kernels.shard_context import AxisShard, ShardContext

_Out = Float[Array, "batch q_pos heads value"]
_Lse = Float32[Array, "batch q_pos heads"]


@overload
def plain_flash_attention(
    query: Float[Array, "batch q_pos heads key"],
    key: Float[Array, "batch k_pos kv_heads key"],
    value: Float[Array, "batch k_pos kv_heads value"],
    *,
    is_causal: bool = False,
    sliding_window: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    context_parallel: str = "auto",
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    return_lse: Literal[False] = False,
) -> _Out: ...


@overload
def plain_flash_attention(
    query: Float[Array, "batch q_pos heads key"],
    key: Float[Array, "batch k_pos kv_heads key"],
    value: Float[Array, "batch k_pos kv_heads value"],
    *,
    is_causal: bool = False,
    sliding_window: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    context_parallel: str = "auto",
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    return_lse: Literal[True],
) -> tuple[_Out, _Lse]: ...


def plain_flash_attention(
    query: Float[Array, "batch q_pos heads key"],
    key: Float[Array, "batch k_pos kv_heads key"],
    value: Float[Array, "batch k_pos kv_heads value"],
    *,
    is_causal: bool = False,
    sliding_window: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    context_parallel: str = "auto",
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    return_lse: bool = False,
) -> _Out | tuple[_Out, _Lse]:
    """`flash_attention` for arrays without names, in the order of `jax.nn.dot_product_attention`.

    Under `jit` it takes the shardings that its arrays have, or that XLA gives them: batch and heads are computed where
    they lie, and where the positions are sharded, the shards work together as `context_parallel` says.

    Args:
        query: the queries; `heads` is a multiple of `kv_heads`, and query head `h` sees key head
            `h // (heads // kv_heads)`.
        key: the keys.
        value: the values.
        is_causal: whether a query sees no later position.
        sliding_window: how many positions a query sees, itself included, none of them later.
        scale: what the logits are multiplied by; 1/sqrt(key size) by default.
        logits_soft_cap: as in `flash_attention`.
        context_parallel: `auto`, `ring`, `zigzag`, `allgather` or `error`; `ulysses` needs `flash_attention`.
        implementation: as in `flash_attention`.
        block_sizes: as in `flash_attention`.
        return_lse: also return the logsumexp of the scaled, masked logits.

    Returns:
        The output in query's dtype, and with `return_lse` the logsumexp.

    Raises:
        ArgumentError: `heads` is no multiple of `kv_heads`, or `sliding_window` is less than 1.
        NamedKernelError: any other refusal; inside XLA's own error where a sharding is known to XLA only.
    """
    batch, q_len, heads, size = query.shape
    kv_heads = key.shape[2]
    if heads % kv_heads:
        raise ArgumentError(f"plain_flash_attention: {heads} query heads are no multiple of {kv_heads} key heads.")
    if sliding_window is not None and sliding_window < 1:
        raise ArgumentError(f"plain_flash_attention: sliding_window={sliding_window} must be at least 1.")
    dtype = jnp.result_type(query, key, value)
    used = {"return_lse": return_lse, "logits_soft_cap": logits_soft_cap, "sliding_window": sliding_window}
    request = Request(
        current_platform(), (*(n for n, v in used.items() if v), "context_parallel"), dtype, block_sizes,
        max(size, value.shape[3]),
    )  # fmt: skip
    chosen = choose("flash_attention", IMPLEMENTATIONS, request, implementation)
    options = AttentionOptions(
        scale=size**-0.5 if scale is None else scale,
        left=None if sliding_window is None else sliding_window - 1,
        right=0 if is_causal or sliding_window is not None else None,
        soft_cap=logits_soft_cap,
        block_sizes=block_sizes,
    )
    grouped = query.astype(dtype).reshape(batch, q_len, kv_heads, heads // kv_heads, size)
    k, v = (x.astype(dtype).transpose(0, 2, 1, 3) for x in (key, value))
    o, lse = _kernel(chosen.name, context_parallel).plain(grouped.transpose(0, 2, 3, 1, 4), k, v, options=options)
    o = o.transpose(0, 3, 1, 2, 4).reshape(batch, q_len, heads, -1).astype(query.dtype)
    return (o, lse.transpose(0, 3, 1, 2).reshape(batch, q_len, heads)) if return_lse else o


@functools.cache
def _kernel(implementation: str, context_parallel: str) -> NamedKernel:
    policies = {"group": Parallel()}
    if context_parallel != "error":
        policies |= {"q_pos": Manual(), "k_pos": Manual(reduces=True)}

    def plain_flash_attention(
        q: jax.Array, k: jax.Array, v: jax.Array, *, options: AttentionOptions, shard: ShardContext
    ) -> Any:
        pair, operands = pair_of(implementation), AttentionOperands(q, k, v)
        q_shard, k_shard = shard["q_pos"], shard["k_pos"]
        if not (q_shard.mesh_axes or k_shard.mesh_axes):
            return attention(pair, options, operands)
        call = strategy.SequenceCall(
            options=options,
            q_offset=0,
            q_mesh_axes=_sizes(q_shard),
            k_mesh_axes=_sizes(k_shard),
            q_rows=q_shard.local_size,
            k_rows=k_shard.local_size,
            heads=None,
            group=q.shape[0],
            batch=1,
            sizes=(k.shape[-1], v.shape[-1]),
            itemsize=q.dtype.itemsize,
            pairs=False,
            layout="contiguous",
            names=("q_pos", "k_pos"),
        )
        return sharded_attention(pair, strategy.choose(call, context_parallel), options, operands, None)

    signature = "group q_pos key, k_pos key, k_pos value -> group q_pos value, group q_pos"
    return named_kernel(signature, policies=policies)(plain_flash_attention)


def _sizes(shard: AxisShard) -> tuple[tuple[str, int], ...]:
    """The mesh axes with their sizes, inside `shard_map`."""
    found = tuple((m, jax.lax.axis_size(m)) for m in shard.mesh_axes)
    assert math.prod(n for _, n in found) == shard.size
    return found
