# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""How a kernel cuts its work, its operands' blocks, and small things that the kernels share.

States are held transposed, (value, key): then a decay of each key channel lies along the lanes, like everything else
that there is one number of per channel.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32

from haliax_kernels.linear import decays
from haliax_kernels.linear.contract import LinearOperands, LinearOptions

LANES = 128
# Rows of what there is one number of per token: they fill a tile.
ROWS = 8
_MIB = 2**20
# Vector memory that every TPU has for a kernel without asking for more.
_BUDGET = 12 * _MIB
_CHUNKS = 4


@dataclass(frozen=True)
class Plan:
    """The static part of a kernel.

    Attributes:
        length: tokens without padding.
        size: tokens per chunk.
        n: chunks per block, each step of the grid taking one block.
        group: query heads.
        heads: query heads per step.
        key: size of keys.
        value: size of values.
        dtype: of q, k and v.
        out_dtype: of y.
        decay: of what there is one.
        normalize: as in `LinearOptions`.
        scale: likewise.
        epsilon: likewise.
        want_log: whether the backward kernel computes the gradient by the logs of decays.
    """

    length: int
    size: int
    n: int
    group: int
    heads: int
    key: int
    value: int
    dtype: Any
    out_dtype: Any
    decay: Literal["none", "token", "channel"]
    normalize: bool
    scale: float
    epsilon: float
    want_log: bool = False

    @property
    def levels(self) -> int:
        """How often a chunk can be halved."""
        return self.size.bit_length() - 1

    @property
    def block(self) -> int:
        return self.n * self.size

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block)

    @property
    def chunks(self) -> int:
        return self.n * self.blocks

    @property
    def head_blocks(self) -> int:
        return self.group // self.heads

    def rows(self, c: int) -> slice:
        """The tokens of a block's chunk."""
        return slice(c * self.size, (c + 1) * self.size)

    def pad(self, x: Array, axis: int) -> Array:
        """`x` with its token axis padded to whole blocks."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.blocks * self.block - self.length)
        return jnp.pad(x, widths) if widths[axis][1] else x

    def narrow(self, x: Array) -> Array:
        """As an operand of the matrix units."""
        return x.astype(self.dtype)

    def dot(self, a: Array, b: Array, dims: tuple[int, int]) -> Float32[Array, "m n"]:
        """The product of two matrices over a dimension of each, accumulated in float32."""
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT
        return lax.dot_general(
            a, b, (((dims[0],), (dims[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )


def plan_for(options: LinearOptions, x: LinearOperands, *, backward: bool) -> Plan:
    """The plan for a call."""
    group, length, key = x.q.shape
    value = x.v.shape[1]
    size = options.chunk_size or min(LANES, max(16, 1 << (max(length, 1) - 1).bit_length()))
    if x.log_decay is not None and x.log_decay.ndim == 2:
        decay = "channel"
    else:
        decay = "none" if x.log_decay is None and x.segment_ids is None else "token"
    # One float32 array of a chunk and of a state, each rounded up to whole tiles. Both kernels have the same blocks,
    # which the states at their starts belong to.
    key_lanes, value_lanes = (-(-s // LANES) * LANES for s in (key, value))
    tokens, state = 4 * size * (key_lanes + value_lanes), 4 * value * key_lanes
    per_head = 6 * tokens
    per_chunk = 8 * tokens + 2 * state
    if decay == "channel":  # with what passed through the decays of each halving, and of the chunk
        per_chunk += 2 * tokens + 4 * size * key_lanes * size.bit_length()
    chunks = max(1, -(-length // size))
    most = max(1, min(_CHUNKS, chunks, (_BUDGET - 8 * state) // (per_chunk + per_head)))
    blocks = -(-chunks // most)
    n = -(-chunks // blocks)
    room = (_BUDGET - 8 * state) // n - per_chunk
    unrolled = 8 // n
    heads = max(h for h in range(1, group + 1) if group % h == 0 and (h == 1 or h <= min(unrolled, room // per_head)))
    return Plan(
        length=length,
        size=size,
        n=n,
        group=group,
        heads=heads,
        key=key,
        value=value,
        dtype=x.q.dtype,
        out_dtype=options.out_dtype or x.q.dtype,
        decay=decay,
        normalize=options.normalize,
        scale=options.scale,
        epsilon=options.epsilon,
        want_log=backward and options.decay_gradient and x.log_decay is not None,
    )


# --- operands --------------------------------------------------------------------------------------------------------


def decay_operands(plan: Plan, x: LinearOperands) -> dict[str, Array]:
    """What a kernel reads of the decays.

    For one decay a token, rows of what `TokenDecay` takes; for one a channel, the logs themselves.
    """
    log = decays.per_token(x.log_decay, x.segment_ids, plan.length)
    if log is None:
        return {}
    log = plan.pad(log, 0)
    if plan.decay == "channel":
        return {"log": log}
    log = log.reshape(plan.chunks, plan.size)
    parts = decays.token_sums(log)
    total = parts.prefix[:, -1:]
    weak = total > decays.WEAK
    factors = (jnp.where(weak, 1.0, 0.0), jnp.where(weak, jnp.expm1(total), jnp.exp(total)))
    rows = [jnp.exp(parts.prefix), jnp.exp(parts.suffix), parts.exact, parts.rest]
    rows += [jnp.broadcast_to(f, log.shape) for f in factors]
    rows += [jnp.zeros_like(log)] * (ROWS - len(rows))
    return {"rows": jnp.stack(rows, 1)}


def spec(plan: Plan, name: str, *, reverse: bool = False) -> pl.BlockSpec:
    """The blocks of an operand or result, in a grid of (blocks, head blocks)."""

    def at(b: Any) -> Any:
        return plan.blocks - 1 - b if reverse else b

    p = plan
    if name in ("q", "dq"):
        return pl.BlockSpec((p.heads, p.block, p.key), lambda b, g: (g, at(b), 0))
    if name in ("y", "dsums"):
        return pl.BlockSpec((p.heads, p.block, p.value), lambda b, g: (g, at(b), 0))
    if name in ("normalizer", "dnormalizer"):
        return pl.BlockSpec((p.heads, None, p.n, p.size), lambda b, g: (g, at(b), 0, 0))
    if name in ("k", "dk", "log", "dlog"):
        return pl.BlockSpec((p.block, p.key), lambda b, g: (at(b), 0))
    if name in ("v", "dv"):
        return pl.BlockSpec((p.block, p.value), lambda b, g: (at(b), 0))
    if name in ("rows", "drows"):
        return pl.BlockSpec((p.n, ROWS, p.size), lambda b, g: (at(b), 0, 0))
    if name == "masks":
        return pl.BlockSpec((p.levels, p.size * p.dtype.itemsize // 4, p.size), lambda b, g: (0, 0, 0))
    if name == "through":
        return pl.BlockSpec((p.n, 1, p.key), lambda b, g: (at(b), 0, 0))
    if name == "s_starts":
        return pl.BlockSpec((None, p.value, p.key), lambda b, g: (at(b), 0, 0))
    if name == "z_starts":
        return pl.BlockSpec((None, 1, p.key), lambda b, g: (at(b), 0, 0))
    return pl.BlockSpec((p.value if name[0] == "s" else 1, p.key), lambda b, g: (0, 0))


def shape(plan: Plan, name: str, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape of a result."""
    p = plan
    length = p.blocks * p.block
    shapes = {
        "y": (p.group, length, p.value),
        "normalizer": (p.group, p.blocks, p.n, p.size),
        "dq": (p.group, length, p.key),
        "dk": (length, p.key),
        "dlog": (length, p.key),
        "dv": (length, p.value),
        "drows": (p.chunks, ROWS, p.size),
        "through": (p.chunks, 1, p.key),
        "s_starts": (p.blocks, p.value, p.key),
        "z_starts": (p.blocks, 1, p.key),
    }
    if name not in shapes:  # a state, as in `spec`
        return jax.ShapeDtypeStruct((p.value if name[0] == "s" else 1, p.key), dtype)
    return jax.ShapeDtypeStruct(shapes[name], dtype)


def compiler_params(interpret: bool) -> Any:
    # TPU interpret mode fails on named semantics under jax.vmap.
    return pltpu.CompilerParams(dimension_semantics=None if interpret else ("arbitrary", "arbitrary"))


# --- in the kernels --------------------------------------------------------------------------------------------------


def row(x: Float32[Array, "n 1"]) -> Float32[Array, "1 n"]:
    """A column as a row: of each square the diagonal, by a sum over sublanes."""
    n = x.shape[0]
    width = min(n, LANES)
    diagonal = lax.broadcasted_iota(jnp.int32, (width, width), 0) == lax.broadcasted_iota(jnp.int32, (width, width), 1)
    squares = [jnp.where(diagonal, x[i : i + width], 0.0).sum(0, keepdims=True) for i in range(0, n, width)]
    return squares[0] if len(squares) == 1 else jnp.concatenate(squares, 1)


def column(x: Float32[Array, "1 n"]) -> Float32[Array, "n 1"]:
    """A row as a column."""
    return jnp.broadcast_to(x, (ROWS, x.shape[1])).T[:, :1]
