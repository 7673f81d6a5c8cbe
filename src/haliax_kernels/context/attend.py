# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention on the shards of a sequence: the modes put together."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.contract import AttentionImplementation, AttentionOperands, AttentionOptions
from haliax_kernels.attention.differentiable import attention
from haliax_kernels.collectives import shard_count
from haliax_kernels.context import ulysses
from haliax_kernels.context.gather import OwnKeys, OwnQueries
from haliax_kernels.context.ring import Ring
from haliax_kernels.context.strategy import Strategy
from haliax_kernels.context.zigzag import enter, leave
from haliax_kernels.mesh import MeshAxes

Outputs = tuple[Float[Array, "*heads group q_pos value"], Float32[Array, "*heads group q_pos"]]


def sharded_attention(
    base: AttentionImplementation,
    strategy: Strategy,
    options: AttentionOptions,
    x: AttentionOperands,
    sink: jax.Array | None,
) -> Outputs:
    """`differentiable.attention` inside `shard_map`, on the shard's own queries, keys and values.

    Args:
        base: computes one block.
        strategy: how the shards work together.
        options: the static part of the call.
        x: the shard's own rows; mask and bias with its queries and all keys. Under `ulysses` q, k, v and seed have a
            leading axis of heads.
        sink: as in `differentiable.attention`; under `ulysses` with the axis of heads.

    Returns:
        `(o, lse)` of the shard's own queries.
    """
    if not strategy.ulysses:
        return _without_ulysses(base, strategy, strategy.mesh_axes, options, x, sink)
    rest = strategy.mesh_axes[: -len(strategy.ulysses)]

    def one_head(x: AttentionOperands, sink: jax.Array | None) -> Outputs:
        return _without_ulysses(base, strategy, rest, options, x, sink)

    return ulysses.attention(one_head, x, sink, strategy.ulysses, zigzag=strategy.stored_zigzag and not rest)


def _without_ulysses(
    base: AttentionImplementation,
    strategy: Strategy,
    mesh_axes: MeshAxes,
    options: AttentionOptions,
    x: AttentionOperands,
    sink: jax.Array | None,
) -> Outputs:
    if not mesh_axes:
        return attention(base, options, x, sink)
    shards, mode = shard_count(mesh_axes), strategy.mode
    if mode == "own_keys":
        return attention(OwnKeys(base, mesh_axes), options, x, sink)
    if mode in ("own_queries", "allgather"):
        gather = mode == "allgather"
        return attention(OwnQueries(base, mesh_axes, shards, gather, strategy.stored_zigzag), options, x, sink)
    if mode == "ring" or strategy.stored_zigzag:
        return attention(
            Ring(base, mesh_axes, shards, strategy.stored_zigzag, strategy.stored_zigzag), options, x, sink
        )
    # The exchange is left to JAX's derivatives: what is kept for the backward are the arrays in zigzag order.

    def entered(v: jax.Array | None, dim: int) -> jax.Array | None:
        return None if v is None else enter(v, mesh_axes, dim)

    kv, size = enter(jnp.concatenate([x.k, x.v], axis=-1), mesh_axes, 0), x.k.shape[-1]
    x = x._replace(
        q=enter(x.q, mesh_axes, 1),
        k=kv[:, :size],
        v=kv[:, size:],
        q_segment_ids=entered(x.q_segment_ids, 0),
        mask=entered(x.mask, 1),
        bias=entered(x.bias, 1),
    )
    o, lse = attention(Ring(base, mesh_axes, shards, zigzag=True), options, x, sink)
    return leave(o, mesh_axes, 1), leave(lse, mesh_axes, 1)
