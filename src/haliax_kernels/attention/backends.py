# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The implementations of attention, each with its named kernel."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from haliax_kernels.attention import differentiable
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.attention.contract import AttentionImplementation, AttentionOperands, AttentionOptions
from haliax_kernels.context.attend import sharded_attention
from haliax_kernels.context.strategy import Strategy
from haliax_kernels.implementations import Implementation, dtype_limits
from haliax_kernels.kernel import NamedKernel, named_kernel
from haliax_kernels.policies import Gather, Manual, Parallel, Policy
from haliax_kernels.shard_context import ShardContext

_WHOLE = ("keep it whole in the axis mapping", '{{**mapping, "{axis}": None}}')
_SEQUENCE = (
    ("let its shards work together", 'flash_attention(..., context_parallel="auto")'),
    _WHOLE,
    ("shard the batch or the heads instead", '{{**mapping, "{axis}": None, "batch": ("data", {mesh_axes})}}'),
)
REMEDIES = {"q_pos": _SEQUENCE, "k_pos": _SEQUENCE, "key": (_WHOLE,), "value": (_WHOLE,)}


@dataclass(frozen=True)
class Request:
    """What a call of `flash_attention` asks for, as far as the choice of an implementation depends on it.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        options: the names of the options in use that not every implementation has to honour, such as `bias`.
        dtype: the dtype of the products' operands.
        block_sizes: the block sizes asked for.
        head_size: the size of keys or values, whichever is larger.
    """

    platform: str
    options: tuple[str, ...]
    dtype: Any
    block_sizes: BlockSizes | None = None
    head_size: int = 1


EVERYTHING = frozenset(
    {
        "bias",
        "dropout",
        "logits_soft_cap",
        "attn_sink",
        "return_lse",
        "explicit mask",
        "causal_offset",
        "sliding_window",
        "context_parallel",
    }
)


@dataclass(frozen=True)
class Layout:
    """What the signature of a call depends on.

    Attributes:
        return_lse: whether the logsumexp is an output.
        masks: whether the mask has the group axis.
        biases: whether the bias has it.
        strategy: how the shards of the sequence work together; None where it is whole.
    """

    return_lse: bool = False
    masks: bool = False
    biases: bool = False
    strategy: Strategy | None = None


def pair_of(name: str) -> AttentionImplementation:
    """The contract's pair of an implementation that has one."""
    return cast(Any, importlib.import_module(f"haliax_kernels.attention.{name}"))


def _with_contract(name: str) -> Callable[[Layout], Callable[..., Any]]:
    """The local function over an implementation that has the contract's pair."""

    def make(layout: Layout) -> Callable[..., Any]:
        implementation = pair_of(name)
        strategy = layout.strategy

        def flash_attention(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            q_segment_ids: jax.Array | None,
            k_segment_ids: jax.Array | None,
            mask: jax.Array | None,
            bias: jax.Array | None,
            seed: jax.Array | None,
            sink: jax.Array | None,
            q_offset: jax.Array | None,
            *,
            options: AttentionOptions,
        ) -> Any:
            mask, bias = (x[None] if x is not None and x.ndim == 2 else x for x in (mask, bias))
            offset = 0 if q_offset is None else q_offset
            operands = AttentionOperands(q, k, v, offset, 0, q_segment_ids, k_segment_ids, mask, bias, seed)
            if strategy is None:
                both = differentiable.attention(implementation, options, operands, sink)
            else:
                both = sharded_attention(implementation, strategy, options, operands, sink)
            return both if layout.return_lse else both[0]

        if strategy is None:
            return flash_attention

        # The mesh axes are known from the strategy; a kernel with `Manual` axes must take `shard` all the same.
        def of_shards(*args: Any, shard: ShardContext, **kwargs: Any) -> Any:
            del shard
            return flash_attention(*args, **kwargs)

        signature = inspect.signature(flash_attention)
        shard = inspect.Parameter("shard", inspect.Parameter.KEYWORD_ONLY)
        of_shards.__signature__ = signature.replace(parameters=[*signature.parameters.values(), shard])
        return of_shards

    return make


def _make_splash(layout: Layout) -> Callable[..., Any]:
    from haliax_kernels.attention import splash

    def flash_attention(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_segment_ids: jax.Array | None,
        k_segment_ids: jax.Array | None,
        *unused: None,
        options: AttentionOptions,
    ) -> jax.Array:
        causal, sizes = options.right is not None, options.block_sizes
        return splash.attention(
            q, k, v, q_segment_ids, k_segment_ids, causal=causal, scale=options.scale, block_sizes=sizes
        )

    return flash_attention


def _tpu_limits(request: Request) -> list[str]:
    return dtype_limits(request.dtype, jnp.float32, jnp.bfloat16)


def _splash_limits(request: Request) -> list[str]:
    reasons = _tpu_limits(request)
    sizes = request.block_sizes
    if sizes is not None and (sizes.q % 128 or sizes.k % 128):
        reasons.append(f"its block_sizes must be multiples of 128, but are q {sizes.q}, k {sizes.k}")
    return reasons


def _gpu_limits(request: Request) -> list[str]:
    reasons = dtype_limits(request.dtype, jnp.float32, jnp.bfloat16, jnp.float16)
    if request.head_size > 256:
        reasons.append(f"its head size is at most 256, but is {request.head_size}")
    sizes = request.block_sizes
    if sizes is not None and any(s < 16 or s & (s - 1) for s in (sizes.q, sizes.k)):
        reasons.append(f"its block_sizes must be powers of two of at least 16, but are q {sizes.q}, k {sizes.k}")
    return reasons


IMPLEMENTATIONS: tuple[Implementation[Layout, Request], ...] = (
    Implementation(
        "pallas_tpu",
        frozenset({"tpu"}),
        EVERYTHING,
        _with_contract("pallas_tpu"),
        _tpu_limits,
    ),
    Implementation("splash", frozenset({"tpu"}), frozenset(), _make_splash, _splash_limits),
    Implementation(
        "pallas_gpu",
        frozenset({"gpu"}),
        EVERYTHING,
        _with_contract("pallas_gpu"),
        _gpu_limits,
    ),
    Implementation("xla", None, EVERYTHING, _with_contract("xla")),
)


@functools.cache
def kernel_of(implementation: Implementation[Layout, Request], layout: Layout) -> NamedKernel:
    """The named kernel of an implementation."""
    strategy = layout.strategy
    heads = "heads " if strategy is not None and strategy.ulysses else ""
    # Where the keys are sharded, mask and bias have the shard's queries and all keys: these are another core axis.
    keys = "all_keys" if strategy is not None and strategy.mode != "own_queries" else "k_pos"
    pairs = (f"{'group ' if grouped else ''}q_pos {keys}" for grouped in (layout.masks, layout.biases))
    inputs = (
        f"{heads}group q_pos key, {heads}k_pos key, {heads}k_pos value, q_pos, k_pos, {', '.join(pairs)}, "
        f"{heads}group, {heads}group, ()"
    )
    outputs = f"{heads}group q_pos value" + (f", {heads}group q_pos" if layout.return_lse else "")
    policies: dict[str, Policy] = {"group": Parallel()}
    if strategy is not None:
        policies["q_pos"] = Manual()
        if strategy.mode != "own_queries":
            policies |= {"k_pos": Manual(reduces=True), "all_keys": Gather()}
        if heads:
            policies["heads"] = Parallel()
    decorate = named_kernel(f"{inputs} -> {outputs}", policies=policies, name="flash_attention")
    return decorate(implementation.make(layout)).with_remedies(REMEDIES)
