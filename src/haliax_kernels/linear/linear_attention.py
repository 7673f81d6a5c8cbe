# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`linear_attention`: the public operation, on NamedArrays and any mesh."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

from haliax import AxisSelector, NamedArray
from haliax.axis import axis_name

from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.implementations import choose, current_platform
from haliax_kernels.kernel import NamedKernel
from haliax_kernels.linear.backends import IMPLEMENTATIONS, Layout, Request, kernel_of, step_kernel_of
from haliax_kernels.linear.call import Call, LinearAttentionState
from haliax_kernels.linear.contract import LinearOptions
from haliax_kernels.linear.feature_maps import FeatureMap
from haliax_kernels.plan import KernelPlan


@overload
def linear_attention(
    Pos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    *,
    feature_map: FeatureMap = "elu+1",
    decay: NamedArray | float | None = None,
    gate: NamedArray | None = None,
    beta: NamedArray | None = None,
    normalize: bool = True,
    scaling_factor: float = 1.0,
    epsilon: float = 1e-12,
    initial_state: LinearAttentionState | None = None,
    return_state: Literal[False] = False,
    segment_ids: NamedArray | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> NamedArray: ...


@overload
def linear_attention(
    Pos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    *,
    feature_map: FeatureMap = "elu+1",
    decay: NamedArray | float | None = None,
    gate: NamedArray | None = None,
    beta: NamedArray | None = None,
    normalize: bool = True,
    scaling_factor: float = 1.0,
    epsilon: float = 1e-12,
    initial_state: LinearAttentionState | None = None,
    return_state: Literal[True],
    segment_ids: NamedArray | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[NamedArray, LinearAttentionState]: ...


def linear_attention(
    Pos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    *,
    feature_map: FeatureMap = "elu+1",
    decay: NamedArray | float | None = None,
    gate: NamedArray | None = None,
    beta: NamedArray | None = None,
    normalize: bool = True,
    scaling_factor: float = 1.0,
    epsilon: float = 1e-12,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
    segment_ids: NamedArray | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> NamedArray | tuple[NamedArray, LinearAttentionState]:
    """Causal attention without a softmax, in time and memory linear in the sequence length.

    With a state S (and z) for each head, token by token, where q and k are query and key after the feature map

        S_t = decay_t * S_{t-1} + k_t^T value_t,   z_t = decay_t * z_{t-1} + k_t
        result_t = scaling_factor * q_t S_t / (q_t . z_t)          without the quotient if normalize is False

    (Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, equations 16 to 20, with a decay; the papers of each
    decay are named in `haliax_kernels.linear.contract`.) It is computed in chunks, and `linear_attention_step` gives
    the same results token by token.

    Any other axis is a loop axis: batch axes, heads. An axis that only the query has is a query group: the heads of a
    group share one state. Batch, heads, groups and the sequence may be sharded in any way; shards of the sequence
    exchange states, which are as large for a long sequence as for a short one. The head sizes must be whole on every
    device.

    Args:
        Pos: the position axis of query, key and value.
        Key: the head axis that query and key share.
        query: {Pos, Key, ...}; float32, bfloat16 or float16.
        key: {Pos, Key, ...}.
        value: {Pos, Value, ...}, where Value is Key itself, or the axes that only value has.
        feature_map: what queries and keys go through: `elu+1`, `relu`, `identity`, `exp` (with the largest element
            subtracted; needs `normalize`), or a function of one array whose last axis is Key, applied to both.
        decay: a constant decay from 0 to 1, a number or with any loop axes: RetNet, Lightning attention.
        gate: the logarithm, at most 0, of the decay of each token, {Pos, ...} (Mamba-2, simple GLA), or of each token
            and key channel, {Pos, Key, ...} (GLA). With `decay` the two are multiplied.
        beta: {Pos, ...}, for the gated delta rule, from 0 to 1: the state is corrected towards the value instead of
            added to. Keys should have length 1. Not with `normalize`, nor where the sequence is sharded.
        normalize: whether results are divided by `q_t . z_t`.
        scaling_factor: what results are multiplied by.
        epsilon: the least size of the normaliser.
        initial_state: the state before the first token; zero by default.
        return_state: also return the state after the last token.
        segment_ids: {Pos, ...} integers; where the id changes, the state starts anew.
        chunk_size: tokens per chunk, a power of 2 up to 256; by default what suits shapes and platform.
        implementation: `pallas_tpu` (our kernel, on TPU), `pallas_gpu` (our kernel, on NVIDIA GPUs), `xla`
            (everywhere), or None for the best that honours the arguments.

    Returns:
        {loop axes, group axes, Pos, Value} in query's dtype; with `return_state` also the state. Both have gradients
        by query, key, value, decay, gate, beta and the initial state.

    Raises:
        ArgumentError: arguments that contradict each other.
        UnsupportedOptionError: an argument that no implementation, or not the forced one, honours.
        ShardedAxisError: a head size is sharded.
        NamedKernelError: any other refusal of the plan.
    """
    prepared = _prepare(
        Pos,
        Key,
        query,
        key,
        value,
        feature_map=feature_map,
        decay=decay,
        gate=gate,
        beta=beta,
        normalize=normalize,
        scaling_factor=scaling_factor,
        epsilon=epsilon,
        initial_state=initial_state,
        return_state=return_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    found = prepared.kernel(*prepared.arguments, **prepared.keywords)
    if not return_state:
        return found.astype(query.dtype)
    return found[0].astype(query.dtype), _state(prepared.layout, found[1:])


def linear_attention_plan(
    Pos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    **options: Any,
) -> KernelPlan:
    """The plan of a call of `linear_attention`: shardings and collectives with their bytes. Nothing runs.

    The arguments are those of `linear_attention`; query, key and value may hold `jax.ShapeDtypeStruct`s.
    """
    prepared = _prepare(Pos, Key, query, key, value, **options)
    return prepared.kernel.plan(*prepared.arguments, **prepared.keywords)


def linear_attention_step(
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    state: LinearAttentionState | None = None,
    *,
    feature_map: FeatureMap = "elu+1",
    decay: NamedArray | float | None = None,
    gate: NamedArray | None = None,
    beta: NamedArray | None = None,
    normalize: bool = True,
    scaling_factor: float = 1.0,
    epsilon: float = 1e-12,
) -> tuple[NamedArray, LinearAttentionState]:
    """The result of the next token and the state after it, for a decoder: `linear_attention` one token at a time.

    Args:
        Key: as in `linear_attention`, whose arguments the others are too, without the position axis.
        query: {Key, ...} of the token.
        key: {Key, ...}.
        value: {Value, ...}.
        state: what the tokens before left; None before the first one.
        feature_map: as there; the options must be those of the parallel call.
        decay: as there.
        gate: {...}, or {Key, ...}.
        beta: {...}.
        normalize: as there.
        scaling_factor: as there.
        epsilon: as there.

    Returns:
        {loop axes, group axes, Value} in query's dtype, and the state.

    Raises:
        ArgumentError: arguments that contradict each other.
        NamedKernelError: a refusal of the plan.
    """
    call = Call.of(
        "linear_attention_step", None, Key, query, key, value, feature_map, decay, gate, beta, normalize, state
    )
    layout = call.layout(return_state=True)
    options = LinearOptions(scaling_factor, normalize, epsilon)
    arguments = (*call.qkv, call.log_decay, *call.state, beta)
    found = step_kernel_of(layout)(*arguments, options=options, feature_map=feature_map, axes=call.axes)
    return found[0].astype(query.dtype), _state(layout, found[1:])


@dataclass(frozen=True)
class _Prepared:
    """A call of the named kernel."""

    kernel: NamedKernel
    layout: Layout
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def _prepare(
    Pos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    *,
    feature_map: FeatureMap = "elu+1",
    decay: NamedArray | float | None = None,
    gate: NamedArray | None = None,
    beta: NamedArray | None = None,
    normalize: bool = True,
    scaling_factor: float = 1.0,
    epsilon: float = 1e-12,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
    segment_ids: NamedArray | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> _Prepared:
    call = Call.of(
        "linear_attention", Pos, Key, query, key, value, feature_map, decay, gate, beta, normalize, initial_state,
        segment_ids,
    )  # fmt: skip
    used = {"gate per channel": call.decay == "channel", "beta": beta is not None}
    request = Request(
        current_platform(),
        tuple(name for name, on in used.items() if on),
        call.qkv[0].dtype,
        max(query.axis_size(axis_name(Key)), math.prod(value.axis_size(a) for a in call.axes["value"])),
        chunk_size,
    )
    chosen = choose("linear_attention", IMPLEMENTATIONS, request, implementation)
    differentiable = isinstance(decay, NamedArray) or gate is not None
    options = LinearOptions(scaling_factor, normalize, epsilon, chunk_size, decay_gradient=differentiable)
    arguments = (*call.qkv, call.log_decay, segment_ids, *call.state, beta)
    keywords = {"options": options, "feature_map": feature_map, "axes": call.axes}
    layout = call.layout(return_state=return_state)
    pos = call.axes["pos"]
    plan = kernel_of(chosen, layout).plan_of_inputs(*arguments, **keywords)
    axis = next(a for a in plan.inputs[0].axes if a.core == "pos")
    if plan.several(axis.mesh_axes):
        if beta is not None:
            over = ", ".join(map(repr, plan.several(axis.mesh_axes)))
            raise UnsupportedOptionError(
                f"linear_attention: beta, the delta rule, needs the whole sequence on every device, but {pos!r} is "
                f"sharded over mesh axis {over}. Keep it whole: {{**mapping, {pos!r}: None}}, and shard the batch or "
                "the heads instead."
            )
        layout = replace(layout, sharded=True)
    return _Prepared(kernel_of(chosen, layout), layout, arguments, keywords)


def _state(layout: Layout, found: Any) -> LinearAttentionState:
    s, *rest = found
    z = rest.pop(0) if layout.normalize else None
    return LinearAttentionState(s, z, rest.pop(0) if layout.shifted else None)
