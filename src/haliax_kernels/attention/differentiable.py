# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Derivatives for any implementation's pair of `forward` and `backward`, and the attention sink."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from haliax_kernels.attention.contract import AttentionImplementation, AttentionOperands, AttentionOptions

_O = Float[Array, "group q_pos value"]
_Lse = Float32[Array, "group q_pos"]
_Offsets = tuple[int | None, int | None]


def attention(
    implementation: AttentionImplementation,
    options: AttentionOptions,
    operands: AttentionOperands,
    sink: Float[Array, " group"] | None = None,
) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
    """`implementation.forward`, differentiable by q, k, v, bias and sink; `o` and `lse` may stand in one loss.

    A sink is a further logit of each query head that takes part in the softmax's denominator and has no value (Xiao et
    al. 2023, https://arxiv.org/abs/2309.17453; learned as in gpt-oss). A query that sees nothing else has `o = 0` and
    `lse = sink`.

    Args:
        implementation: hashable, such as a module.
        options: static; `grad_dtype` has no effect, since a gradient has the dtype of what it is the gradient of.
        operands: the arrays. Integers and booleans get no gradient.
        sink: the logits, neither scaled, capped nor dropped.

    Returns:
        `(o, lse)`, `lse` with the sink in it. The implementation's own are named `flash_attention_out` and
        `flash_attention_lse` for the policies of `jax.checkpoint`.
    """
    # Python ints stay what they are: as traced scalars an implementation could no longer decide by them.
    static = _static_offset(operands.q_offset), _static_offset(operands.k_offset)
    o, lse = cast(tuple[_O, _Lse], _attention(implementation, options, static, _without_offsets(operands, static)))
    return (o, lse) if sink is None else _with_sink(o, lse, sink.astype(jnp.float32)[:, None])


def _with_sink(o: _O, lse: _Lse, sink: Float32[Array, "group 1"]) -> tuple[_O, _Lse]:
    """What the softmax over one more logit would have given."""
    dead = lse == -jnp.inf
    # In a dead row everything below stays finite, or the gradient of what `where` leaves out would be NaN.
    alive_lse = jnp.where(dead, 0, lse)
    total = jnp.logaddexp(alive_lse, sink)
    share = jnp.exp(alive_lse - total)
    new_o = jnp.where(dead[..., None], 0, o * share[..., None]).astype(o.dtype)
    return new_o, jnp.where(dead, sink, total)


def _static_offset(offset: Int32[Array, ""] | int) -> int | None:
    return offset if isinstance(offset, int) else None


def _without_offsets(x: AttentionOperands, static: _Offsets) -> AttentionOperands:
    """The operands without what is static; the annotations of the fields do not know the gap."""
    q_offset, k_offset = (
        x if fixed is None else None for x, fixed in zip((x.q_offset, x.k_offset), static, strict=True)
    )
    return x._replace(q_offset=cast(Any, q_offset), k_offset=cast(Any, k_offset))


def _with_offsets(x: AttentionOperands, static: _Offsets) -> AttentionOperands:
    q_offset, k_offset = (
        x if fixed is None else fixed for x, fixed in zip((x.q_offset, x.k_offset), static, strict=True)
    )
    return x._replace(q_offset=q_offset, k_offset=k_offset)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    implementation: AttentionImplementation, options: AttentionOptions, static: _Offsets, x: AttentionOperands
) -> tuple[_O, _Lse]:
    return implementation.forward(options, _with_offsets(x, static))


def _attention_fwd(
    implementation: AttentionImplementation, options: AttentionOptions, static: _Offsets, x: AttentionOperands
) -> tuple[tuple[_O, _Lse], tuple[AttentionOperands, _O, _Lse]]:
    o, lse = implementation.forward(options, _with_offsets(x, static))
    o, lse = checkpoint_name(o, "flash_attention_out"), checkpoint_name(lse, "flash_attention_lse")
    return (o, lse), (x, o, lse)


def _attention_bwd(
    implementation: AttentionImplementation,
    options: AttentionOptions,
    static: _Offsets,
    residuals: tuple[AttentionOperands, _O, _Lse],
    cotangents: tuple[_O, _Lse],
) -> tuple[Any]:
    x, o, lse = residuals
    do, dlse = cotangents
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1) - dlse
    options = dataclasses.replace(options, grad_dtype=None)
    grads = implementation.backward(options, _with_offsets(x, static), lse, do, delta)
    no_gradient: dict[str, Any] = dict.fromkeys(AttentionOperands._fields)
    bias = None if x.bias is None or grads.bias is None else grads.bias.astype(x.bias.dtype)
    return (AttentionOperands(**(no_gradient | {"q": grads.q, "k": grads.k, "v": grads.v, "bias": bias})),)


_attention.defvjp(_attention_fwd, _attention_bwd)
