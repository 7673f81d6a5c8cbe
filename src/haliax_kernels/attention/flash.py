# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`flash_attention`: the public operation, on NamedArrays and any mesh."""

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import haliax
import jax
import jax.numpy as jnp
from haliax import AxisSelector, NamedArray
from haliax.axis import axis_name

from haliax_kernels.attention.backends import Layout, Request, choose, current_platform, kernel_of
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.attention.contract import AttentionOptions
from haliax_kernels.attention.mask import read_mask
from haliax_kernels.errors import ArgumentError, BindingError, UnsupportedOptionError

ContextParallel = Literal["auto", "error"]


@overload
def flash_attention(
    QPos: AxisSelector,
    KPos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: Any = None,
    *,
    bias: NamedArray | None = None,
    dropout: float = 0.0,
    prng: Any = None,
    scaling_factor: Any = None,
    logits_soft_cap: float | None = None,
    attn_sink: NamedArray | None = None,
    context_parallel: ContextParallel = "auto",
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    return_lse: Literal[False] = False,
) -> NamedArray: ...


@overload
def flash_attention(
    QPos: AxisSelector,
    KPos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: Any = None,
    *,
    bias: NamedArray | None = None,
    dropout: float = 0.0,
    prng: Any = None,
    scaling_factor: Any = None,
    logits_soft_cap: float | None = None,
    attn_sink: NamedArray | None = None,
    context_parallel: ContextParallel = "auto",
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    return_lse: Literal[True],
) -> tuple[NamedArray, NamedArray]: ...


def flash_attention(
    QPos: AxisSelector,
    KPos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: Any = None,
    *,
    bias: NamedArray | None = None,
    dropout: float = 0.0,
    prng: Any = None,
    scaling_factor: Any = None,
    logits_soft_cap: float | None = None,
    attn_sink: NamedArray | None = None,
    context_parallel: ContextParallel = "auto",
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    return_lse: bool = False,
) -> NamedArray | tuple[NamedArray, NamedArray]:
    """Attention in memory linear in the sequence length: `softmax(scale * q k^T + mask) v` (Dao et al. 2022,
    algorithm 1).

    Any other axis is a loop axis: batch axes, heads. An axis of the query that key and value lack is a query group
    (grouped-query attention): keys are neither copied nor read again for it. Batch, heads and groups may be sharded
    in any way; the sequence and the head size must be whole on every device.

    Args:
        QPos: the query's position axis.
        KPos: the key's position axis; its name differs from QPos'.
        Key: the head axis that query and key share.
        query: {QPos, Key, ...}; float32, bfloat16 or float16.
        key: {KPos, Key, ...}.
        value: {KPos, Value, ...}, where Value is Key itself, or the axes that only value has.
        mask: None, a boolean NamedArray, an `AttentionMask`, or Levanter's.
        bias: added to the scaled logits, with any of the position, loop and group axes; differentiable.
        dropout: the fraction of the probabilities that are dropped. Which ones depends on `prng` and on the positions
            only, not on the sharding or on block sizes.
        prng: the key for dropout, needed with it: a typed key or a raw one.
        scaling_factor: what the logits are multiplied by; 1/sqrt(Key size) by default.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`, after the bias and before the mask.
        attn_sink: logits that take part in the softmax and have no value, with any of the loop and group axes;
            differentiable.
        context_parallel: what to do when a position axis is sharded: `auto` and `error` both refuse it in this
            version.
        implementation: `pallas_tpu` (our kernel, on TPU), `splash` (JAX's, on TPU), `pallas_gpu` (our kernel, on
            NVIDIA GPUs), `xla` (blockwise, everywhere), or None for the best that honours the arguments.
        block_sizes: positions per block; by default what suits the platform.
        return_lse: also return the logsumexp of the masked, scaled logits.

    Returns:
        {loop axes, group axes, QPos, Value} in query's dtype; with `return_lse` also {loop axes, group axes, QPos} in
        float32. A query that sees no key gets zeros, and an lse of -inf.

    Raises:
        UnsupportedOptionError: an option that no implementation, or not the forced one, honours. Also a
            NotImplementedError.
        ShardedAxisError: a position axis or the head size is sharded.
        NamedKernelError: any other refusal of the plan.
    """
    q_pos, k_pos, head = axis_name(QPos), _single(KPos), axis_name(Key)
    if q_pos == k_pos:
        raise BindingError(
            f"flash_attention: QPos and KPos are both {q_pos!r}; rename the key's and value's position axis."
        )
    if context_parallel not in ("auto", "error"):
        raise UnsupportedOptionError(
            f"flash_attention: context_parallel={context_parallel!r} is not supported yet; 'auto' and 'error' refuse "
            "a sharded sequence."
        )
    q_axis, k_axis = query.resolve_axis(q_pos), key.resolve_axis(k_pos)
    parts = read_mask(mask, q_axis, k_axis)
    dtype = jnp.result_type(query.dtype, key.dtype, value.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ArgumentError(f"flash_attention: query, key and value must be floating-point, but together are {dtype}.")
    used = {
        "bias": bias is not None,
        "dropout": dropout != 0.0,
        "logits_soft_cap": logits_soft_cap is not None,
        "attn_sink": attn_sink is not None,
        "return_lse": return_lse,
        "explicit mask": parts.explicit is not None,
        "causal_offset": parts.q_offset is not None or parts.right not in (None, 0),
        "sliding_window": parts.left is not None,
    }
    shared = {a.name for x in (key, value, parts.q_segment_ids, parts.k_segment_ids) if x is not None for a in x.axes}
    group = tuple(a for a in query.axes if a.name not in shared and a.name not in (q_pos, head))
    if head in (a.name for a in value.axes):
        values: tuple[str, ...] = (head,)
    else:
        others = {a.name for x in (query, key) for a in x.axes}
        values = tuple(a.name for a in value.axes if a.name not in others)
    sizes = query.axis_size(head), math.prod(value.axis_size(a) for a in values)
    request = Request(
        current_platform(), tuple(name for name, on in used.items() if on), dtype, block_sizes, max(sizes)
    )
    chosen = choose(request, implementation)
    scale = scaling_factor if scaling_factor is not None else 1.0 / math.sqrt(query.axis_size(head))
    q, k, v = (x.astype(dtype) for x in (query, key, value))
    if not isinstance(scale, int | float):  # an array
        q, scale = (query * scale).astype(dtype), 1.0
    options = AttentionOptions(float(scale), parts.left, parts.right, logits_soft_cap, float(dropout), block_sizes)
    mask_array, bias_array = (_over_positions(x, (q_axis, k_axis), group) for x in (parts.explicit, bias))
    layout = Layout(return_lse, *(_has(x, group) for x in (mask_array, bias_array)))
    result = kernel_of(chosen, layout)(
        q,
        k,
        v,
        parts.q_segment_ids,
        parts.k_segment_ids,
        mask_array,
        bias_array,
        _seeds(dropout, prng, query, (q_pos, head)),
        None if attn_sink is None else _broadcast(attn_sink, group),
        parts.q_offset,
        options=options,
        axes={"group": tuple(a.name for a in group), "q_pos": q_pos, "k_pos": k_pos, "key": head, "value": values},
    )
    if return_lse:
        return result[0].astype(query.dtype), result[1]
    return result.astype(query.dtype)


def _broadcast(x: NamedArray, axes: Sequence[haliax.Axis]) -> NamedArray:
    """`x` with those of `axes` that it lacks."""
    own = {a.name for a in x.axes}
    return x.broadcast_axis(tuple(a for a in axes if a.name not in own))


def _has(x: NamedArray | None, group: Sequence[haliax.Axis]) -> bool:
    return x is not None and any(a.name in {b.name for b in group} for a in x.axes)


def _over_positions(
    x: NamedArray | None, positions: Sequence[haliax.Axis], group: Sequence[haliax.Axis]
) -> NamedArray | None:
    """`x` with both position axes, and with all group axes or none."""
    if x is None:
        return None
    return _broadcast(x, (*positions, *(group if _has(x, group) else ())))


def _seeds(dropout: float, prng: Any, query: NamedArray, without: Sequence[str]) -> NamedArray | None:
    """Where the dropout of each query head begins: drawn for the whole arrays, so that no sharding changes them.

    Raises:
        ArgumentError: dropout without a key, or a fraction that is none.
    """
    if dropout == 0.0:
        return None
    if not 0.0 < dropout < 1.0:
        raise ArgumentError(f"flash_attention: dropout={dropout} is no fraction from 0 to less than 1.")
    if prng is None:
        raise ArgumentError(f"flash_attention: dropout={dropout} needs a key: prng=jax.random.key(...).")
    axes = tuple(a for a in query.axes if a.name not in without)
    return haliax.named(jax.random.bits(prng, [a.size for a in axes], jnp.uint32), axes)


def _single(selection: Any) -> str:
    if isinstance(selection, str | haliax.Axis):
        return axis_name(selection)
    names = [axis_name(a) for a in selection]
    if len(names) != 1:
        raise UnsupportedOptionError(f"flash_attention: KPos must be one axis, but is {names}.")
    return names[0]
