# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Ulysses: an all-to-all gives every device some of the heads and the whole sequence (Jacobs et al. 2023,
https://arxiv.org/abs/2309.14509)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.contract import AttentionOperands
from haliax_kernels.collectives import shard_count, shard_index
from haliax_kernels.context.zigzag import natural, stored
from haliax_kernels.mesh import MeshAxes

Sink = Float[Array, "heads group"] | None
OneHead = Callable[[AttentionOperands, Float[Array, " group"] | None], tuple[jax.Array, jax.Array]]


def attention(
    one_head: OneHead, x: AttentionOperands, sink: Sink, mesh_axes: MeshAxes, *, zigzag: bool = False
) -> tuple[Float[Array, "heads group q_pos value"], Float32[Array, "heads group q_pos"]]:
    """Attention of the shard's rows of all heads, through all rows of some heads; differentiable.

    Args:
        one_head: attention of one key/value head on the rows that all shards over `mesh_axes` have together.
        x: the shard's rows; q, k, v and seed with a leading axis of heads, which the number of shards divides. Neither
            mask nor bias.
        sink: one logit for each query head.
        mesh_axes: the mesh axes that shard the rows, or the minor ones of them.
        zigzag: whether the rows lie in zigzag order over `mesh_axes`.
    """
    shards = shard_count(mesh_axes)
    heads = x.q.shape[0] // shards

    def to_heads(v: jax.Array, dim: int) -> jax.Array:
        v = lax.all_to_all(v, mesh_axes, split_axis=0, concat_axis=dim, tiled=True)
        return natural(v, shards, dim) if zigzag else v

    def to_rows(v: jax.Array) -> jax.Array:
        v = stored(v, shards, 2) if zigzag else v
        return lax.all_to_all(v, mesh_axes, split_axis=2, concat_axis=0, tiled=True)

    def own_heads(v: jax.Array | None) -> jax.Array | None:
        return None if v is None else lax.dynamic_slice_in_dim(v, shard_index(mesh_axes) * heads, heads, 0)

    def all_rows(ids: jax.Array | None) -> jax.Array | None:
        if ids is None:
            return None
        whole: jax.Array = lax.all_gather(ids, mesh_axes, tiled=True)
        return natural(whole, shards, 0) if zigzag else whole

    size = x.k.shape[-1]
    kv = to_heads(jnp.concatenate([x.k, x.v], axis=-1), 1)
    whole = x._replace(
        q=to_heads(x.q, 2),
        k=kv[..., :size],
        v=kv[..., size:],
        q_segment_ids=all_rows(x.q_segment_ids),
        k_segment_ids=all_rows(x.k_segment_ids),
        seed=own_heads(x.seed),
    )
    at: dict[str, Any] = {n: 0 if n in ("q", "k", "v", "seed") else None for n in whole._fields}
    places = AttentionOperands(**at)
    static = isinstance(x.q_offset, int)

    def one(operands: AttentionOperands, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        # Python ints would come out of vmap as arrays.
        return one_head(operands._replace(q_offset=x.q_offset if static else operands.q_offset, k_offset=0), sink)

    own_sink = own_heads(sink)
    o, lse = jax.vmap(one, (places, None if sink is None else 0))(whole, own_sink)
    return to_rows(o), to_rows(lse)
