# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""One token at a time, for a decoder: the recurrence of `haliax_kernels.linear.contract` itself."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from haliax_kernels.linear.contract import LinearOptions, LinearState
from haliax_kernels.linear.xla import clamped


def step(
    options: LinearOptions,
    state: LinearState,
    q: Float[Array, "group key"],
    k: Float[Array, " key"],
    v: Float[Array, " value"],
    log_decay: Float32[Array, ""] | Float32[Array, " key"] | None = None,
    beta: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "group value"], LinearState]:
    """The result of the next token, and the state after it; the same numbers as those of the parallel form.

    `jax.vmap` it over batch and key/value heads. To start a new segment pass a state of zeros.

    Args:
        options: as for the parallel form.
        state: what the tokens before left.
        q: the token's queries, after the feature map.
        k: its key, after the feature map.
        v: its value.
        log_decay: of the token, or of each of its key channels; None for no decay.
        beta: of the token, for the delta rule.
    """
    wide_k, wide_v, decay = k.astype(jnp.float32), v.astype(jnp.float32), None
    if log_decay is not None:
        decay = jnp.exp(log_decay.astype(jnp.float32))
    s, z = state
    if decay is not None:
        s = (decay if decay.ndim == 0 else decay[:, None]) * s
    if beta is not None:
        wide_v = beta.astype(jnp.float32) * (wide_v - _dot(wide_k, s))
    s = s + wide_k[:, None] * wide_v
    y = options.scale * _dot(q, s)
    if options.normalize:
        if z is None:
            raise ValueError("state.z is missing, with options.normalize=True")
        z = (z if decay is None else decay * z) + wide_k
        y = y / clamped(options, _dot(q, z))[..., None]
    return y.astype(options.out_dtype or q.dtype), LinearState(s, z)


def _dot(q: Array, state: Array) -> Array:
    return jnp.matmul(q.astype(jnp.float32), state, precision=lax.Precision.HIGHEST)
