# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The static side of a call: whether the kernels can do it, and how they cut it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.linear import decays
from haliax_kernels.linear.contract import LinearOperands, LinearOptions
from haliax_kernels.pallas_triton import DTYPES, LARGEST_HEAD, SMALLEST_BLOCK, call_on_arrays, whole_block

_CHUNK = 64
# The square of scores is held in registers.
LARGEST_CHUNK = 128

_DIMENSIONS = {
    "q": ("group", "pos", "key"),
    "k": ("pos", "key"),
    "v": ("pos", "value"),
    "y": ("group", "pos", "value"),
    "normalizer": ("group", "pos"),
    "dsums": ("group", "pos", "value"),
    "dnormalizer": ("group", "pos"),
    "dq": ("group", "pos", "key"),
    "dk": ("pos", "key"),
    "dv": ("pos", "value"),
    # The states' kernel: what it sums the products of, and its first, last and all states.
    "left": ("heads", "pos", "key"),
    "right": ("heads", "pos", "value"),
    "weights": ("heads", "pos"),
    "s": ("key", "value"),
    "z": ("key",),
    "s_last": ("key", "value"),
    "z_last": ("key",),
    "s_borders": ("chunks", "key", "value"),
    "z_borders": ("chunks", "key"),
    "ds_borders": ("chunks", "key", "value"),
    "dz_borders": ("chunks", "key"),
    # Decays, of tokens; `tokens` are padded to whole chunks.
    "from_start": ("tokens",),
    "to_end": ("tokens",),
    "exact": ("tokens",),
    "rest": ("tokens",),
    "total": ("chunks",),
    "dlog_q": ("group", "key_blocks", "pos"),
    "dlog_k": ("key_blocks", "pos"),
}
_CHANNEL_DIMENSIONS = {
    "log": ("pos", "key"),
    "total": ("chunks", "key"),
    "dlog_q": ("group", "pos", "key"),
    "dlog_k": ("pos", "key"),
}


@dataclass(frozen=True)
class Plan:
    """The static part of a call; sizes are the arrays' own, without padding.

    Attributes:
        options: as given.
        length: tokens.
        size: tokens per chunk.
        group: query heads.
        key: the size of queries and keys.
        value: the size of values.
        key_block: channels of keys that a program has at once.
        value_block: likewise of values.
        dtype: of q, k and v.
        decay: of what there is one.
        want_log: whether the backward kernels compute the gradient by the logs of decays.
        warps: of 32 threads, that share a program.
    """

    options: LinearOptions
    length: int
    size: int
    group: int
    key: int
    value: int
    key_block: int
    value_block: int
    dtype: Any
    decay: Literal["none", "token", "channel"]
    want_log: bool
    warps: int

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.length, self.size)

    @property
    def key_blocks(self) -> int:
        return pl.cdiv(self.key, self.key_block)

    @property
    def value_blocks(self) -> int:
        return pl.cdiv(self.value, self.value_block)

    @property
    def scale(self) -> float:
        """What the backward kernels multiply by; it is part of `dsums` where results are normalised."""
        return 1.0 if self.options.normalize else self.options.scale

    @property
    def sums(self) -> str:
        """The names of the sums that make up a state."""
        return "sz" if self.options.normalize else "s"

    def padded(self, dimension: str, size: int) -> int:
        """A dimension's size in whole blocks."""
        whole = {
            "pos": self.chunks * self.size,
            "key": self.key_blocks * self.key_block,
            "value": self.value_blocks * self.value_block,
        }
        return whole.get(dimension, size)

    def dimensions(self, name: str) -> tuple[str, ...]:
        """Of an operand or result."""
        return (_CHANNEL_DIMENSIONS if self.decay == "channel" else {}).get(name) or _DIMENSIONS[name]

    def shape(self, name: str, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        """Of a result."""
        sizes = {"group": self.group, "pos": self.length, "key": self.key, "value": self.value}
        sizes |= {"chunks": self.chunks, "tokens": self.chunks * self.size, "key_blocks": self.key_blocks}
        return jax.ShapeDtypeStruct(tuple(sizes[d] for d in self.dimensions(name)), dtype)

    @property
    def narrow_dtype(self) -> Any:
        """What `narrow` makes of its argument."""
        return jnp.bfloat16 if self.dtype == jnp.bfloat16 else jnp.float32

    def narrow(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """As an operand of a product.

        Not as float16, whose range sums over tokens and quotients leave: TF32 has float16's digits.
        """
        return x.astype(self.narrow_dtype)

    def operand(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """What was loaded as it is, and what was computed as `narrow` makes it."""
        return x if x.dtype == self.dtype else self.narrow(x)

    def dot(self, a: Float[Array, "..."], b: Float[Array, "..."], contract: tuple[int, int]) -> Float32[Array, "m n"]:
        """The product over one dimension of each, accumulated in float32; exact products for float32 inputs only."""
        dtype = jnp.promote_types(a.dtype, b.dtype)
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT
        dimensions = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(
            a.astype(dtype), b.astype(dtype), dimensions, precision=precision, preferred_element_type=jnp.float32
        )


def plan_for(options: LinearOptions, x: LinearOperands) -> Plan:
    """The plan for a call.

    Raises:
        UnsupportedOptionError: the kernels cannot do it; the message names the argument.
    """
    _check(options, x)
    group, length, key = x.q.shape
    value = x.v.shape[1]
    # Without tensor cores, products hold more of their operands in registers.
    wide = x.q.dtype == jnp.float32
    block = 32 if wide else 64
    if x.log_decay is not None and x.log_decay.ndim == 2:
        decay = "channel"
    else:
        decay = "none" if x.log_decay is None and x.segment_ids is None else "token"
    size = options.chunk_size or min(_CHUNK, whole_block(max(length, 1)))
    return Plan(
        options=options,
        length=length,
        size=size,
        group=group,
        key=key,
        value=value,
        key_block=min(block, whole_block(key)),
        value_block=min(block, whole_block(value)),
        dtype=x.q.dtype,
        decay=decay,
        want_log=options.decay_gradient and x.log_decay is not None,
        warps=8 if wide or size > _CHUNK else 4,
    )


def _check(options: LinearOptions, x: LinearOperands) -> None:
    for name, a in (("q", x.q), ("k", x.k), ("v", x.v)):
        if a.dtype not in DTYPES or a.dtype != x.q.dtype:
            raise UnsupportedOptionError(
                f"{name}: the Pallas GPU linear attention takes float32, bfloat16 or float16, the same for q, k and "
                f"v, got {a.dtype}; cast it, or use implementation='xla'."
            )
    for name, size in (("q and k", x.k.shape[1]), ("v", x.v.shape[1])):
        if not 0 < size <= LARGEST_HEAD:
            raise UnsupportedOptionError(
                f"{name}: the Pallas GPU linear attention takes head sizes of 1 to {LARGEST_HEAD}, got {size}; use "
                "implementation='xla'."
            )
    if x.beta is not None:
        raise UnsupportedOptionError("beta: the Pallas GPU kernels have no delta rule; use implementation='xla'.")
    if options.chunk_size is not None and not SMALLEST_BLOCK <= options.chunk_size <= LARGEST_CHUNK:
        raise UnsupportedOptionError(
            f"chunk_size={options.chunk_size}: the Pallas GPU linear attention takes {SMALLEST_BLOCK} to "
            f"{LARGEST_CHUNK}."
        )


def decay_operands(plan: Plan, x: LinearOperands) -> dict[str, Float32[Array, "..."]]:
    """What the kernels read of the decays.

    Of tokens the factors and sums, of channels the logs; and the log of each chunk's.
    """
    log = decays.per_token(x.log_decay, x.segment_ids, plan.length)
    if log is None:
        return {}
    widths = [(0, plan.chunks * plan.size - plan.length)] + [(0, 0)] * (log.ndim - 1)
    chunks = jnp.pad(log, widths).reshape(plan.chunks, plan.size, *log.shape[1:])
    if plan.decay == "channel":
        return {"log": log, "total": chunks.sum(1)}
    parts = decays.token_sums(chunks)
    rows = {"from_start": jnp.exp(parts.prefix), "to_end": jnp.exp(parts.suffix)}
    rows |= {"exact": parts.exact, "rest": parts.rest}
    return {name: a.reshape(-1) for name, a in rows.items()} | {"total": parts.prefix[:, -1]}


def call(
    kernel: Callable[[Plan, dict[str, Any]], None],
    name: str,
    plan: Plan,
    grid: tuple[int, ...],
    operands: Mapping[str, Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    interpret: bool,
) -> dict[str, Array]:
    """Run `kernel(plan, refs)`, `refs` holding operands and outputs by name."""

    def padded_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(plan.padded(d, size) for d, size in zip(plan.dimensions(name), shape, strict=True))

    def body(reads: dict[str, Any], writes: dict[str, Any]) -> None:
        kernel(plan, {**reads, **writes})

    return call_on_arrays(
        body, name, grid, operands, outputs, padded_shape, warps=plan.warps, stages=2, interpret=interpret
    )
