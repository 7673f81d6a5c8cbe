# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Derivatives for any implementation's `forward` and `backward`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from haliax_kernels.linear.contract import (
    LinearGradients,
    LinearImplementation,
    LinearOperands,
    LinearOptions,
    LinearState,
)

_Y = Float[Array, "group pos value"]


def linear_attention(
    implementation: LinearImplementation, options: LinearOptions, operands: LinearOperands
) -> tuple[Float[Array, "group pos value"], LinearState]:
    """`implementation.forward`, differentiable by q, k, v, the decay and the first state; both results may be used.

    Args:
        implementation: hashable, such as a module.
        options: static.
        operands: the arrays. The segment ids get no gradient.

    Returns:
        `(y, state)`: the results, and the state after the last token.
    """
    return _linear_attention(implementation, options, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear_attention(
    implementation: LinearImplementation, options: LinearOptions, x: LinearOperands
) -> tuple[_Y, LinearState]:
    y, state, _ = implementation.forward(options, x)
    return y, state


def _fwd(
    implementation: LinearImplementation, options: LinearOptions, x: LinearOperands
) -> tuple[tuple[_Y, LinearState], tuple[LinearOperands, Any]]:
    y, state, residuals = implementation.forward(options, x, residuals=True)
    return (y, state), (x, residuals)


def _bwd(
    implementation: LinearImplementation,
    options: LinearOptions,
    saved: tuple[LinearOperands, Any],
    cotangents: tuple[_Y, LinearState],
) -> tuple[LinearOperands]:
    x, residuals = saved
    dy, dstate = cotangents
    grads = implementation.backward(options, x, residuals, dy, dstate)
    return (operand_gradients(x, grads),)


_linear_attention.defvjp(_fwd, _bwd)


def operand_gradients(x: LinearOperands, grads: LinearGradients) -> LinearOperands:
    """The gradients as the cotangents of `x`: none of the segment ids, zero of a decay whose gradient nobody wants."""
    ids = None if x.segment_ids is None else np.zeros(x.segment_ids.shape, jax.dtypes.float0)
    log_decay = grads.log_decay
    if x.log_decay is not None and log_decay is None:
        log_decay = jnp.zeros_like(x.log_decay)
    state = None if x.state is None else grads.state
    return LinearOperands(grads.q, grads.k, grads.v, log_decay, ids, state, grads.beta)  # type: ignore[arg-type]
