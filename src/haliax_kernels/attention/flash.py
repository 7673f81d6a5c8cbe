# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`flash_attention`: the public operation, on NamedArrays and any mesh."""

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import haliax
import jax
import jax.numpy as jnp
from haliax import AxisSelector, NamedArray
from haliax.axis import axis_name

from haliax_kernels.attention.backends import IMPLEMENTATIONS, Layout, Request, kernel_of
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.attention.contract import AttentionOptions
from haliax_kernels.attention.mask import read_mask
from haliax_kernels.attention.sequence import keys_beside_queries, note, ring_of, strategy_of, without_reason
from haliax_kernels.context.strategy import LAYOUTS, ContextParallel
from haliax_kernels.errors import ArgumentError, BindingError, UnsupportedOptionError
from haliax_kernels.implementations import choose, current_platform
from haliax_kernels.kernel import NamedKernel
from haliax_kernels.plan import KernelPlan
from haliax_kernels.recording import plan_notes
from haliax_kernels.ring_plan import RingPlan

logger = logging.getLogger(__name__)

SequenceLayout = Literal["contiguous", "zigzag"]


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
    sequence_layout: SequenceLayout = "contiguous",
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
    sequence_layout: SequenceLayout = "contiguous",
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
    sequence_layout: SequenceLayout = "contiguous",
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    return_lse: bool = False,
) -> NamedArray | tuple[NamedArray, NamedArray]:
    """Attention in memory linear in the sequence length: `softmax(scale * q k^T + mask) v` (Dao et al. 2022,
    algorithm 1).

    Any other axis is a loop axis: batch axes, heads. An axis of the query that key and value lack is a query group
    (grouped-query attention): keys are neither copied nor read again for it. Batch, heads and groups may be sharded
    in any way, and so may the sequence (`context_parallel`); the head size must be whole on every device. Where the
    axis mapping does not name KPos, keys are laid out as the mapping says of QPos.

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
        context_parallel: how the shards of a sharded sequence work together. `ring`: keys and values travel around
            the mesh axes. `zigzag`: likewise, with an early and a late part of the sequence on each device, so that
            under a causal mask all have the same work. `allgather`: every device gets all keys. `ulysses`: every
            device gets the whole sequence of some heads. `auto` chooses by the rule on the page "Sharded sequences";
            `error` refuses. Over several mesh axes also a mapping from each of them to its mode.
        sequence_layout: `zigzag` where position `i` of the arrays does not hold token `i`, but what
            `zigzag_layout` put there; masks and bias likewise. The output lies as the query does.
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
        ShardedAxisError: the head size is sharded, or, with `context_parallel="error"`, a position axis.
        NamedKernelError: any other refusal of the plan.
    """
    prepared = _prepare(
        QPos,
        KPos,
        Key,
        query,
        key,
        value,
        mask,
        bias=bias,
        dropout=dropout,
        prng=prng,
        scaling_factor=scaling_factor,
        logits_soft_cap=logits_soft_cap,
        attn_sink=attn_sink,
        context_parallel=context_parallel,
        sequence_layout=sequence_layout,
        implementation=implementation,
        block_sizes=block_sizes,
        return_lse=return_lse,
    )
    with keys_beside_queries(prepared.q_pos, prepared.k_pos), plan_notes(prepared.note, ring=prepared.ring):
        result = prepared.kernel(*prepared.arguments, options=prepared.options, axes=prepared.axes)
    if return_lse:
        return result[0].astype(query.dtype), result[1]
    return result.astype(query.dtype)


def flash_attention_plan(
    QPos: AxisSelector,
    KPos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: Any = None,
    **options: Any,
) -> KernelPlan:
    """The plan of a call of `flash_attention`: shardings, collectives with their bytes, how a sharded sequence is
    computed and why. Nothing runs; `print` it to see a table.

    The arguments are those of `flash_attention`; query, key and value may hold `jax.ShapeDtypeStruct`s.
    """
    prepared = _prepare(QPos, KPos, Key, query, key, value, mask, **options)
    with keys_beside_queries(prepared.q_pos, prepared.k_pos):
        plan = prepared.kernel.plan(*prepared.arguments, options=prepared.options, axes=prepared.axes)
    return plan if prepared.note is None else replace(plan, notes=(prepared.note, *plan.notes), ring=prepared.ring)


@dataclass(frozen=True)
class _Prepared:
    """A call of the named kernel."""

    kernel: NamedKernel
    arguments: tuple[Any, ...]
    options: AttentionOptions
    axes: dict[str, Any]
    q_pos: haliax.Axis
    k_pos: haliax.Axis
    note: str | None = None
    ring: RingPlan | None = None


def _prepare(
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
    sequence_layout: str = "contiguous",
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    return_lse: bool = False,
) -> _Prepared:
    q_pos, k_pos, head = axis_name(QPos), _single(KPos), axis_name(Key)
    if q_pos == k_pos:
        raise BindingError(
            f"flash_attention: QPos and KPos are both {q_pos!r}; rename the key's and value's position axis."
        )
    if sequence_layout not in LAYOUTS:
        raise ArgumentError(
            f"flash_attention: sequence_layout={sequence_layout!r} is none of {', '.join(map(repr, LAYOUTS))}."
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
    _refuse_crossed_heads(group, [a for a in key.axes if a not in query.axes and a.name not in (k_pos, head)])
    if head in (a.name for a in value.axes):
        values: tuple[str, ...] = (head,)
    else:
        others = {a.name for x in (query, key) for a in x.axes}
        values = tuple(a.name for a in value.axes if a.name not in others)
    sizes = query.axis_size(head), math.prod(value.axis_size(a) for a in values)
    request = Request(
        current_platform(), tuple(name for name, on in used.items() if on), dtype, block_sizes, max(sizes)
    )
    chosen = choose("flash_attention", IMPLEMENTATIONS, request, implementation)
    scale = scaling_factor if scaling_factor is not None else 1.0 / math.sqrt(query.axis_size(head))
    q, k, v = (x if x.dtype == dtype else x.astype(dtype) for x in (query, key, value))
    if not isinstance(scale, int | float):  # an array
        q, scale = (query * scale).astype(dtype), 1.0
    options = AttentionOptions(float(scale), parts.left, parts.right, logits_soft_cap, float(dropout), block_sizes)
    mask_array, bias_array = (_over_positions(x, (q_axis, k_axis), group) for x in (parts.explicit, bias))
    layout = Layout(return_lse, _has(mask_array, group), _has(bias_array, group))
    arguments = [q, k, v, parts.q_segment_ids, parts.k_segment_ids, mask_array, bias_array]
    arguments.append(_seeds(dropout, prng, query, (q_pos, head)))
    arguments += [None if attn_sink is None else _broadcast(attn_sink, group), parts.q_offset]
    axes = {"group": tuple(a.name for a in group), "q_pos": q_pos, "k_pos": k_pos, "key": head, "value": values}
    kernel = kernel_of(chosen, layout)
    with keys_beside_queries(q_axis, k_axis):
        plan = kernel.plan_of_inputs(*arguments, options=options, axes=axes)
    strategy, heads = strategy_of(
        plan,
        options,
        context_parallel,
        sequence_layout,
        static_offset=parts.q_offset is None,
        pairs=bias is not None or parts.explicit is not None,
    )
    if strategy is None:
        return _Prepared(kernel, tuple(arguments), options, axes, q_axis, k_axis)
    if "context_parallel" not in chosen.honours:
        chosen = choose(
            "flash_attention",
            IMPLEMENTATIONS,
            replace(request, options=(*request.options, "context_parallel")),
            implementation,
        )
    kernel = kernel_of(chosen, replace(layout, strategy=without_reason(strategy)))
    if strategy.mode != "own_queries":
        whole = f"{k_pos} (whole)"
        arguments[5:7] = [None if x is None else x.rename({k_pos: whole}) for x in arguments[5:7]]
        axes["all_keys"] = whole
    if heads is not None:
        axes["heads"] = heads
        arguments[8] = None if attn_sink is None else _broadcast(arguments[8], (query.resolve_axis(heads),))
    text = note(strategy, context_parallel)
    _log_once(f"flash_attention: {text}")
    ring = ring_of(strategy, plan, options, static_offset=parts.q_offset is None)
    return _Prepared(kernel, tuple(arguments), options, axes, q_axis, k_axis, text, ring)


def _refuse_crossed_heads(of_query: Sequence[haliax.Axis], of_key: Sequence[haliax.Axis]) -> None:
    """Query heads and key heads under two names: each query head would see each key head, which nobody means.

    Raises:
        BindingError: there are such axes.
    """
    queries, keys = ([a for a in axes if "head" in a.name] for axes in (of_query, of_key))
    if queries and keys:
        q, k = queries[0], keys[0]
        rest = q.size // k.size if q.size % k.size == 0 else "..."
        raise BindingError(
            f"flash_attention: the query has heads {q.name!r} ({q.size}) that the key lacks, and the key has "
            f"{k.name!r} ({k.size}) that the query lacks, so that each query head would attend to each key head.\n"
            f"  - grouped queries:      query.unflatten_axis({q.name!r}, (Axis({k.name!r}, {k.size}), "
            f"Axis('q_heads_per_group', {rest})))\n"
            f"  - one key head for each: rename {k.name!r} of key and value to {q.name!r}\n"
            f"  - each with each, after all: rename one of the two to a name without 'head'"
        )


@functools.cache
def _log_once(message: str) -> None:
    logger.info(message)


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
