# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`linear_attention`: the public operation, on NamedArrays and any mesh."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, overload

import haliax
import jax.numpy as jnp
from haliax import AxisSelector, NamedArray
from haliax.axis import axis_name

from haliax_kernels.errors import ArgumentError, UnsupportedOptionError
from haliax_kernels.implementations import choose, current_platform
from haliax_kernels.kernel import NamedKernel
from haliax_kernels.linear.backends import IMPLEMENTATIONS, Decay, Layout, Request, kernel_of, step_kernel_of
from haliax_kernels.linear.contract import LinearOptions
from haliax_kernels.linear.feature_maps import FeatureMap, check_name, needs_normalizer
from haliax_kernels.plan import KernelPlan


class LinearAttentionState(NamedTuple):
    """What is left of the tokens before. A PyTree of NamedArrays, in float32; FEATURE is the axis `<Key>_feature`.

    Attributes:
        s: {loop axes, FEATURE, Value}, the decayed sum of `key^T value`.
        z: {loop axes, FEATURE}, the decayed sum of keys; None where results are not normalised.
        shift: {loop axes}, what the feature map `exp` has subtracted from the keys; None for other maps.
    """

    s: NamedArray
    z: NamedArray | None = None
    shift: NamedArray | None = None


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
    call = _Call.of(
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
    call = _Call.of(
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


@dataclass(frozen=True)
class _Call:
    """What `linear_attention` and its step read from their arguments alike."""

    qkv: tuple[NamedArray, NamedArray, NamedArray]
    log_decay: NamedArray | None
    decay: Decay | None
    normalize: bool
    shifted: bool
    state: tuple[NamedArray | None, NamedArray | None, NamedArray | None]
    axes: dict[str, Any]

    def layout(self, *, return_state: bool) -> Layout:
        """Of the kernel for a sequence that is whole."""
        return Layout(self.decay, self.normalize, self.shifted, return_state, sharded=False)

    @staticmethod
    def of(
        name: str,
        Pos: AxisSelector | None,
        Key: AxisSelector,
        query: NamedArray,
        key: NamedArray,
        value: NamedArray,
        feature_map: FeatureMap,
        decay: NamedArray | float | None,
        gate: NamedArray | None,
        beta: NamedArray | None,
        normalize: bool,
        state: LinearAttentionState | None,
        segment_ids: NamedArray | None = None,
    ) -> "_Call":
        """Read and check them.

        Raises:
            ArgumentError: they contradict each other.
        """
        pos, head = None if Pos is None else axis_name(Pos), axis_name(Key)
        check_name(feature_map)
        if needs_normalizer(feature_map) and not normalize:
            raise ArgumentError(
                f"{name}: feature_map={feature_map!r} scales queries and keys, which only the normaliser takes back. "
                "Use normalize=True, or a function: feature_map=jnp.exp."
            )
        if beta is not None and normalize:
            raise ArgumentError(f"{name}: results of the delta rule (beta) have no normaliser; pass normalize=False.")
        dtype = jnp.result_type(query.dtype, key.dtype, value.dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ArgumentError(f"{name}: query, key and value must be floating-point, but together are {dtype}.")
        shifted = feature_map == "exp"
        states = _checked_state(name, state, normalize, shifted)
        log_decay = _log_decay(name, decay, gate, pos, head)
        others = [x for x in (key, value, log_decay, segment_ids, beta, *states) if x is not None]
        shared = {a.name for x in others for a in x.axes}
        group = tuple(a.name for a in query.axes if a.name not in shared and a.name not in (pos, head))
        not_values = {a.name for x in (query, key) for a in x.axes}
        values = (head,) if value.has_axis(head) else tuple(a.name for a in value.axes if a.name not in not_values)
        rank = None
        if log_decay is not None:
            rank = "channel" if log_decay.has_axis(head) else "token" if pos and log_decay.has_axis(pos) else "head"
        q, k, v = (x if x.dtype == dtype else x.astype(dtype) for x in (query, key, value))
        axes = {"group": group, "key": head, "value": values, "feature": f"{head}_feature"}
        if pos is not None:
            axes["pos"] = pos
        return _Call((q, k, v), log_decay, rank, normalize, shifted, states, axes)


def _log_decay(
    name: str, decay: NamedArray | float | None, gate: NamedArray | None, pos: str | None, head: str
) -> NamedArray | None:
    """The logarithm of all decay there is."""
    if gate is not None and pos is not None and not gate.has_axis(pos):
        raise ArgumentError(
            f"{name}: gate has axes {[a.name for a in gate.axes]}, and not {pos!r}. For one decay of all tokens pass "
            "decay=haliax.exp(gate)."
        )
    if decay is None:
        return None if gate is None else gate.astype(jnp.float32)
    if isinstance(decay, NamedArray):
        wrong = [a for a in (pos, head) if a is not None and decay.has_axis(a)]
        if wrong:
            raise ArgumentError(
                f"{name}: decay has axis {wrong[0]!r}, but is constant; a decay of each token is given by its "
                "logarithm: gate=haliax.log(decay)."
            )
        wide = decay.astype(jnp.float32)
    elif 0 <= decay <= 1:
        wide = haliax.named(jnp.float32(decay), ())
    else:
        raise ArgumentError(f"{name}: decay={decay!r} is not from 0 to 1.")
    # Without a gradient of 0 * inf at a decay of 0.
    log = haliax.where(wide > 0, haliax.log(haliax.where(wide > 0, wide, 1.0)), -jnp.inf)
    return log if gate is None else log + gate.astype(jnp.float32)


def _checked_state(
    name: str, state: LinearAttentionState | None, normalize: bool, shifted: bool
) -> tuple[NamedArray | None, NamedArray | None, NamedArray | None]:
    if state is None:
        return None, None, None
    wanted = {"z": (state.z, normalize, "normalize=True"), "shift": (state.shift, shifted, "'exp'")}
    for part, (found, needed, why) in wanted.items():
        if (found is not None) != needed:
            what = "lacks" if needed else "has"
            raise ArgumentError(
                f"{name}: the state {what} {part!r}, which there is with {why} only. Use the same normalize and "
                "feature_map in every call that a state goes through."
            )
    return state


def _state(layout: Layout, found: Any) -> LinearAttentionState:
    s, *rest = found
    z = rest.pop(0) if layout.normalize else None
    return LinearAttentionState(s, z, rest.pop(0) if layout.shifted else None)
