# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The static side of a call: what is asked for, whether the kernels can do it, and how each of them is cut."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool

from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.errors import ArgumentError, UnsupportedOptionError
from haliax_kernels.pallas_triton import DTYPES, LARGEST_HEAD, SMALLEST_BLOCK, call_on_arrays, whole_block

_UNLIMITED = 2**31 - 1

_DIMENSIONS = {
    "q": ("group", "q_pos", "key"),
    "k": ("k_pos", "key"),
    "v": ("k_pos", "value"),
    "offsets": (),
    "q_segment_ids": ("q_pos",),
    "k_segment_ids": ("k_pos",),
    "mask": ("group", "q_pos", "k_pos"),
    "bias": ("group", "q_pos", "k_pos"),
    "seed": ("group",),
    "o": ("group", "q_pos", "value"),
    "lse": ("group", "q_pos"),
    "do": ("group", "q_pos", "value"),
    "delta": ("group", "q_pos"),
    "dq": ("group", "q_pos", "key"),
    "dk": ("k_pos", "key"),
    "dv": ("k_pos", "value"),
    "dbias": ("group", "q_pos", "k_pos"),
}


@dataclass(frozen=True)
class Cut:
    """How one kernel is cut into blocks and compiled.

    Attributes:
        q: query positions per block, a power of two.
        k: key positions per block, a power of two.
        warps: of 32 threads, that share a block.
        stages: how many blocks are loaded ahead, plus one.
    """

    q: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Problem:
    """The static part of a call; sizes are the arrays' own, without padding.

    Attributes:
        options: as given.
        group: query heads.
        q_len: query positions.
        k_len: key positions.
        key_size: the size of queries and keys.
        value_size: the size of values.
        dtype: of q, k and v.
        offsets: the positions of the first query and key, or None if they are known at run time only.
        segmented: whether there are segment ids.
        masked: whether there is a mask.
        biased: whether there is a bias.
    """

    options: AttentionOptions
    group: int
    q_len: int
    k_len: int
    key_size: int
    value_size: int
    dtype: Any
    offsets: tuple[int, int] | None
    segmented: bool
    masked: bool
    biased: bool

    @property
    def left(self) -> int | None:
        """`options.left`, None where no two int32 positions are further apart."""
        return _limit(self.options.left)

    @property
    def right(self) -> int | None:
        """`options.right`, likewise."""
        return _limit(self.options.right)

    @property
    def opaque(self) -> bool:
        """Whether only the arrays say which blocks are seen whole."""
        return self.segmented or self.masked

    def size(self, dimension: str) -> int:
        """The true size of a dimension other than the group."""
        return {"q_pos": self.q_len, "k_pos": self.k_len, "key": self.key_size, "value": self.value_size}[dimension]

    def padded(self, dimension: str, cut: Cut) -> int:
        """The size of a dimension in whole blocks. Heads are one block, whose size is a power of two."""
        size = self.size(dimension)
        if dimension in ("key", "value"):
            return whole_block(size)
        block = cut.q if dimension == "q_pos" else cut.k
        return pl.cdiv(size, block) * block

    def blocks(self, dimension: str, cut: Cut) -> int:
        """How many blocks a sequence is cut into."""
        return self.padded(dimension, cut) // (cut.q if dimension == "q_pos" else cut.k)

    def cuts(self) -> tuple[Cut, Cut, Cut]:
        """How the forward kernel, that of dk and dv, and those of dq and the bias are cut.

        The defaults were chosen by what Triton and `ptxas` make of them for Hopper: at most 1 KiB of registers spilt
        per thread, none in most kernels, and at most 180 KiB of shared memory. They were not timed.
        """
        head = max(whole_block(self.key_size), whole_block(self.value_size))
        if jnp.dtype(self.dtype).itemsize == 4:
            # Without tensor cores, whose products hold more of the operands in registers.
            q, k = (64, 32) if head <= 64 else (32, 16) if head <= 128 else (16, 16)
            cuts = (Cut(q, k, 8, 2), Cut(k, q, 8, 2), Cut(q, k, 8, 2))
        elif head <= 64:
            cuts = (Cut(128, 64, 4, 3), Cut(32, 128, 8, 2), Cut(128, 64, 8, 2))
        elif head <= 128:
            cuts = (Cut(128, 64, 8, 3), Cut(64, 128, 8, 2), Cut(128, 64, 8, 2))
        else:
            cuts = (Cut(128, 32, 8, 2), Cut(32, 64, 8, 2), Cut(64, 32, 8, 2))
        return tuple(self._fit(cut) for cut in cuts)  # pyright: ignore[reportReturnType]

    def _fit(self, cut: Cut) -> Cut:
        wanted = self.options.block_sizes
        q, k = (cut.q, cut.k) if wanted is None else (wanted.q, wanted.k)
        return Cut(min(q, whole_block(self.q_len)), min(k, whole_block(self.k_len)), cut.warps, cut.stages)


def _limit(width: int | None) -> int | None:
    return None if width is None or width >= _UNLIMITED else width


def describe(options: AttentionOptions, x: AttentionOperands) -> Problem:
    """The static part of a call.

    Raises:
        UnsupportedOptionError: the kernels cannot do it; the message names the argument.
        ArgumentError: half of a pair of arguments is missing.
    """
    dtype = jnp.dtype(x.q.dtype)
    if dtype not in DTYPES:
        raise UnsupportedOptionError(f"pallas_gpu: q is {dtype}; the kernels take float32, bfloat16 and float16.")
    for name, array in (("k", x.k), ("v", x.v)):
        if array.dtype != dtype:
            raise UnsupportedOptionError(f"pallas_gpu: {name} is {array.dtype}, but q is {dtype}; cast one of them.")
    for name, size in (("q and k", x.q.shape[-1]), ("v", x.v.shape[-1])):
        if not 0 < size <= LARGEST_HEAD:
            raise UnsupportedOptionError(f"pallas_gpu: the head size of {name} is {size}, not 1 to {LARGEST_HEAD}.")
    sizes = options.block_sizes
    if sizes is not None and any(s < SMALLEST_BLOCK or s & (s - 1) for s in (sizes.q, sizes.k)):
        raise UnsupportedOptionError(
            f"pallas_gpu: block_sizes must be powers of two of at least {SMALLEST_BLOCK}, but are q {sizes.q}, "
            f"k {sizes.k}."
        )
    if (x.q_segment_ids is None) != (x.k_segment_ids is None):
        raise ArgumentError("pallas_gpu: q_segment_ids and k_segment_ids must be given together.")
    if options.dropout and x.seed is None:
        raise ArgumentError(f"pallas_gpu: dropout={options.dropout} needs a seed.")
    if not 0 <= options.dropout < 1:
        raise ArgumentError(f"pallas_gpu: dropout={options.dropout} is not at least 0 and less than 1.")
    return Problem(
        options=options,
        group=x.q.shape[0],
        q_len=x.q.shape[1],
        k_len=x.k.shape[0],
        key_size=x.q.shape[2],
        value_size=x.v.shape[1],
        dtype=dtype,
        offsets=_static_offsets(x),
        segmented=x.q_segment_ids is not None,
        masked=x.mask is not None,
        biased=x.bias is not None,
    )


def _static_offsets(x: AttentionOperands) -> tuple[int, int] | None:
    q, k = x.q_offset, x.k_offset
    if isinstance(q, int | np.integer) and isinstance(k, int | np.integer):
        return int(q), int(k)
    return None


def arrays(problem: Problem, x: AttentionOperands) -> dict[str, Array]:
    """The operands that the kernels read, by name; those that are not there are not there."""
    mask = None if x.mask is None else _indexable(_of_heads(x.mask))
    found = {"q": x.q, "k": x.k, "v": x.v, "mask": mask, "bias": _of_heads(x.bias)}
    found |= {"q_segment_ids": x.q_segment_ids, "k_segment_ids": x.k_segment_ids}
    if problem.options.dropout:
        found["seed"] = x.seed
    if problem.offsets is None:
        found["offsets"] = jnp.stack([jnp.asarray(o, jnp.int32) for o in (x.q_offset, x.k_offset)])
    return {name: array for name, array in found.items() if array is not None}


@jax.custom_batching.custom_vmap
def _indexable(mask: Bool[Array, "..."]) -> Bool[Array, "..."]:
    """The mask, if Pallas computes its addresses right with the dimensions that `jax.vmap` has added.

    It does so in 32 bits up to `2**32` bytes. That is enough for `2**31` elements, which larger dtypes do not exceed.

    Raises:
        UnsupportedOptionError: the mask has a size in between.
    """
    if 2**31 < mask.size <= 2**32:
        raise UnsupportedOptionError(
            f"pallas_gpu: the mask has {mask.size} elements with the batch; the kernels cannot address 2**31 to "
            "2**32. Leave out what segment ids or a window say, or use implementation='xla'."
        )
    return mask


@_indexable.def_vmap
def _indexable_batched(
    axis_size: int, batched: list[bool], mask: Bool[Array, "axis_size ..."]
) -> tuple[Bool[Array, "axis_size ..."], bool]:
    return _indexable(mask), batched[0]


def _of_heads(x: Array | None) -> Array | None:
    """Without the first dimension where the group shares it."""
    return x if x is None or x.shape[0] > 1 else x[0]


def call(
    kernel: Callable[..., None],
    name: str,
    problem: Problem,
    cut: Cut,
    grid: tuple[int, ...],
    operands: Mapping[str, Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    interpret: bool,
) -> dict[str, Array]:
    """Run `kernel(problem, cut, refs)`, `refs` holding operands and outputs by name.

    Kernels index the arrays themselves, by positions that depend on the grid and on what has been read.
    """

    def padded_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        dimensions = _DIMENSIONS[name][-len(shape) :]  # a mask or bias may lack the group
        padded = [
            size if dimension == "group" else problem.padded(dimension, cut)
            for dimension, size in zip(dimensions, shape, strict=False)
        ]
        return tuple(padded) or shape

    def body(reads: dict[str, Any], writes: dict[str, Any]) -> None:
        kernel(problem, cut, {**reads, **writes})

    return call_on_arrays(
        body, name, grid, operands, outputs, padded_shape, warps=cut.warps, stages=cut.stages, interpret=interpret
    )
