# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""From contiguous shards to zigzag ones and back, and whole arrays that lie in zigzag order."""

from typing import TypeVar

import haliax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import AxisSelector, NamedArray
from jax import lax

from haliax_kernels.collectives import permute, shard_count, shard_index
from haliax_kernels.context.pieces import Pieces
from haliax_kernels.errors import ArgumentError
from haliax_kernels.mesh import MeshAxes

Arr = TypeVar("Arr", jax.Array, np.ndarray)


def enter(x: jax.Array, mesh_axes: MeshAxes, dim: int) -> jax.Array:
    """The shard's rows in zigzag order: what it keeps and what it gets, in two collective-permutes of half a shard.

    Shard `i` of `n` has the slices `2i` and `2i + 1` of `2n`, and gets `i` and `2n - 1 - i`: one of them is even.
    """
    even, odd = (permute(v, mesh_axes, to) for v, to in zip(jnp.split(x, 2, dim), _routes(mesh_axes), strict=True))
    early_is_even = shard_index(mesh_axes) % 2 == 0
    return lax.concatenate([jnp.where(early_is_even, even, odd), jnp.where(early_is_even, odd, even)], dim)


def leave(x: jax.Array, mesh_axes: MeshAxes, dim: int) -> jax.Array:
    """The way back."""
    early, late = jnp.split(x, 2, dim)
    early_is_even = shard_index(mesh_axes) % 2 == 0
    both = jnp.where(early_is_even, early, late), jnp.where(early_is_even, late, early)
    back = [np.argsort(to).tolist() for to in _routes(mesh_axes)]
    return lax.concatenate([permute(v, mesh_axes, to) for v, to in zip(both, back, strict=True)], dim)


def _routes(mesh_axes: MeshAxes) -> list[list[int]]:
    """Where each shard sends its even slice, and its odd one."""
    shards = shard_count(mesh_axes)
    return [[min(s, 2 * shards - 1 - s) for s in range(parity, 2 * shards, 2)] for parity in (0, 1)]


def natural(x: jax.Array, shards: int, dim: int) -> jax.Array:
    """A whole array in the order of positions, from one in zigzag order."""
    return _reordered(x, np.argsort(_order(shards)), dim)


def stored(x: jax.Array, shards: int, dim: int) -> jax.Array:
    """A whole array in zigzag order, from one in the order of positions."""
    return _reordered(x, _order(shards), dim)


def _order(shards: int) -> np.ndarray:
    return Pieces(shards, 2, True).order


def _reordered(x: Arr, order: np.ndarray, dim: int) -> Arr:
    cut = x.reshape(*x.shape[:dim], len(order), -1, *x.shape[dim + 1 :])
    return cut.take(order, axis=dim).reshape(x.shape)


def zigzag_layout(x: NamedArray, axis: AxisSelector, shards: int) -> NamedArray:
    """Tokens, labels, positions or segment ids in the order that `sequence_layout="zigzag"` expects.

    With `2 * shards` slices of the sequence, contiguous shard `i` of the result holds the slices `i` and
    `2 * shards - 1 - i`. Everything that goes with a position moves with it: shift the labels before, not after.

    Args:
        x: any array that has `axis`.
        axis: the position axis, whose size is a multiple of `2 * shards`.
        shards: over how many devices the axis will be sharded.

    Raises:
        ArgumentError: a size that cannot be cut so; says which one can.
    """
    return _laid_out(x, axis, shards, _order(shards))


def from_zigzag_layout(x: NamedArray, axis: AxisSelector, shards: int) -> NamedArray:
    """The order of positions again; the inverse of `zigzag_layout`."""
    return _laid_out(x, axis, shards, np.argsort(_order(shards)))


def _laid_out(x: NamedArray, axis: AxisSelector, shards: int, order: np.ndarray) -> NamedArray:
    found = x.resolve_axis(haliax.axis.axis_name(axis))
    if found.size % (2 * shards):
        fits = -(-found.size // (2 * shards)) * 2 * shards
        raise ArgumentError(
            f"zigzag_layout: axis {found.name!r} has {found.size} positions, which is no multiple of {2 * shards}, "
            f"twice its {shards} shards. Pad it to {fits}."
        )
    names = [a.name for a in x.axes]
    return haliax.named(_reordered(x.array, order, names.index(found.name)), x.axes)
