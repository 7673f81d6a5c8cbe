# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Block sizes that fill the matrix units and fit in vector memory."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from haliax_kernels.attention.block_sizes import BlockSizes, even_block
from haliax_kernels.attention.contract import AttentionOptions
from haliax_kernels.implementations import current_device_kind

_LANES, _SUBLANES = 128, 16
_MIB = 2**20
# Vector memory of one TensorCore. The compiler lets a kernel have 16 MiB of it unless asked for more.
_VMEM = {"v5 lite": 128, "v5e": 128, "v6": 128, "v5": 64, "v4": 16}
_SURE = 16 * _MIB


@dataclass(frozen=True)
class Sizes:
    """How a kernel cuts its work.

    Attributes:
        q: query positions per block.
        k: key positions per block.
        heads: query heads per block.
        chunk: rows that are computed together.
        piece: keys that are computed together.
        keys: how many keys one backward kernel takes at most.
        vmem: bytes of vector memory to ask the compiler for; None for its default.
    """

    q: int
    k: int
    heads: int
    chunk: int
    piece: int
    keys: int
    vmem: int | None

    @property
    def limit(self) -> int:
        """Bytes of vector memory that the compiler lets the kernel have."""
        return self.vmem or _SURE


def vector_memory() -> int:
    """Bytes that a kernel may use: those of the chip the call runs on; what every TPU has where that is unknown."""
    kind = current_device_kind().lower()
    return next((m * _MIB * 3 // 4 for name, m in _VMEM.items() if name in kind and m > 16), _SURE)


def choose(
    options: AttentionOptions,
    group: int,
    q_len: int,
    k_len: int,
    sizes: tuple[int, int],
    dtype: Any,
    pairs: int,
    backward: bool,
) -> Sizes:
    """Sizes for a call.

    Args:
        options: of the call.
        group: number of query heads.
        q_len: number of query positions.
        k_len: number of key positions.
        sizes: of keys and values.
        dtype: of q, k and v.
        pairs: bytes that mask and bias have per pair of query and key in a block.
        backward: for the backward kernel.
    """
    budget = vector_memory()
    wide = dtype == jnp.float32 or pairs or max(sizes) > _LANES
    if options.block_sizes is None:
        largest = BlockSizes(512, 512) if wide else BlockSizes(1024, 1024)
    else:
        largest = options.block_sizes
    q = _positions(q_len, largest.q)
    k = even_block(k_len, -(-largest.k // _LANES) * _LANES, _LANES)
    if options.block_sizes is None and q_len > q and k_len > k and q != k and abs(q_len - k_len) <= max(q, k):
        q = k = max(q, k)
    heads = max(h for h in range(1, group + 1) if group % h == 0 and h * q <= max(largest.q, 1024, q) + _LANES)
    if pairs and heads > 1:
        heads = max(h for h in range(1, heads + 1) if group % h == 0 and h * q <= max(512, q))
    per_key = 4 * sum(-(-size // _LANES) * _LANES for size in sizes)
    room = budget // 2 if budget > _SURE else 6 * _MIB
    keys = max(1, room // per_key // k) * k
    return Sizes(q, k, heads, 512 if backward else 256, 512, keys, budget if budget > _SURE else None)


def _positions(length: int, largest: int) -> int:
    """Query positions per block: a multiple of 128, or a power of 2 below it."""
    if min(length, largest) > _LANES // 2:
        return even_block(length, -(-largest // _LANES) * _LANES, _LANES)
    size = _SUBLANES
    while size < min(length, largest):
        size *= 2
    return size


def block_bytes(sizes: Sizes, k_len: int, head_sizes: tuple[int, int], dtype: Any, pairs: int, backward: bool) -> int:
    """Bytes of vector memory that a kernel's blocks, each twice, and its sums take, without what it computes with.

    Args:
        sizes: of the kernel.
        k_len: number of key positions.
        head_sizes: of keys and values.
        dtype: of q, k and v.
        pairs: bytes that mask and bias have per pair of query and key in a block.
        backward: for the backward kernel.
    """
    key, value = (-(-size // _LANES) * _LANES for size in head_sizes)
    item, rows = jnp.dtype(dtype).itemsize, sizes.heads * sizes.q
    keys = min(sizes.keys, -(-k_len // sizes.k) * sizes.k)
    if backward:
        # q, do, dq; k, v and their gradients; lse and delta
        blocks = item * (rows * (2 * key + value) + 2 * sizes.k * (key + value)) + 2 * 4 * rows
        sums = 4 * (rows * key + keys * (key + value))
    else:
        blocks = item * (rows + sizes.k) * (key + value) + 4 * rows
        sums = 4 * rows * (2 * _LANES + value)
    return 2 * (blocks + pairs * sizes.q * sizes.k) + sums
