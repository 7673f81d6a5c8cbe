# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Communication between the shards of an axis, for use inside any `shard_map`.

Every function takes the mesh axes that shard the axis, as a name or a tuple of names (the major one first), or `()`
where nothing is sharded, and then communicates nothing. All of them are differentiable in reverse mode and can be
vmapped.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from haliax_kernels.errors import ArgumentError
from haliax_kernels.mesh import MeshAxes, as_mesh_axes, halo_hops

T = TypeVar("T")
Carry = TypeVar("Carry")
MeshAxisNames = str | Sequence[str]

# Below this, one all-gather is cheaper than its log steps: the latency of a step counts for more than its bytes.
_ALL_GATHER_BYTES = 1 << 20


def shard_count(mesh_axes: MeshAxisNames) -> int:
    """The number of shards over `mesh_axes`; 1 for none."""
    return math.prod(lax.axis_size(m) for m in as_mesh_axes(mesh_axes))


def shard_index(mesh_axes: MeshAxisNames) -> jax.Array:
    """This device's shard over `mesh_axes`, an int32 scalar from 0 to `shard_count - 1`; 0 for none."""
    names = as_mesh_axes(mesh_axes)
    return lax.axis_index(names) if names else jnp.int32(0)


def _permute(x: jax.Array, names: MeshAxes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`lax.ppermute`, whose indices count in the mesh's order of axes, by shard indices over `names` in their own."""
    mesh = jax.sharding.get_abstract_mesh().axis_names
    ordered = tuple(sorted(names, key=mesh.index)) if all(m in mesh for m in names) else names
    if ordered != names:
        place = np.arange(shard_count(names)).reshape([lax.axis_size(m) for m in ordered])
        at = place.transpose([ordered.index(m) for m in names]).ravel().tolist()
        pairs = [(at[a], at[b]) for a, b in pairs]
    return lax.ppermute(x, ordered, pairs)


def shift(x: jax.Array, mesh_axes: MeshAxisNames, by: int = 1) -> jax.Array:
    """What the shard `by` places before this one has, around the ring: one collective-permute."""
    names = as_mesh_axes(mesh_axes)
    shards = shard_count(names)
    return _permute(x, names, [(i, (i + by) % shards) for i in range(shards)]) if by % shards else x


def permute(x: jax.Array, mesh_axes: MeshAxisNames, destinations: Sequence[int]) -> jax.Array:
    """What the shard whose destination is this one has: `destinations[i]` is where shard `i` sends its `x`."""
    return _permute(x, as_mesh_axes(mesh_axes), list(enumerate(destinations)))


def halo_exchange(
    x: jax.Array,
    mesh_axes: MeshAxisNames,
    *,
    dim: int,
    before: int = 0,
    after: int = 0,
    edge: float = 0,
) -> jax.Array:
    """The shard with the last `before` rows of what lies before it, and the first `after` rows of what lies after it.

    Each shard receives exactly `before + after` rows, in one ppermute for each neighbour that they reach into: one a
    side, unless they are more than a shard is long.

    Args:
        x: the local shard.
        mesh_axes: the mesh axes that shard dimension `dim`.
        dim: the dimension along which the shards lie one after the other.
        before: how many rows (indices of `dim`) to add in front.
        after: how many to add behind.
        edge: what stands in the rows beyond the two ends of the whole axis.

    Returns:
        An array with `before + x.shape[dim] + after` rows. Its gradient sends the cotangents of the added rows back.

    Raises:
        ArgumentError: a negative number of rows.
    """
    if before < 0 or after < 0:
        raise ArgumentError(f"halo_exchange: before={before} and after={after} must not be negative.")
    names = as_mesh_axes(mesh_axes)
    shards = shard_count(names)
    ahead, behind = (list(enumerate(halo_hops(n, x.shape[dim], shards), 1)) for n in (before, after))
    front = [_received(x, names, dim, rows, hop, edge) for hop, rows in reversed(ahead)]
    back = [_received(x, names, dim, rows, -hop, edge) for hop, rows in behind]
    parts = [
        *_filled(x, dim, before - sum(p.shape[dim] for p in front), edge),
        *front,
        x,
        *back,
        *_filled(x, dim, after - sum(p.shape[dim] for p in back), edge),
    ]
    return lax.concatenate(parts, dim) if len(parts) > 1 else x


def _received(x: jax.Array, names: MeshAxes, dim: int, rows: int, hop: int, edge: float) -> jax.Array:
    """The rows at the near end of the shard that lies `hop` before this one (behind it where `hop` is negative)."""
    shards, index = shard_count(names), shard_index(names)
    start = x.shape[dim] - rows if hop > 0 else 0
    pairs = [(i, i + hop) for i in range(shards) if 0 <= i + hop < shards]
    got = _permute(lax.slice_in_dim(x, start, start + rows, axis=dim), names, pairs)
    if edge == 0:  # what ppermute gives to a device that nobody sends to
        return got
    inside = (index - hop >= 0) & (index - hop < shards)
    return jnp.where(inside, got, jnp.asarray(edge, x.dtype))


def _filled(x: jax.Array, dim: int, rows: int, edge: float) -> list[jax.Array]:
    return [jnp.full((*x.shape[:dim], rows, *x.shape[dim + 1 :]), edge, x.dtype)] if rows > 0 else []


def ring(step: Callable[[Carry, T, jax.Array], Carry], carry: Carry, x: T, mesh_axes: MeshAxisNames) -> Carry:
    """Show every shard's `x` to every device in turn, passing it on around the ring.

    `step` on one shard's `x` and the transfer of the next one do not depend on each other, so that XLA may run both at
    the same time. There are `n - 1` transfers of `x` for `n` shards.

    Args:
        step: takes (carry, the visiting `x`, the index of the shard it belongs to, an int32 scalar) and returns the
            next carry, of the same shapes and dtypes. Traced twice.
        carry: the first carry.
        x: the PyTree of local arrays to pass on; this device's own comes first, then its predecessor's, and so on.
        mesh_axes: the mesh axes that form the ring.

    Returns:
        The last carry. JAX differentiates through all steps and keeps their residuals: memory grows with the ring.
    """
    names = as_mesh_axes(mesh_axes)
    shards, index = shard_count(names), shard_index(names)
    if shards == 1:
        return step(carry, x, index)

    def turn(state: tuple[Carry, T], hop: jax.Array) -> tuple[tuple[Carry, T], None]:
        carry, visiting = state
        following = jax.tree.map(lambda v: shift(v, names), visiting)
        return (step(carry, visiting, (index - hop) % shards), following), None

    (carry, last), _ = lax.scan(turn, (carry, x), jnp.arange(shards - 1, dtype=jnp.int32))
    return step(carry, last, (index + 1) % shards)


def exclusive_prefix(
    combine: Callable[[T, T], T],
    x: T,
    identity: T,
    mesh_axes: MeshAxisNames,
    *,
    method: Literal["auto", "log", "all_gather"] = "auto",
) -> T:
    """Combine the `x` of all shards before this one, in order: `combine(combine(x[0], x[1]), x[2])` on shard 3.

    Args:
        combine: an associative function of two PyTrees like `x`; it need not be commutative.
        x: this shard's PyTree of arrays.
        identity: a PyTree like `x` that `combine` leaves things alone with; what shard 0 gets.
        mesh_axes: the mesh axes that shard the axis.
        method: `log` takes `1 + ceil(log2(n - 1))` steps for `n` shards, each of the size of `x`; `all_gather` one,
            of `n` times that; `auto` takes the latter while it moves no more than 1 MiB (under `jax.vmap`, for one
            element of the mapped axes).

    Returns:
        A PyTree like `x`.
    """
    return _prefix(combine, x, identity, as_mesh_axes(mesh_axes), method, forward=True)


def exclusive_suffix(
    combine: Callable[[T, T], T],
    x: T,
    identity: T,
    mesh_axes: MeshAxisNames,
    *,
    method: Literal["auto", "log", "all_gather"] = "auto",
) -> T:
    """Combine the `x` of all shards after this one, in order; otherwise as `exclusive_prefix`.

    On shard 0 of four it is `combine(combine(x[1], x[2]), x[3])`; the last shard gets `identity`.
    """
    return _prefix(combine, x, identity, as_mesh_axes(mesh_axes), method, forward=False)


def _prefix(combine: Callable[[T, T], T], x: T, identity: T, names: MeshAxes, method: str, *, forward: bool) -> T:
    if method not in ("auto", "log", "all_gather"):
        raise ArgumentError(f"method={method!r} is none of 'auto', 'log', 'all_gather'.")
    identity = jax.tree.map(lambda i, v: jnp.broadcast_to(jnp.asarray(i, v.dtype), v.shape), identity, x)
    shards = shard_count(names)
    if shards == 1:
        return identity
    if method == "auto":
        gathered = shards * sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(x))
        method = "all_gather" if gathered <= _ALL_GATHER_BYTES else "log"
    return (_by_gathering if method == "all_gather" else _in_log_steps)(combine, x, identity, names, forward)


def _in_log_steps(combine: Callable[[T, T], T], x: T, identity: T, names: MeshAxes, forward: bool) -> T:
    """Hillis and Steele, "Data parallel algorithms" (1986): after the step of distance d each shard holds 2d."""
    shards = shard_count(names)
    index = shard_index(names)
    rank = index if forward else shards - 1 - index

    def moved(v: T, distance: int) -> T:
        pairs = [(i, i + distance) for i in range(shards - distance)]
        pairs = pairs if forward else [(b, a) for a, b in pairs]
        got = _unpacked([_permute(a, names, pairs) for a in _packed(v)], v)
        return jax.tree.map(lambda leaf, i: jnp.where(rank >= distance, leaf, i), got, identity)

    total, distance = moved(x, 1), 1
    while distance < shards - 1:
        other = moved(total, distance)
        total = combine(other, total) if forward else combine(total, other)
        distance *= 2
    return total


def _by_gathering(combine: Callable[[T, T], T], x: T, identity: T, names: MeshAxes, forward: bool) -> T:
    shards, index = shard_count(names), shard_index(names)
    every = [lax.all_gather(a, names) for a in _packed(x)]

    def one(i: int) -> T:
        used = i < index if forward else i > index
        return jax.tree.map(lambda v, e: jnp.where(used, v, e), _unpacked([a[i] for a in every], x), identity)

    total = one(0)
    for i in range(1, shards):
        total = combine(total, one(i))
    return total


def _packed(tree: Any) -> list[jax.Array]:
    """The leaves, those of one dtype in one flat array, so that one transfer moves them."""
    leaves = jax.tree.leaves(tree)
    return [
        leaves[places[0]] if len(places) == 1 else jnp.concatenate([jnp.ravel(leaves[i]) for i in places])
        for places in _by_dtype(leaves)
    ]


def _unpacked(arrays: Sequence[jax.Array], tree: T) -> T:
    """A PyTree like `tree` of what `_packed` made of one."""
    leaves, structure = jax.tree.flatten(tree)
    found = list(leaves)
    for array, places in zip(arrays, _by_dtype(leaves), strict=True):
        ends = list(itertools.accumulate(leaves[i].size for i in places))
        parts = [array] if len(places) == 1 else jnp.split(array, ends[:-1])
        for i, part in zip(places, parts, strict=True):
            found[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, found)


def _by_dtype(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """The places of the leaves of each dtype."""
    places: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        places.setdefault(leaf.dtype, []).append(i)
    return list(places.values())
