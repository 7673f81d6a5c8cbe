# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Which attention probabilities dropout keeps: a function of the seed and the two positions, and of nothing else."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

_BITS = 24


def keep(
    seed: UInt32[Array, "..."], q_position: Int32[Array, "..."], k_position: Int32[Array, "..."], rate: float
) -> Bool[Array, "..."]:
    """Whether each probability is kept; True with probability `1 - rate`.

    No state and no blocks: forward and backward agree however they cut the scores, and so do devices that each hold a
    part of the sequence. Only the last mix is as large as the result, so give the arguments their own axes, such as
    (group, 1, 1), (1, q, 1) and (1, 1, k). Multiplications, shifts, additions and comparisons of 32 bits, all of which
    Pallas lowers on TPUs.

    Args:
        seed: of the query head.
        q_position: positions of the queries in the whole sequence.
        k_position: positions of the keys in the whole sequence.
        rate: the fraction to drop, to 24 bits; at least 0 and less than 1.

    Returns:
        The arguments' broadcast shape.
    """
    # Each position is mixed by itself first: the xor of consecutive numbers would give some rows the same bits in
    # another order.
    row = _mix(_mix(seed) ^ _mix(q_position.astype(jnp.uint32)))
    column = _mix(k_position.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
    # An unsigned comparison is not to be had everywhere; what is left of the bits has no sign.
    bits = (_mix(row ^ column) >> jnp.uint32(32 - _BITS)).astype(jnp.int32)
    return bits >= jnp.int32(round(rate * 2**_BITS))


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Wellons' `lowbias32`, a bijection of low avalanche bias (https://github.com/skeeto/hash-prospector)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
