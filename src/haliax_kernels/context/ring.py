# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Ring attention: keys and values visit every shard of the queries (Liu et al. 2023, https://arxiv.org/abs/2310.01889).

Backward, the gradients of the visiting keys and values travel with them, one step behind, so that each pair of blocks
is computed once (as in Megatron-style rings; the first rings computed it twice). At every step the next transfers do
not depend on what is computed, so that both run at the same time. Steps are turns of a loop: the program does not grow
with the ring.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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
from haliax_kernels.collectives import shard_index, shift
from haliax_kernels.context.merge import merge
from haliax_kernels.context.pieces import Pieces, Work, visible
from haliax_kernels.mesh import MeshAxes

T = TypeVar("T")


@dataclass(frozen=True)
class Ring:
    """The pair of `AttentionImplementation` on the shards of one sequence, inside `shard_map`.

    Queries, keys, values and segment ids are the shard's own; mask and bias have its queries and all keys.

    Attributes:
        base: computes one block.
        mesh_axes: the mesh axes that shard queries and keys.
        shards: the number of shards.
        zigzag: whether the rows of the queries, keys and values lie in zigzag order.
        zigzag_columns: whether segment ids of the keys, and columns of mask and bias, do too.
    """

    base: AttentionImplementation
    mesh_axes: MeshAxes
    shards: int
    zigzag: bool = False
    zigzag_columns: bool = False

    def forward(
        self, options: AttentionOptions, x: AttentionOperands
    ) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
        """As `AttentionImplementation.forward`, for the shard's queries and the keys of all shards."""
        tour = _Tour(self, options, x)
        block_options = dataclasses.replace(options, out_dtype=jnp.float32)
        group, _, value = x.q.shape[0], None, x.v.shape[-1]

        def visit(carry: list[Any], kv: jax.Array, source: jax.Array, hops: range) -> list[Any]:
            for a, b in tour.pairs(hops):
                operands = tour.block(a, b, kv, source, hops)

                def compute(so_far: Any, operands: AttentionOperands = operands) -> Any:
                    o, lse = self.base.forward(block_options, operands)
                    return merge(so_far[0], so_far[1], o, lse)

                carry[a] = tour.where_seen(a, b, source, hops, compute, carry[a])
            return carry

        rows = tour.work.q.size
        nothing = jnp.zeros((group, rows, value), jnp.float32), jnp.full((group, rows), -jnp.inf, jnp.float32)
        carry: list[Any] = [nothing] * tour.work.q.count
        ahead, behind = tour.work.arms
        kv = tour.packed
        started = {d: shift(kv, self.mesh_axes, d) for d, count in ((1, ahead), (-1, behind)) if count}
        carry = visit(carry, kv, tour.index, range(1))
        for direction, count in ((1, ahead), (-1, behind)):
            if not count:
                continue

            def turn(state: Any, hop: jax.Array, direction: int = direction, count: int = count) -> Any:
                carry, visiting = state
                following = shift(visiting, self.mesh_axes, direction)
                return (visit(carry, visiting, tour.source(direction, hop), tour.hops(direction, 1, count)), following)

            carry, kv = _turns(turn, (carry, started[direction]), count)
            carry = visit(carry, kv, tour.source(direction, count), tour.hops(direction, count, count + 1))
        o, lse = (jnp.concatenate(parts, axis=1) for parts in zip(*carry, strict=True))
        return o.astype(options.out_dtype or x.q.dtype), lse

    def backward(
        self,
        options: AttentionOptions,
        x: AttentionOperands,
        lse: Float32[Array, "group q_pos"],
        do: Float[Array, "group q_pos value"],
        delta: Float32[Array, "group q_pos"],
    ) -> AttentionGradients:
        """As `AttentionImplementation.backward`: the gradients of the shard's own queries, keys, values and bias."""
        tour = _Tour(self, options, x)
        block_options = dataclasses.replace(options, grad_dtype=jnp.float32)
        k_size = x.k.shape[-1]

        def visit(
            carry: list[Any], kv: jax.Array, source: jax.Array, hops: range
        ) -> tuple[list[Any], Float32[Array, "k_pos both"]]:
            """The queries' gradients with this visit's share, and the visitors' share."""
            shares: list[Any] = [jnp.zeros((tour.work.k.size, kv.shape[-1]), jnp.float32)] * tour.work.k.count
            for a, b in tour.pairs(hops):
                operands = tour.block(a, b, kv, source, hops)

                def compute(
                    so_far: Any, a: int = a, b: int = b, operands: AttentionOperands = operands
                ) -> tuple[Any, Any, Any]:
                    dq, dbias, share = so_far
                    rows = tour.work.q.local(a)
                    found = self.base.backward(block_options, operands, lse[:, rows], do[:, rows], delta[:, rows])
                    if dbias is not None and found.bias is not None:
                        at = (0, 0, tour.column(b, source))
                        dbias = lax.dynamic_update_slice(dbias, found.bias, at)
                    return dq + found.q, dbias, share + jnp.concatenate([found.k, found.v], axis=-1)

                state = (*carry[a], shares[b])
                *carry[a], shares[b] = tour.where_seen(a, b, source, hops, compute, state)
            return carry, jnp.concatenate(shares)

        def start(a: int) -> list[Any]:
            dq = jnp.zeros((x.q.shape[0], tour.work.q.size, k_size), jnp.float32)
            if x.bias is None:
                return [dq, None]
            return [dq, jnp.zeros((x.bias.shape[0], tour.work.q.size, x.bias.shape[2]), jnp.float32)]

        carry = [start(a) for a in range(tour.work.q.count)]
        ahead, behind = tour.work.arms
        kv = tour.packed
        started = {d: shift(kv, self.mesh_axes, d) for d, count in ((1, ahead), (-1, behind)) if count}
        carry, own = visit(carry, kv, tour.index, range(1))
        gradients = []
        for direction, count in ((1, ahead), (-1, behind)):
            if not count:
                continue

            def turn(state: Any, hop: jax.Array, direction: int = direction, count: int = count) -> Any:
                carry, visiting, share = state
                following, share = (shift(v, self.mesh_axes, direction) for v in (visiting, share))
                source = tour.source(direction, hop)
                carry, more = visit(carry, visiting, source, tour.hops(direction, 1, count))
                return carry, following, share + more

            # The shard's own share sets out with the keys, unless it went the other way.
            share = own if not gradients else jnp.zeros_like(own)
            carry, kv, share = _turns(turn, (carry, started[direction], share), count)
            share = shift(share, self.mesh_axes, direction)
            carry, more = visit(carry, kv, tour.source(direction, count), tour.hops(direction, count, count + 1))
            gradients.append(shift(share + more, self.mesh_axes, -direction * count))
        dkv = sum(gradients[1:], gradients[0]) if gradients else own
        dtype = options.grad_dtype or x.q.dtype
        dq = jnp.concatenate([dq for dq, _ in carry], axis=1)
        dbias = None if x.bias is None else jnp.concatenate([db for _, db in carry], axis=1)
        return AttentionGradients(
            dq.astype(dtype), dkv[:, :k_size].astype(dtype), dkv[:, k_size:].astype(dtype), dbias
        )


def _turns(turn: Callable[[T, jax.Array], T], state: T, count: int) -> T:
    """The steps 1 to `count - 1`."""
    if count == 1:
        return state
    hops = jnp.arange(1, count, dtype=jnp.int32)
    state, _ = lax.scan(lambda s, hop: (turn(s, hop), None), state, hops)
    return state


class _Tour:
    """What stays the same while keys and values travel."""

    def __init__(self, ring: Ring, options: AttentionOptions, x: AttentionOperands):
        self.ring, self.options, self.x = ring, options, x
        self.index = shard_index(ring.mesh_axes)
        q, k = (Pieces(ring.shards, n, ring.zigzag) for n in (x.q.shape[1], x.k.shape[0]))
        self.work = Work.of(options, q, k, x.q_offset if isinstance(x.q_offset, int) else None)
        # One array travels, and so one collective a step.
        self.packed = jnp.concatenate([x.k, x.v], axis=-1)
        # Segment ids are few: they are gathered once, instead of travelling.
        ids = x.k_segment_ids
        self.k_ids = ids if ids is None else lax.all_gather(ids, ring.mesh_axes, tiled=True)

    def source(self, direction: int, hop: Any) -> jax.Array:
        """Whose keys are here after `hop` steps."""
        return (self.index - direction * hop) % self.ring.shards

    def hops(self, direction: int, first: int, stop: int) -> range:
        """The same steps, counted onwards."""
        shards = self.ring.shards
        return range(first, stop) if direction > 0 else range(shards - stop + 1, shards - first + 1)

    def pairs(self, hops: range) -> list[tuple[int, int]]:
        """The pairs of pieces that any shard has to compute at these steps."""
        every = ((a, b) for a in range(self.work.q.count) for b in range(self.work.k.count))
        return [(a, b) for a, b in every if self.work.needed(a, b, hops) != "never"] if len(hops) else []

    def where_seen(self, a: int, b: int, source: jax.Array, hops: range, compute: Callable[[T], T], state: T) -> T:
        """`compute(state)` on the shards where the mask leaves anything of the pair, `state` on the others."""
        if self.work.needed(a, b, hops) == "always":
            return compute(state)
        q, k = self.work.q, self.work.k
        q_start = self.x.q_offset + q.start(a, self.index)
        seen = visible(self.options, q_start, q.size, k.start(b, source), k.size)
        return lax.cond(seen, compute, lambda state: state, state)

    def column(self, b: int, source: jax.Array) -> jax.Array:
        """Where the keys of a piece stand among all keys."""
        k = self.work.k
        return (source * k.count + b) * k.size if self.ring.zigzag_columns else k.start(b, source)

    def block(self, a: int, b: int, kv: jax.Array, source: jax.Array, hops: range) -> AttentionOperands:
        """The operands of a pair of pieces."""
        x, q, k = self.x, self.work.q, self.work.k
        rows, keys = q.local(a), kv[k.local(b)]
        column = self.column(b, source)

        def columns(v: jax.Array | None) -> jax.Array | None:
            return None if v is None else lax.dynamic_slice_in_dim(v[:, rows], column, k.size, 2)

        distance = self.work.fixed_distance(a, b, hops)
        if distance is not None and not self.options.dropout:  # where kernels can plan their work when compiling
            q_offset, k_offset = distance, 0
        else:
            q_offset, k_offset = x.q_offset + q.start(a, self.index), k.start(b, source)
        return AttentionOperands(
            q=x.q[:, rows],
            k=keys[:, : x.k.shape[-1]],
            v=keys[:, x.k.shape[-1] :],
            q_offset=q_offset,
            k_offset=k_offset,
            q_segment_ids=None if x.q_segment_ids is None else x.q_segment_ids[rows],
            k_segment_ids=None if self.k_ids is None else lax.dynamic_slice_in_dim(self.k_ids, column, k.size),
            mask=columns(x.mask),
            bias=columns(x.bias),
            seed=x.seed,
        )
