# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""How the shards of a sequence work together: the choice of `context_parallel`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from haliax_kernels.attention.contract import AttentionOptions
from haliax_kernels.context.pieces import Pieces, Work
from haliax_kernels.errors import ArgumentError, UnsupportedOptionError, bytes_text, mesh_axes_text
from haliax_kernels.mesh import MeshAxes

Mode = Literal["ring", "zigzag", "allgather", "ulysses", "own_queries", "own_keys"]
ContextParallel = str | Mapping[str, str]
CHOICES = ("auto", "ring", "zigzag", "allgather", "ulysses", "error")
LAYOUTS = ("contiguous", "zigzag")

# Less than this, and the steps of a ring cost more than what they save.
SMALL_BYTES = 1 << 20
# Queries on one device, times heads of a group, from which computing a step takes longer than its transfer: a step
# computes 4 * queries * (key size) operations for each 2 * (key size) * itemsize bytes, and a TPU v5p does about 5000
# bfloat16 operations in the time that one link takes for a byte.
HIDDEN_QUERIES = 4096


@dataclass(frozen=True)
class Strategy:
    """How the shards work together.

    Attributes:
        mode: `own_queries` where every device has all keys, `own_keys` where every device has all queries; else as in
            `context_parallel`. Under `ulysses`, what is done over the mesh axes that it leaves.
        mesh_axes: the mesh axes that shard the sequence, the major one first.
        ulysses: the minor ones of them, over which heads and rows are exchanged.
        stored_zigzag: whether the arrays lie in zigzag order as they are.
        reason: why, for the plan.
    """

    mode: Mode
    mesh_axes: MeshAxes
    ulysses: MeshAxes = ()
    stored_zigzag: bool = False
    reason: str = ""


@dataclass(frozen=True)
class SequenceCall:
    """What the choice depends on.

    Attributes:
        options: the static part of the call.
        q_offset: where the queries begin; None where that is known on the device only.
        q_mesh_axes: the mesh axes that shard the queries, with their sizes.
        k_mesh_axes: those that shard the keys.
        q_rows: queries on one device.
        k_rows: keys on one device.
        heads: key/value heads on one device, under the name of their axis; None without such an axis.
        group: query heads of each of them, on one device.
        batch: what else is computed on one device, a product of sizes.
        sizes: of keys and values.
        itemsize: bytes of a number.
        pairs: whether there is a mask or bias with an entry for each query and key.
        layout: `contiguous` or `zigzag`: how the arrays lie.
        names: the position axes of queries and keys, for messages.
    """

    options: AttentionOptions
    q_offset: int | None
    q_mesh_axes: tuple[tuple[str, int], ...]
    k_mesh_axes: tuple[tuple[str, int], ...]
    q_rows: int
    k_rows: int
    heads: tuple[str, int] | None
    group: int
    batch: int
    sizes: tuple[int, int]
    itemsize: int
    pairs: bool
    layout: str
    names: tuple[str, str]

    @property
    def shards(self) -> int:
        return math.prod(n for _, n in self.q_mesh_axes or self.k_mesh_axes)

    @property
    def mesh_axes(self) -> MeshAxes:
        return tuple(m for m, _ in self.q_mesh_axes or self.k_mesh_axes)

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values on one device."""
        heads = self.heads[1] if self.heads else 1
        return self.batch * heads * self.k_rows * sum(self.sizes) * self.itemsize

    @property
    def q_and_o_bytes(self) -> int:
        heads = self.heads[1] if self.heads else 1
        return self.batch * heads * self.group * self.q_rows * sum(self.sizes) * self.itemsize

    @property
    def causal(self) -> bool:
        return self.options.right is not None and self.options.right < self.k_rows

    def ring_steps(self) -> int:
        """Transfers of a contiguous ring, which a window may stop."""
        q, k = (Pieces(self.shards, n, False) for n in (self.q_rows, self.k_rows))
        return sum(Work.of(self.options, q, k, self.q_offset).arms)

    def over(self, mesh_axes: MeshAxes) -> int:
        return math.prod(n for m, n in self.q_mesh_axes or self.k_mesh_axes if m in mesh_axes)


def choose(call: SequenceCall, wanted: ContextParallel) -> Strategy:
    """The strategy of a call whose queries or keys are sharded.

    Raises:
        ArgumentError: `wanted` is no mode.
        UnsupportedOptionError: a mode that cannot honour the call, named with what stands in its way.
    """
    q_axes, k_axes = (tuple(m for m, _ in axes) for axes in (call.q_mesh_axes, call.k_mesh_axes))
    if q_axes and k_axes and q_axes != k_axes:
        sizes = dict(call.q_mesh_axes + call.k_mesh_axes)
        raise UnsupportedOptionError(
            f"flash_attention: {call.names[0]!r} is sharded over {mesh_axes_text(q_axes, sizes)}, and "
            f"{call.names[1]!r} over {mesh_axes_text(k_axes, sizes)}. Shard both over the same mesh axes, or one of "
            f'them only: {{**mapping, "{call.names[1]}": {_code(q_axes)}}}.'
        )
    stored = call.layout == "zigzag"
    if stored:
        _check_halves(call, "sequence_layout='zigzag'")
    if not q_axes or not k_axes:
        if stored and not q_axes:
            raise UnsupportedOptionError(
                f"flash_attention: sequence_layout='zigzag' needs {call.names[0]!r} sharded; only "
                f"{call.names[1]!r} is."
            )
        if not q_axes:
            return Strategy("own_keys", k_axes, reason=f"{call.names[0]!r} is whole: each device sees its own keys")
        return Strategy(
            "own_queries", q_axes, reason=f"{call.names[1]!r} is whole on every device", stored_zigzag=stored
        )
    if not isinstance(wanted, str):
        return _combined(call, wanted, stored)
    if wanted not in CHOICES:
        raise ArgumentError(
            f"flash_attention: context_parallel={wanted!r} is none of {', '.join(map(repr, CHOICES))}, nor a mapping "
            "from mesh axes to these."
        )
    if wanted == "ulysses":
        _check_ulysses(call, q_axes)
        return Strategy("ulysses", q_axes, q_axes, stored, "as asked for")
    if wanted == "zigzag":
        _check_halves(call, "context_parallel='zigzag'")
    if wanted == "auto":
        return _best(call, stored)
    mode: Mode = wanted  # pyright: ignore[reportAssignmentType]
    return Strategy(mode, q_axes, stored_zigzag=stored, reason="as asked for")


def _combined(call: SequenceCall, wanted: Mapping[str, str], stored: bool) -> Strategy:
    """One mode for each mesh axis."""
    axes = call.mesh_axes
    text = f"context_parallel={dict(wanted)!r}"
    if set(wanted) != set(axes):
        raise ArgumentError(
            f"flash_attention: {text} must name the mesh axes that shard {call.names[0]!r}, which are "
            f"{', '.join(map(repr, axes))}."
        )
    unknown = [m for m in wanted.values() if m not in ("ring", "zigzag", "allgather", "ulysses")]
    if unknown:
        raise ArgumentError(f"flash_attention: {text}: {unknown[0]!r} is none of ring, zigzag, allgather, ulysses.")
    swapped = tuple(m for m in axes if wanted[m] == "ulysses")
    rest = tuple(m for m in axes if m not in swapped)
    modes = {wanted[m] for m in rest}
    if len(modes) > 1 or (swapped and axes[len(rest) :] != swapped):
        raise UnsupportedOptionError(
            f"flash_attention: {text}: only 'ulysses' over the minor mesh axes goes with another mode over the major "
            f'ones; {call.names[0]!r} lies over {axes}, the major one first. Name the axes of "ulysses" last in the '
            "axis mapping."
        )
    if swapped:
        _check_ulysses(call, swapped)
    mode: Mode = modes.pop() if modes else "ulysses"  # pyright: ignore[reportAssignmentType]
    if mode == "zigzag":
        _check_halves(call, text)
    if stored and swapped and rest:
        raise UnsupportedOptionError(f"flash_attention: {text} does not go with sequence_layout='zigzag'.")
    return Strategy(mode, axes, swapped, stored, "as asked for")


def _best(call: SequenceCall, stored: bool) -> Strategy:
    axes, n = call.mesh_axes, call.shards
    if n * call.kv_bytes <= SMALL_BYTES:
        reason = f"all keys and values of a device's heads are {bytes_text(n * call.kv_bytes)}, less than steps cost"
        return Strategy("allgather", axes, stored_zigzag=stored, reason=reason)
    if stored:
        return Strategy("ring", axes, stored_zigzag=True, reason="the sequence lies in zigzag order")
    steps = call.ring_steps()
    if steps < n - 1:
        return Strategy("ring", axes, reason=f"the mask lets a query see no further than {steps} of {n} shards")
    ring = (n - 1) * call.kv_bytes
    swap = (call.kv_bytes + call.q_and_o_bytes) * (n - 1) // n
    if call.q_rows * call.group < HIDDEN_QUERIES and swap < ring and _ulysses_obstacle(call, axes) is None:
        reason = (
            f"moves {bytes_text(swap)} per device, a ring {bytes_text(ring)}, which {call.q_rows} queries on a device "
            "are too few to hide"
        )
        return Strategy("ulysses", axes, axes, reason=reason)
    if call.causal and call.q_rows % 2 == 0 and call.k_rows % 2 == 0:
        return Strategy("zigzag", axes, reason="the mask is causal: contiguous shards would have unequal work")
    if call.causal:
        return Strategy("ring", axes, reason=f"{call.q_rows} rows on a device cannot be halved for zigzag")
    return Strategy("ring", axes, reason="every query sees all keys, and all shards have the same work")


def _check_halves(call: SequenceCall, what: str) -> None:
    for name, rows in zip(call.names, (call.q_rows, call.k_rows), strict=True):
        if rows % 2:
            n = call.shards
            raise UnsupportedOptionError(
                f"flash_attention: {what} halves the {rows} rows of {name!r} on each of {n} devices, which cannot be. "
                f"Pad {name!r} to a multiple of {2 * n}, the next being {(rows + 1) * n}, or use 'ring'."
            )


def _check_ulysses(call: SequenceCall, axes: MeshAxes) -> None:
    obstacle = _ulysses_obstacle(call, axes)
    if obstacle is not None:
        raise UnsupportedOptionError(
            f"flash_attention: context_parallel='ulysses' {obstacle}. Use 'ring', 'zigzag' or 'allgather'."
        )


def _ulysses_obstacle(call: SequenceCall, axes: MeshAxes) -> str | None:
    n = call.over(axes)
    if call.pairs:
        return "takes neither bias nor an explicit mask, of which each device has the rows of its own queries only"
    if call.heads is None:
        return "needs an axis of key/value heads, one that query, key and value share"
    name, count = call.heads
    if count % n:
        over = mesh_axes_text(axes, dict(call.q_mesh_axes))
        return (
            f"gives each device over {over} some of the {count} heads of {name!r} that a device has, which {n} does "
            "not divide"
        )
    return None


def _code(mesh_axes: MeshAxes) -> str:
    return repr(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes)
