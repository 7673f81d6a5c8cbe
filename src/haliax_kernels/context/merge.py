# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Put together what one query found in two sets of keys."""

import jax.numpy as jnp
from jaxtyping import Array, Float32

Out = Float32[Array, "group q_pos value"]
Lse = Float32[Array, "group q_pos"]


def merge(o1: Out, lse1: Lse, o2: Out, lse2: Lse) -> tuple[Out, Lse]:
    """The output and logsumexp over both sets of keys, from those over each.

    The weights are `exp(lse - max)`, so that nothing overflows however far the two lie apart; what saw nothing
    (`lse = -inf`) has none.
    """
    highest = jnp.maximum(lse1, lse2)
    highest = jnp.where(highest == -jnp.inf, 0, highest)
    w1, w2 = jnp.exp(lse1 - highest), jnp.exp(lse2 - highest)
    total = w1 + w2
    alive = total > 0
    divisor = jnp.where(alive, total, 1)
    o = o1 * (w1 / divisor)[..., None] + o2 * (w2 / divisor)[..., None]
    return o, jnp.where(alive, highest + jnp.log(divisor), -jnp.inf)
