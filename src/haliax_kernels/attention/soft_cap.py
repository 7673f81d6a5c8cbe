# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The derivative of a soft cap."""

import jax.numpy as jnp
from jaxtyping import Array, Float32


def tanh_slope(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """The derivative of tanh, as `4 e / (1 + e)^2` with `e = exp(-2 |x|)`.

    Where tanh is near 1, `1 - tanh(x)^2` would be the rounding of tanh.
    """
    e = jnp.exp(-2 * jnp.abs(x))
    return 4 * e / ((1 + e) * (1 + e))
