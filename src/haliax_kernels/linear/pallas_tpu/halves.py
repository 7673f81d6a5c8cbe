# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of a chunk by halves, inside a kernel: a chunk is blocks of `2 * half` rows, each of a first and a second half.

Halves of whole tiles are moved by choosing registers, smaller ones by rolls and masks inside each tile of 8 rows.
"""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float32

TILE = 8

Rows = Float32[Array, "size key"]


def mix(first: Rows, second: Rows, half: int) -> Rows:
    """The one array in the first halves, and the other in the second ones."""
    if half < TILE:
        return jnp.where(_in_second(first, half), _tiles(second), _tiles(first)).reshape(first.shape)
    return replace(first, pick(second, half, 1), half, 1)


def add(first: Rows, second: Rows, x: Rows, half: int) -> tuple[Rows, Rows]:
    """Both arrays with `x` added, to the one in the first halves and to the other in the second ones."""
    if half < TILE:
        in_second, tiles = _in_second(x, half), _tiles(x)
        to_first, to_second = jnp.where(in_second, 0.0, tiles), jnp.where(in_second, tiles, 0.0)
        return first + to_first.reshape(x.shape), second + to_second.reshape(x.shape)
    first = replace(first, pick(first, half, 0) + pick(x, half, 0), half, 0)
    return first, replace(second, pick(second, half, 1) + pick(x, half, 1), half, 1)


def pick(x: Array, half: int, which: int) -> Array:
    """The rows of the first (0) or second halves (1), which are whole tiles."""
    size, columns = x.shape
    return x.reshape(size // (2 * half), 2, half, columns)[:, which].reshape(size // 2, columns)


def replace(x: Array, rows: Array, half: int, which: int) -> Array:
    """`x` with these rows for those that `pick` gives."""
    size, columns = x.shape
    blocks = (size // (2 * half), 1, half, columns)
    rows, rest = rows.reshape(blocks), pick(x, half, 1 - which).reshape(blocks)
    return jnp.concatenate([rows, rest] if which == 0 else [rest, rows], 1).reshape(size, columns)


def sums(x: Rows) -> Iterator[tuple[int, Rows, Rows]]:
    """For halves of 1, 2, ... `size` rows: sums from a half's start through a row, and from behind it to its end."""
    half, prefix, suffix = 1, x, jnp.zeros_like(x)
    while half < x.shape[0]:
        yield half, prefix, suffix
        first, second = _last_rows(prefix, half)
        if half < TILE:
            in_second, p, s = _in_second(x, half), _tiles(prefix), _tiles(suffix)
            prefix = jnp.where(in_second, p + first, p).reshape(x.shape)
            suffix = jnp.where(in_second, s, s + second).reshape(x.shape)
        else:
            prefix = replace(prefix, pick(prefix, half, 1) + first, half, 1)
            suffix = replace(suffix, pick(suffix, half, 0) + second, half, 0)
        half *= 2
    yield half, prefix, suffix


def gradient_of_sums(by_sums: Sequence[Rows], by_prefix: Rows, by_suffix: Rows) -> Rows:
    """The gradient by the argument of `sums`.

    Args:
        by_sums: for halves of 1, 2, ... `size / 2` rows, the gradients by the suffixes of the first halves and by the
            prefixes of the second ones.
        by_prefix: of the whole chunk.
        by_suffix: likewise.
    """
    for level in reversed(range(len(by_sums))):
        half = 1 << level
        # A half's last sum was added to all of the other half.
        by_prefix = _add_sums_of_other_halves(by_prefix, mix(by_suffix, by_prefix, half), half)
        by_suffix, by_prefix = add(by_suffix, by_prefix, by_sums[level], half)
    return by_prefix


def _tiles(x: Rows) -> Float32[Array, "tiles 8 key"]:
    return x.reshape(x.shape[0] // TILE, TILE, x.shape[1])


def _in_second(x: Rows, half: int) -> Bool[Array, "tiles 8 key"]:
    return (_row(x) & half) != 0


def _row(x: Rows) -> Array:
    # Of the tile, so that all tiles share it.
    return lax.broadcasted_iota(jnp.int32, (x.shape[0] // TILE, TILE, x.shape[1]), 1)


def _last_rows(x: Rows, half: int) -> tuple[Array, Array]:
    """The last row of each block's first half, for its second one; and of the second half, for the first one.

    Of small halves, tiles in which the rows of the other half are anything.
    """
    size, key = x.shape
    if half >= TILE:
        last = x.reshape(size // (2 * half), 2, half, key)[:, :, half - 1 :]
        first, second = (jnp.broadcast_to(last[:, i], (size // (2 * half), half, key)) for i in (0, 1))
        return first.reshape(size // 2, key), second.reshape(size // 2, key)
    tiles = _tiles(x)
    if 2 * half == TILE:
        first, second = (jnp.broadcast_to(tiles[:, row : row + 1], tiles.shape) for row in (half - 1, TILE - 1))
        return first, second
    if half > 1:  # each half's last row in both of its rows
        tiles = jnp.where(_in_second(x, 1), tiles, _roll(tiles, -1))
    return _roll(tiles, half), _roll(tiles, -half)


def _add_sums_of_other_halves(to: Rows, x: Rows, half: int) -> Rows:
    """`to`, with the sum of `x` over the other half added to each half's last row."""
    size, key = x.shape
    if half >= TILE:
        shape = (size // (2 * half), 2, half // TILE, TILE, key)
        of_halves = x.reshape(shape).sum((2, 3), keepdims=True)
        of_other = jnp.concatenate([of_halves[:, 1:], of_halves[:, :1]], 1)
        row = lax.broadcasted_iota(jnp.int32, (*shape[:2], 1, TILE, key), 3)
        to = to.reshape(shape)
        last = to[:, :, -1:] + jnp.where(row == TILE - 1, of_other, 0.0)
        return (last if half == TILE else jnp.concatenate([to[:, :, :-1], last], 2)).reshape(size, key)
    tiles, by = _tiles(x), 1
    while by < half:  # each half's sum in its last row
        tiles = tiles + _roll(tiles, by)
        by *= 2
    if 2 * half == TILE:
        tiles = _roll(tiles, half)
    else:
        tiles = jnp.where(_in_second(x, half), _roll(tiles, half), _roll(tiles, -half))
    if half > 1:
        tiles = jnp.where((_row(x) & (half - 1)) == half - 1, tiles, 0.0)
    return to + tiles.reshape(x.shape)


def _roll(x: Float32[Array, "tiles 8 key"], by: int) -> Float32[Array, "tiles 8 key"]:
    return pltpu.roll(x, by % TILE, 1)
