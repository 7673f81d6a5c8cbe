# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The implementations of linear attention, each with its named kernel."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from haliax_kernels.errors import ArgumentError
from haliax_kernels.implementations import Implementation, dtype_limits
from haliax_kernels.kernel import NamedKernel, named_kernel
from haliax_kernels.linear import feature_maps
from haliax_kernels.linear.contract import LinearImplementation, LinearOperands, LinearOptions, LinearState
from haliax_kernels.linear.differentiable import linear_attention
from haliax_kernels.linear.feature_maps import FeatureMap
from haliax_kernels.linear.sequence import sharded_linear_attention
from haliax_kernels.linear.step import step
from haliax_kernels.linear.xla import zero_state
from haliax_kernels.mesh import MeshAxes
from haliax_kernels.policies import Manual, Parallel, Policy
from haliax_kernels.shard_context import ShardContext

Decay = Literal["head", "token", "channel"]

_WHOLE = ("keep it whole in the axis mapping", '{{**mapping, "{axis}": None}}')
_REMEDIES = {"key": (_WHOLE,), "value": (_WHOLE,), "feature": (_WHOLE,)}
_LOG_DECAY = {None: "()", "head": "()", "token": "pos", "channel": "pos key"}


@dataclass(frozen=True)
class Request:
    """What a call of `linear_attention` asks for, as far as the choice of an implementation depends on it.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        options: the names of those arguments in use that not every implementation has to honour, such as `beta`.
        dtype: the dtype of the products' operands.
        head_size: the size of keys or values, whichever is larger.
        chunk_size: tokens per chunk, as asked for.
    """

    platform: str
    options: tuple[str, ...]
    dtype: Any
    head_size: int
    chunk_size: int | None


@dataclass(frozen=True)
class Layout:
    """What the signature of a call depends on.

    Attributes:
        decay: what the logs of decays are given for; None for no decay.
        normalize: whether there is a state of the normaliser.
        shifted: whether keys have a shift, as those of the feature map `exp`.
        return_state: whether the last state is an output.
        sharded: whether the sequence is.
    """

    decay: Decay | None
    normalize: bool
    shifted: bool
    return_state: bool
    sharded: bool

    @property
    def states(self) -> tuple[str, ...]:
        """The core axes of a state's arrays."""
        return "feature value", *(("feature",) if self.normalize else ()), *(("()",) if self.shifted else ())


def _with_contract(name: str) -> Callable[[Layout], Callable[..., Any]]:
    """The local function over an implementation that has the contract's pair."""

    def make(layout: Layout) -> Callable[..., Any]:
        implementation = cast(LinearImplementation, importlib.import_module(f"haliax_kernels.linear.{name}"))

        def linear_attention(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            log_decay: jax.Array | None,
            segment_ids: jax.Array | None,
            s: jax.Array | None,
            z: jax.Array | None,
            shift: jax.Array | None,
            beta: jax.Array | None,
            *,
            options: LinearOptions,
            feature_map: FeatureMap,
            shard: ShardContext,
        ) -> Any:
            mesh_axes = shard["pos"].mesh_axes
            state = None if s is None else LinearState(s, z)
            new_shift = _shift(k, shift, mesh_axes) if layout.shifted else None
            q, k = feature_maps.queries(feature_map, q), feature_maps.keys(feature_map, k, new_shift)
            x = LinearOperands(q, k, v, log_decay, segment_ids, _shifted(state, shift, new_shift), beta)
            _check_features(x)
            y, last = _run(implementation, options, x, mesh_axes, layout.return_state)
            return (y, *_state_outputs(last, new_shift)) if layout.return_state else y

        return linear_attention

    return make


def _run(
    implementation: LinearImplementation,
    options: LinearOptions,
    x: LinearOperands,
    mesh_axes: MeshAxes,
    want_state: bool,
) -> tuple[jax.Array, LinearState | None]:
    if mesh_axes:
        return sharded_linear_attention(implementation, options, x, mesh_axes, want_state=want_state)
    return linear_attention(implementation, options, x)


def _shift(k: jax.Array, before: jax.Array | None, mesh_axes: MeshAxes = ()) -> jax.Array:
    """What is subtracted from all keys that meet in one state, those before included."""
    shift = feature_maps.key_shift(k)
    shift = lax.pmax(shift, mesh_axes) if mesh_axes else shift
    return shift if before is None else jnp.maximum(shift, lax.stop_gradient(before))


def _shifted(state: LinearState | None, old: jax.Array | None, new: jax.Array | None) -> LinearState | None:
    """The state of keys of which `old` was subtracted, as if it had been `new`, which is not less."""
    if state is None or old is None or new is None:
        return state
    # Before any token the shift is -inf, and the state zero.
    factor = jnp.where(old == -jnp.inf, 0, jnp.exp(jnp.minimum(lax.stop_gradient(old) - new, 0)))
    return jax.tree.map(lambda a: factor * a, state)


def _state_outputs(state: LinearState | None, shift: jax.Array | None) -> tuple[jax.Array, ...]:
    assert state is not None
    return tuple(a for a in (*state, shift) if a is not None)


def _check_features(x: LinearOperands) -> None:
    features = x.k.shape[-1]
    if x.log_decay is not None and x.log_decay.ndim == 2 and x.log_decay.shape[1] != features:
        raise ArgumentError(
            f"linear_attention: gate has {x.log_decay.shape[1]} channels, but the feature map makes {features} of "
            "them. Give a gate without the key axis, or a feature map that keeps its size."
        )
    if x.state is not None and x.state.s.shape[0] != features:
        raise ArgumentError(
            f"linear_attention: the initial state is for {x.state.s.shape[0]} features, but the feature map makes "
            f"{features}."
        )


def _tpu_limits(request: Request) -> list[str]:
    reasons = dtype_limits(request.dtype, jnp.float32, jnp.bfloat16)
    if request.chunk_size is not None and request.chunk_size < 16:
        reasons.append(f"its chunk_size is at least 16, but is {request.chunk_size}")
    return reasons


def _gpu_limits(request: Request) -> list[str]:
    reasons = dtype_limits(request.dtype, jnp.float32, jnp.bfloat16, jnp.float16)
    if request.head_size > 256:
        reasons.append(f"its head size is at most 256, but is {request.head_size}")
    if request.chunk_size is not None and not 16 <= request.chunk_size <= 128:
        reasons.append(f"its chunk_size is from 16 to 128, but is {request.chunk_size}")
    return reasons


IMPLEMENTATIONS: tuple[Implementation[Layout, Request], ...] = (
    Implementation(
        "pallas_tpu", frozenset({"tpu"}), frozenset({"gate per channel"}), _with_contract("pallas_tpu"), _tpu_limits
    ),
    Implementation(
        "pallas_gpu",
        frozenset({"gpu"}),
        frozenset({"gate per channel"}),
        _with_contract("pallas_gpu"),
        _gpu_limits,
    ),
    Implementation("xla", None, frozenset({"gate per channel", "beta"}), _with_contract("xla")),
)


@functools.cache
def kernel_of(implementation: Implementation[Layout, Request], layout: Layout) -> NamedKernel:
    """The named kernel of an implementation."""
    inputs = f"group pos key, pos key, pos value, {_LOG_DECAY[layout.decay]}, pos, feature value, feature, (), pos"
    outputs = ", ".join(("group pos value", *(layout.states if layout.return_state else ())))
    policies = _group_policy(layout)
    if layout.sharded:
        policies["pos"] = Manual(reduces=layout.return_state)
    decorate = named_kernel(f"{inputs} -> {outputs}", policies=policies, name="linear_attention")
    return decorate(implementation.make(layout)).with_remedies(_REMEDIES)


def _group_policy(layout: Layout) -> dict[str, Policy]:
    # The state does not depend on the queries: it is the same on all shards of the group.
    return {"group": Manual(reduces=True) if layout.return_state else Parallel()}


@functools.cache
def step_kernel_of(layout: Layout) -> NamedKernel:
    """The named kernel of one token; its operations are too small for a kernel of any platform."""

    def linear_attention_step(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array | None,
        s: jax.Array | None,
        z: jax.Array | None,
        shift: jax.Array | None,
        beta: jax.Array | None,
        *,
        options: LinearOptions,
        feature_map: FeatureMap,
        shard: ShardContext,
    ) -> Any:
        del shard  # a kernel with `Manual` axes must take it
        new_shift = _shift(k[None], shift) if layout.shifted else None
        q, k = feature_maps.queries(feature_map, q), feature_maps.keys(feature_map, k[None], new_shift)[0]
        if s is None:
            s, z = zero_state(options, k, v)
        state = _shifted(LinearState(s, z), shift, new_shift)
        assert state is not None
        y, state = step(options, state, q, k, v, log_decay, beta)
        return (y, *_state_outputs(state, new_shift))

    inputs = f"group key, key, value, {'key' if layout.decay == 'channel' else '()'}, feature value, feature, (), ()"
    outputs = ", ".join(("group value", *layout.states))
    decorate = named_kernel(f"{inputs} -> {outputs}", policies=_group_policy(layout), name="linear_attention_step")
    return decorate(linear_attention_step).with_remedies(_REMEDIES)
