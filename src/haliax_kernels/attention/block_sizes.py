# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""How many query and key positions a blockwise attention kernel handles at a time."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class BlockSizes:
    """Positions per block of a blockwise attention.

    Attributes:
        q: query positions per block.
        k: key positions per block.
    """

    q: int
    k: int

    def __post_init__(self):
        for name, size in (("q", self.q), ("k", self.k)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"block_sizes.{name} must be a positive int, got {size!r}")


# The CPU's were among the fastest in forward and backward with float32, causal, 8 heads, head size 64, 1024 to 8192
# positions: larger blocks compute more that the mask hides, smaller ones are too small for the threads of a matrix
# product. The accelerators' fill their matrix units; they were not measured.
_CPU = BlockSizes(q=256, k=256)
_ACCELERATOR = BlockSizes(q=512, k=512)


def default_block_sizes(q_len: int, k_len: int, platform: str | None = None) -> BlockSizes:
    """Block sizes of the XLA attention for these lengths.

    Args:
        q_len: number of query positions.
        k_len: number of key positions.
        platform: `cpu`, `gpu` or `tpu`; by default the platform that JAX runs on.

    Returns:
        Sizes that cut each length into equal blocks, so that little padding is left to compute.
    """
    largest = _CPU if (platform or jax.default_backend()) == "cpu" else _ACCELERATOR
    return BlockSizes(q=even_block(q_len, largest.q), k=even_block(k_len, largest.k))


def even_block(length: int, largest: int, multiple: int = 8) -> int:
    """The size of equal blocks, at most `largest`, that cut `length` into as few as possible.

    Args:
        length: the length to cut.
        largest: the largest size wanted, itself a multiple of `multiple`.
        multiple: the size is rounded up to a multiple of this.

    Returns:
        A size of at least `multiple`; the last block may reach past the end of `length`.
    """
    blocks = max(1, -(-length // largest))
    size = max(1, -(-length // blocks))
    return -(-size // multiple) * multiple
