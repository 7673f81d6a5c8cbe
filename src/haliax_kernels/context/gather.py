# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention where every device has all keys, or all queries: one collective instead of a ring."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.contract import (
    AttentionGradients,
    AttentionImplementation,
    AttentionOperands,
    AttentionOptions,
)
from haliax_kernels.collectives import shard_index
from haliax_kernels.context.pieces import Pieces
from haliax_kernels.context.zigzag import natural, stored
from haliax_kernels.mesh import MeshAxes

_O = Float[Array, "group q_pos value"]
_Lse = Float32[Array, "group q_pos"]


@dataclass(frozen=True)
class OwnQueries:
    """A pair for the shard's own queries and all keys.

    Operands are as in `Ring`. Backward, the keys are gathered again instead of being kept, and the gradients of all
    keys are added up and scattered in float32.

    Attributes:
        base: computes one block.
        mesh_axes: the mesh axes that shard the queries.
        shards: the number of shards.
        gather: whether they shard the keys, too; else every shard has all keys.
        zigzag: whether the sequence lies in zigzag order.
    """

    base: AttentionImplementation
    mesh_axes: MeshAxes
    shards: int
    gather: bool = True
    zigzag: bool = False

    def forward(self, options: AttentionOptions, x: AttentionOperands) -> tuple[_O, _Lse]:
        """As `AttentionImplementation.forward`, for the shard's queries."""
        whole = self._with_all_keys(x)
        found = [self.base.forward(options, piece) for _, piece in self._pieces(whole)]
        return jnp.concatenate([o for o, _ in found], 1), jnp.concatenate([lse for _, lse in found], 1)

    def backward(
        self, options: AttentionOptions, x: AttentionOperands, lse: _Lse, do: _O, delta: _Lse
    ) -> AttentionGradients:
        """As `AttentionImplementation.backward`, of the shard's own rows; of all keys where these are not sharded."""
        whole = self._with_all_keys(x)
        in_float32 = dataclasses.replace(options, grad_dtype=jnp.float32)
        found = [
            self.base.backward(in_float32, piece, lse[:, rows], do[:, rows], delta[:, rows])
            for rows, piece in self._pieces(whole)
        ]
        dtype = options.grad_dtype or x.q.dtype
        dkv = sum((jnp.concatenate([g.k, g.v], -1) for g in found[1:]), jnp.concatenate([found[0].k, found[0].v], -1))
        if self.gather:
            dkv = lax.psum_scatter(self._stored(dkv, 0), self.mesh_axes, scatter_dimension=0, tiled=True)
        dbias = None
        if x.bias is not None:
            dbias = jnp.concatenate([g.bias for g in found if g.bias is not None], 1)
            dbias = self._stored(dbias, 2) if self.gather else dbias
        dq, size = jnp.concatenate([g.q for g in found], 1), x.k.shape[-1]
        return AttentionGradients(dq.astype(dtype), dkv[:, :size].astype(dtype), dkv[:, size:].astype(dtype), dbias)

    def _with_all_keys(self, x: AttentionOperands) -> AttentionOperands:
        if not self.gather:
            return x
        kv = self._natural(lax.all_gather(jnp.concatenate([x.k, x.v], -1), self.mesh_axes, tiled=True), 0)
        ids = x.k_segment_ids
        return x._replace(
            k=kv[:, : x.k.shape[-1]],
            v=kv[:, x.k.shape[-1] :],
            k_segment_ids=ids if ids is None else self._natural(lax.all_gather(ids, self.mesh_axes, tiled=True), 0),
            mask=None if x.mask is None else self._natural(x.mask, 2),
            bias=None if x.bias is None else self._natural(x.bias, 2),
        )

    def _pieces(self, x: AttentionOperands) -> list[tuple[slice, AttentionOperands]]:
        """The queries of each piece, with all else that has rows."""
        pieces = Pieces(self.shards, x.q.shape[1], self.zigzag)
        index, found = shard_index(self.mesh_axes), []
        for a in range(pieces.count):
            rows = pieces.local(a)
            operands = x._replace(
                q=x.q[:, rows],
                q_offset=x.q_offset + pieces.start(a, index),
                q_segment_ids=None if x.q_segment_ids is None else x.q_segment_ids[rows],
                mask=None if x.mask is None else x.mask[:, rows],
                bias=None if x.bias is None else x.bias[:, rows],
            )
            found.append((rows, operands))
        return found

    def _natural(self, v: jax.Array, dim: int) -> jax.Array:
        return natural(v, self.shards, dim) if self.zigzag else v

    def _stored(self, v: jax.Array, dim: int) -> jax.Array:
        return stored(v, self.shards, dim) if self.zigzag else v


@dataclass(frozen=True)
class OwnKeys:
    """A pair for all queries and the shard's own keys; what the shards found is put together by its logsumexp.

    Every shard returns the same output. Its cotangent is expected on one shard, and zero on the others (see `Manual`);
    the gradients of queries and bias are each shard's share, to be added up by the caller.

    Attributes:
        base: computes one block.
        mesh_axes: the mesh axes that shard the keys.
    """

    base: AttentionImplementation
    mesh_axes: MeshAxes

    def forward(self, options: AttentionOptions, x: AttentionOperands) -> tuple[_O, _Lse]:
        """As `AttentionImplementation.forward`, for all keys."""
        o, lse = self.base.forward(dataclasses.replace(options, out_dtype=jnp.float32), self._own(x))
        highest = lax.pmax(lse, self.mesh_axes)
        highest = jnp.where(highest == -jnp.inf, 0, highest)
        weight = jnp.exp(lse - highest)
        o, total = lax.psum((o * weight[..., None], weight), self.mesh_axes)
        alive = total > 0
        divisor = jnp.where(alive, total, 1)
        o = (o / divisor[..., None]).astype(options.out_dtype or x.q.dtype)
        return o, jnp.where(alive, highest + jnp.log(divisor), -jnp.inf)

    def backward(
        self, options: AttentionOptions, x: AttentionOperands, lse: _Lse, do: _O, delta: _Lse
    ) -> AttentionGradients:
        """As `AttentionImplementation.backward`; see the class for who adds up what."""
        do, delta = lax.psum((do, delta), self.mesh_axes)
        found = self.base.backward(options, self._own(x), lse, do, delta)
        if x.bias is None or found.bias is None:
            return found
        at = (0, 0, self._column(x))
        return found._replace(bias=lax.dynamic_update_slice(jnp.zeros(x.bias.shape, jnp.float32), found.bias, at))

    def _column(self, x: AttentionOperands) -> jax.Array:
        return shard_index(self.mesh_axes) * x.k.shape[0]

    def _own(self, x: AttentionOperands) -> AttentionOperands:
        column = self._column(x)

        def columns(v: jax.Array | None) -> jax.Array | None:
            return None if v is None else lax.dynamic_slice_in_dim(v, column, x.k.shape[0], 2)

        return x._replace(k_offset=column, mask=columns(x.mask), bias=columns(x.bias))
