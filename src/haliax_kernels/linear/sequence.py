# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Linear attention on the shards of a sequence, inside any `shard_map`: the recipe of `state` with its derivatives.

Each shard finds what its tokens do to a state, all exchange these, and each goes on from the state that its first
token sees. What a device sends is a decay and a state for each head, whatever the length.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from haliax_kernels.collectives import exclusive_prefix, exclusive_suffix, shard_count, shard_index
from haliax_kernels.linear.contract import LinearImplementation, LinearOperands, LinearOptions, LinearState
from haliax_kernels.linear.differentiable import operand_gradients
from haliax_kernels.linear.state import compose, entering, gradient_summary, identity, summary
from haliax_kernels.mesh import MeshAxes

_Y = Float[Array, "group pos value"]
# TPUs transfer while they compute in permutes; and no number of shards has to receive more in them than in a gather.
_METHOD: Literal["log"] = "log"


def sharded_linear_attention(
    implementation: LinearImplementation,
    options: LinearOptions,
    x: LinearOperands,
    mesh_axes: MeshAxes,
    *,
    want_state: bool,
) -> tuple[Float[Array, "group pos value"], LinearState | None]:
    """`differentiable.linear_attention`, on the tokens of one shard.

    Args:
        implementation: hashable, such as a module.
        options: static.
        x: the shard's own tokens; the same first state on every shard.
        mesh_axes: the mesh axes that shard the sequence, the major one first.
        want_state: whether the state after the last token of all is wanted, which every shard then gets.

    Returns:
        `(y, state)`. The gradient by what every shard has alike, such as the first state, is a part that the shards'
        sum makes whole; the cotangent of `state` likewise adds up over the shards.

    Raises:
        UnsupportedOptionError: the delta rule.
    """
    return _sharded(implementation, options, mesh_axes, want_state, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _sharded(
    implementation: LinearImplementation,
    options: LinearOptions,
    mesh_axes: MeshAxes,
    want_state: bool,
    x: LinearOperands,
) -> tuple[_Y, LinearState | None]:
    y, last, _ = implementation.forward(options, _from_the_shards_before(options, mesh_axes, x))
    return y, _of_last_shard(last, mesh_axes) if want_state else None


def _fwd(
    implementation: LinearImplementation,
    options: LinearOptions,
    mesh_axes: MeshAxes,
    want_state: bool,
    x: LinearOperands,
) -> tuple[tuple[_Y, LinearState | None], tuple[LinearOperands, LinearState | None, Any]]:
    inner = _from_the_shards_before(options, mesh_axes, x)
    y, last, residuals = implementation.forward(options, inner, residuals=True)
    return (y, _of_last_shard(last, mesh_axes) if want_state else None), (inner, x.state, residuals)


def _bwd(
    implementation: LinearImplementation,
    options: LinearOptions,
    mesh_axes: MeshAxes,
    want_state: bool,
    saved: tuple[LinearOperands, LinearState | None, Any],
    cotangents: tuple[_Y, LinearState | None],
) -> tuple[LinearOperands]:
    x, first_state, residuals = saved
    dy, dstate = cotangents
    own = gradient_summary(options, x, residuals, dy)
    behind = exclusive_suffix(lambda a, b: compose(b, a), own, identity(options, x), mesh_axes, method=_METHOD)
    # Each shard holds a part of the last state's cotangent.
    dstate = jax.tree.map(lambda a: lax.psum(a, mesh_axes), dstate)
    grads = implementation.backward(options, x, residuals, dy, entering(behind, dstate, own.segments))
    first = shard_index(mesh_axes) == 0
    state = jax.tree.map(lambda a: jnp.where(first, a, 0), grads.state)
    return (operand_gradients(x._replace(state=first_state), grads._replace(state=state)),)


_sharded.defvjp(_fwd, _bwd)


def _from_the_shards_before(options: LinearOptions, mesh_axes: MeshAxes, x: LinearOperands) -> LinearOperands:
    own = summary(options, x)
    before = exclusive_prefix(compose, own, identity(options, x), mesh_axes, method=_METHOD)
    return x._replace(state=entering(before, x.state, own.segments))


def _of_last_shard(state: LinearState, mesh_axes: MeshAxes) -> LinearState:
    last = shard_index(mesh_axes) == shard_count(mesh_axes) - 1
    return jax.tree.map(lambda a: lax.psum(jnp.where(last, a, 0), mesh_axes), state)
