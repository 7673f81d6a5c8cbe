# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention masks: our own small class, and the reading of any object with Levanter's `AttentionMask` fields."""

from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import haliax
from haliax import Axis, NamedArray

from haliax_kernels import _compat
from haliax_kernels.errors import ArgumentError


class AttentionMask(eqx.Module):
    """A mask as structure, for those who use Haliax without Levanter; its fields are those of Levanter's class.

    A query sees the keys that every part of the mask lets it see.

    Attributes:
        is_causal: query i sees keys j <= i, both counted from the start, also where the lengths differ.
        causal_offset: the query sees `causal_offset` keys more (fewer, where it is negative); only with `is_causal`.
        explicit_mask: a boolean array with the position axes, and any others.
        segment_ids: (ids of the queries, ids of the keys), int32, each with its position axis and any loop axes. A
            query sees the keys of its own id only. The keys' ids may name their axis as the queries do.
        sliding_window: a query sees itself and the `sliding_window - 1` keys before it.
        bidirectional_window: a query sees keys at most that many positions away, before and after.
    """

    is_causal: bool = eqx.field(default=False, static=True)
    causal_offset: NamedArray | int | None = None
    explicit_mask: NamedArray | None = None
    segment_ids: tuple[NamedArray, NamedArray] | None = None
    sliding_window: int | None = eqx.field(default=None, static=True)
    bidirectional_window: int | None = eqx.field(default=None, static=True)

    @staticmethod
    def causal(
        segment_ids: NamedArray | tuple[NamedArray, NamedArray] | None = None,
        *,
        offset: NamedArray | int | None = None,
        sliding_window: int | None = None,
    ) -> "AttentionMask":
        """A causal mask, within segments if ids are given (one array serves queries and keys)."""
        if isinstance(segment_ids, NamedArray):
            segment_ids = (segment_ids, segment_ids)
        return AttentionMask(
            is_causal=True, causal_offset=offset, segment_ids=segment_ids, sliding_window=sliding_window
        )


@dataclass(frozen=True)
class MaskParts:
    """A mask taken apart: what `AttentionOptions` and `AttentionOperands` say of it.

    Attributes:
        left: how many earlier keys a query sees; None for all.
        right: how many later ones; None for all.
        q_offset: what is added to the queries' positions; None for nothing.
        q_segment_ids: ids with the query's position axis.
        k_segment_ids: ids with the key's position axis.
        explicit: a boolean array with both position axes.
    """

    left: int | None = None
    right: int | None = None
    q_offset: NamedArray | None = None
    q_segment_ids: NamedArray | None = None
    k_segment_ids: NamedArray | None = None
    explicit: NamedArray | None = None


def read_mask(mask: Any, q_pos: Axis, k_pos: Axis) -> MaskParts:
    """Take apart None, a NamedArray (an explicit mask), or an object with the fields of Levanter's `AttentionMask`.

    Raises:
        ArgumentError: for anything else, or a window that is not positive.
    """
    if mask is None:
        return MaskParts()
    if isinstance(mask, NamedArray):
        return MaskParts(explicit=mask)
    if not hasattr(mask, "is_causal"):
        raise ArgumentError(
            f"flash_attention: mask is a {type(mask).__name__}; expected None, a NamedArray, "
            "haliax_kernels.AttentionMask, or an object with the fields of Levanter's AttentionMask."
        )
    parts = MaskParts(explicit=getattr(mask, "explicit_mask", None))
    sliding, bidirectional = (_window(mask, name) for name in ("sliding_window", "bidirectional_window"))
    if sliding is not None:
        parts = _narrowed(parts, sliding - 1, 0)
    if bidirectional is not None:
        parts = _narrowed(parts, bidirectional, bidirectional)
    if mask.is_causal:
        parts = _causal(parts, getattr(mask, "causal_offset", None), q_pos, k_pos)
    ids = getattr(mask, "segment_ids", None)
    if ids is None:
        return parts
    q_ids, k_ids = ids if isinstance(ids, tuple) else (ids, ids)
    if k_pos.name not in (a.name for a in k_ids.axes):
        k_ids = k_ids.rename({q_pos.name: k_pos.name})
    return replace(parts, q_segment_ids=q_ids, k_segment_ids=k_ids)


def _window(mask: Any, name: str) -> int | None:
    size = getattr(mask, name, None)
    least = 1 if name == "sliding_window" else 0
    if size is not None and size < least:
        raise ArgumentError(f"flash_attention: {name}={size} lets no query see anything; it must be at least {least}.")
    return size


def _narrowed(parts: MaskParts, left: int | None, right: int | None) -> MaskParts:
    def least(a: int | None, b: int | None) -> int | None:
        return b if a is None else a if b is None else min(a, b)

    return replace(parts, left=least(parts.left, left), right=least(parts.right, right))


def _causal(parts: MaskParts, offset: Any, q_pos: Axis, k_pos: Axis) -> MaskParts:
    array = offset.array if isinstance(offset, NamedArray) else offset
    if array is None or isinstance(array, int):
        return _narrowed(parts, None, array or 0)
    known = _compat.concrete_array(array)
    if known is not None and known.ndim == 0:
        return _narrowed(parts, None, int(known))
    named = offset if isinstance(offset, NamedArray) else haliax.named(array, ())
    if parts.left is not None or parts.right is not None:
        # A window counts from where the query is, the causal part from an offset that only the running program knows.
        distance = haliax.arange(k_pos).broadcast_axis(q_pos) - haliax.arange(q_pos)
        inside = distance <= (k_pos.size if parts.right is None else parts.right)
        inside = inside & (distance >= -(q_pos.size if parts.left is None else parts.left))
        parts = MaskParts(explicit=inside if parts.explicit is None else inside & parts.explicit)
    return replace(parts, right=0, q_offset=named)
