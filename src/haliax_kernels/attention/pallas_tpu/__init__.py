# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Blockwise attention in Pallas kernels for TPUs, under the contract of `haliax_kernels.attention.contract`.

Float32 and bfloat16, every option. `jax.vmap` over batch and key/value heads; what is not mapped is read once for all.
Offsets that are Python ints cost nothing: only visible blocks are in the kernels' grids. Traced ones should not be
mapped by `jax.vmap`, which would make a loop of kernels of it.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.contract import AttentionGradients, AttentionOperands, AttentionOptions
from haliax_kernels.attention.pallas_tpu import backward as _backward
from haliax_kernels.attention.pallas_tpu import forward as _forward
from haliax_kernels.attention.pallas_tpu.blocks import Plan
from haliax_kernels.attention.pallas_tpu.schedule import MAX_STEPS, Tiles
from haliax_kernels.attention.pallas_tpu.sizes import Sizes, block_bytes, choose
from haliax_kernels.errors import UnsupportedOptionError, bytes_text
from haliax_kernels.recording import say

__all__ = ["backward", "forward"]

# Of queries and keys, known when compiling.
Offsets = tuple[int, int] | None


def forward(
    options: AttentionOptions, x: AttentionOperands, *, interpret: bool = False
) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
    """`(o, lse)` as in `AttentionImplementation.forward`.

    Args:
        options: the static part of the call.
        x: its arrays; float32 or bfloat16.
        interpret: the call is under `pltpu.force_tpu_interpret_mode()`. Needed there under `jax.vmap` only.

    Raises:
        UnsupportedOptionError: naming the argument that the kernel cannot honour.
    """
    _check(options, x)
    group, q_len, _ = x.q.shape
    k_len, value_size = x.v.shape
    if q_len == 0 or k_len == 0:
        o = jnp.zeros((group, q_len, value_size), options.out_dtype or x.q.dtype)
        return o, jnp.full((group, q_len), -jnp.inf, jnp.float32)
    sizes = _sizes(options, x, backward=False)
    offsets, x = _static_offsets(x)
    return _forward_once(_plan(options, x, offsets, sizes), offsets, sizes.vmem, interpret, x)


def backward(
    options: AttentionOptions,
    x: AttentionOperands,
    lse: Float32[Array, "group q_pos"],
    do: Float[Array, "group q_pos value"],
    delta: Float32[Array, "group q_pos"],
    *,
    interpret: bool = False,
) -> AttentionGradients:
    """The gradients as in `AttentionImplementation.backward`, in one kernel.

    Where the sums for dk and dv of all keys do not fit in vector memory there are several kernels, for as many keys
    each as do; they add to dq in turn.

    Args:
        options: the static part of the call.
        x: its arrays.
        lse: of the forward.
        do: the gradient of `o`.
        delta: `sum(do * o, value) - dlse`.
        interpret: as in `forward`.

    Raises:
        UnsupportedOptionError: naming the argument that the kernel cannot honour.
    """
    _check(options, x)
    q_len, k_len = x.q.shape[1], x.k.shape[0]
    dtype = options.grad_dtype or x.q.dtype
    if q_len == 0 or k_len == 0:
        dq, dk, dv = (jnp.zeros(a.shape, dtype) for a in (x.q, x.k, x.v))
        return AttentionGradients(dq, dk, dv, None if x.bias is None else jnp.zeros(x.bias.shape, jnp.float32))
    sizes = _sizes(options, x, backward=True)
    starts = range(0, k_len, sizes.keys)
    dq, parts = None, []
    for start in starts:
        offsets, part = _static_offsets(_keys(x, start, min(start + sizes.keys, k_len)))
        between = jnp.dtype(dtype if len(starts) == 1 else jnp.float32)
        plan = _plan(options, part, offsets, sizes)
        found = _backward_once(plan, offsets, sizes.vmem, interpret, between, part, lse, do, delta, dq)
        dq = found.q
        parts.append(found)
    assert dq is not None
    if len(parts) == 1:
        return parts[0]
    dk, dv = (jnp.concatenate([getattr(p, name) for p in parts]) for name in ("k", "v"))
    dbias = None if x.bias is None else jnp.concatenate([p.bias for p in parts], -1)
    return AttentionGradients(dq.astype(dtype), dk, dv, dbias)


# Under jit a kernel is traced once for all calls that are the same: the steps of a ring, the layers of a model, a plan
# and the program after it. Tracing a kernel takes the better part of a second.


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _forward_once(
    plan: Plan, offsets: Offsets, vmem: int | None, interpret: bool, x: AttentionOperands
) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
    return _forward.forward(plan, _with_offsets(x, offsets), vmem, interpret)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _backward_once(
    plan: Plan,
    offsets: Offsets,
    vmem: int | None,
    interpret: bool,
    dq_dtype: jnp.dtype,
    x: AttentionOperands,
    lse: Float32[Array, "group q_pos"],
    do: Float[Array, "group q_pos value"],
    delta: Float32[Array, "group q_pos"],
    dq: Float32[Array, "group q_pos key"] | None,
) -> AttentionGradients:
    return _backward.backward(plan, _with_offsets(x, offsets), lse, do, delta, dq, dq_dtype, vmem, interpret)


def _static_offsets(x: AttentionOperands) -> tuple[Offsets, AttentionOperands]:
    """The offsets, if both are Python ints, and the operands without them."""
    if isinstance(x.q_offset, int) and isinstance(x.k_offset, int):
        return (x.q_offset, x.k_offset), x._replace(q_offset=0, k_offset=0)
    return None, x


def _with_offsets(x: AttentionOperands, offsets: Offsets) -> AttentionOperands:
    return x if offsets is None else x._replace(q_offset=offsets[0], k_offset=offsets[1])


def _keys(x: AttentionOperands, start: int, stop: int) -> AttentionOperands:
    """The operands for some of the keys."""
    if start == 0 and stop == x.k.shape[0]:
        return x
    return x._replace(
        k=x.k[start:stop],
        v=x.v[start:stop],
        k_offset=x.k_offset + start,
        k_segment_ids=None if x.k_segment_ids is None else x.k_segment_ids[start:stop],
        mask=None if x.mask is None else x.mask[:, :, start:stop],
        bias=None if x.bias is None else x.bias[:, :, start:stop],
    )


def _sizes(options: AttentionOptions, x: AttentionOperands, backward: bool) -> Sizes:
    pairs = 0 if x.mask is None else 1
    if x.bias is not None:
        pairs += x.bias.dtype.itemsize + (4 if backward else 0)
    group, q_len, _ = x.q.shape
    k_len, value_size = x.v.shape
    sizes = choose(options, group, q_len, k_len, (x.k.shape[1], value_size), x.q.dtype, pairs, backward)
    taken = block_bytes(sizes, k_len, (x.k.shape[1], value_size), x.q.dtype, pairs, backward)
    phase = "backward" if backward else "forward"
    if taken > sizes.limit:
        raise UnsupportedOptionError(
            f"block_sizes={options.block_sizes}: the {phase} kernel's blocks of {sizes.heads * sizes.q} query rows "
            f"and {sizes.k} keys take {bytes_text(taken)} of vector memory, and there are "
            f"{bytes_text(sizes.limit)}; pass smaller ones, or none for what fits."
        )
    say(
        f"pallas_tpu {phase}: blocks of {sizes.q} queries, {sizes.heads} head{'s' * (sizes.heads > 1)} at a time, and "
        f"{sizes.k} keys; {bytes_text(taken)} of {bytes_text(sizes.limit)} of vector memory, without temporaries"
    )
    blocks = -(-q_len // sizes.q) * -(-k_len // sizes.k)
    if blocks > MAX_STEPS and not (options.left is not None and options.right is not None):
        raise UnsupportedOptionError(
            f"block_sizes={options.block_sizes}: {blocks} pairs of blocks, more than the {MAX_STEPS} whose schedule "
            "fits in scalar memory; pass larger ones."
        )
    return sizes


def _plan(options: AttentionOptions, x: AttentionOperands, offsets: Offsets, sizes: Sizes) -> Plan:
    offset = None if offsets is None else offsets[0] - offsets[1]
    q_len, k_len = x.q.shape[1], x.k.shape[0]
    return Plan(
        options=replace(options, block_sizes=None),
        tiles=Tiles(q_len, k_len, sizes.q, min(sizes.k, sizes.keys), options.left, options.right, offset),
        group=x.q.shape[0],
        heads=sizes.heads,
        dtype=x.q.dtype,
        segmented=x.q_segment_ids is not None,
        mask_heads=0 if x.mask is None else x.mask.shape[0],
        bias_heads=0 if x.bias is None else x.bias.shape[0],
        chunk=sizes.chunk,
        piece=sizes.piece,
    )


def _check(options: AttentionOptions, x: AttentionOperands) -> None:
    for name, a in (("q", x.q), ("k", x.k), ("v", x.v)):
        if a.dtype not in (jnp.float32, jnp.bfloat16) or a.dtype != x.q.dtype:
            raise UnsupportedOptionError(
                f"{name}: the Pallas TPU attention takes float32 or bfloat16, the same for q, k and v, got {a.dtype}; "
                "cast it, or use implementation='xla'."
            )
    if options.dropout and x.seed is None:
        raise UnsupportedOptionError("dropout: needs seed, one for each query head")
    if (x.q_segment_ids is None) != (x.k_segment_ids is None):
        raise UnsupportedOptionError("q_segment_ids and k_segment_ids must be given together")
