# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Which attention probabilities are dropped: a hash of the seed and of the two positions.

It depends on nothing else, so that every implementation, block size and way of cutting the sequence drops the same.
The mixing is the 32-bit finalizer of MurmurHash3 (Appleby 2011, https://github.com/aappleby/smhasher, public domain):
twice for each query, and once more for each pair of query and key. Only products, shifts and exclusive ors of 32-bit
integers are used, which every platform's kernels have.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, UInt32

# 2**32 divided by the golden ratio, and by the square root of 3: odd multipliers that spread neighbouring positions.
_Q_STEP = 0x9E3779B1
_K_STEP = 0x93CD3A2D


def keep(
    seed: UInt32[Array, "*#shape"], q_position: Int[Array, "*#shape"], k_position: Int[Array, "*#shape"], rate: float
) -> Bool[Array, "*shape"]:
    """Whether the probability of each pair of positions is kept.

    Args:
        seed: of the query head.
        q_position: absolute, offsets included.
        k_position: absolute, offsets included.
        rate: the fraction to drop.
    """
    return keep_of_row(row_hash(seed, q_position), k_position, rate)


def row_hash(seed: UInt32[Array, "*#shape"], q_position: Int[Array, "*#shape"]) -> Int32[Array, "*shape"]:
    """The part of the hash that is the same for all keys of a query."""
    position = jnp.asarray(q_position).astype(jnp.int32)
    return mix(lax.bitcast_convert_type(jnp.asarray(seed), jnp.int32) ^ mix(position * _signed(_Q_STEP)))


def keep_of_row(
    hashed: Int32[Array, "*#shape"], k_position: Int[Array, "*#shape"], rate: float
) -> Bool[Array, "*shape"]:
    """`keep`, from `row_hash`."""
    bits = mix(hashed ^ (jnp.asarray(k_position).astype(jnp.int32) * _signed(_K_STEP)))
    # 31 bits, which compare alike as signed and unsigned.
    return lax.shift_right_logical(bits, jnp.full_like(bits, 1)) >= round(rate * 2**31)


def mix(x: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """MurmurHash3's finalizer, on int32: a bijection in which every bit depends on every bit."""
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        x = x ^ lax.shift_right_logical(x, jnp.full_like(x, shift))
        if multiplier is not None:
            x = x * _signed(multiplier)
    return x


def _signed(x: int) -> jnp.ndarray:
    return jnp.int32(x - 2**32 if x >= 2**31 else x)
