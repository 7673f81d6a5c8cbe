# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention masks: our own small class, and the reading of any object with Levanter's `AttentionMask` fields."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
from haliax import NamedArray

from haliax_kernels.errors import ArgumentError


class AttentionMask(eqx.Module):
    """A mask as structure, for those who use Haliax without Levanter; its fields are those of Levanter's class.

    Attributes:
        is_causal: query i sees keys j <= i, both counted from the start, also where the lengths differ.
        segment_ids: (ids of the queries, ids of the keys), int32, each with its position axis and any loop axes. A
            query sees the keys of its own id only. The keys' ids may name their axis as the queries do.
    """

    is_causal: bool = eqx.field(default=False, static=True)
    segment_ids: tuple[NamedArray, NamedArray] | None = None

    @staticmethod
    def causal(segment_ids: NamedArray | tuple[NamedArray, NamedArray] | None = None) -> "AttentionMask":
        """A causal mask, within segments if ids are given (one array serves queries and keys)."""
        if isinstance(segment_ids, NamedArray):
            segment_ids = (segment_ids, segment_ids)
        return AttentionMask(is_causal=True, segment_ids=segment_ids)


@dataclass(frozen=True)
class MaskParts:
    """A mask taken apart.

    Attributes:
        is_causal: as in `AttentionMask`.
        q_segment_ids: ids with the query's position axis.
        k_segment_ids: ids with the key's position axis.
        others: names of further parts that the mask has, such as `sliding_window`.
    """

    is_causal: bool
    q_segment_ids: NamedArray | None
    k_segment_ids: NamedArray | None
    others: tuple[str, ...]


def read_mask(mask: Any, q_pos: str, k_pos: str) -> MaskParts:
    """Take apart None, a NamedArray (an explicit mask), or an object with the fields of Levanter's `AttentionMask`.

    Raises:
        ArgumentError: for anything else.
    """
    if mask is None:
        return MaskParts(False, None, None, ())
    if isinstance(mask, NamedArray):
        return MaskParts(False, None, None, ("explicit mask",))
    if not hasattr(mask, "is_causal"):
        raise ArgumentError(
            f"flash_attention: mask is a {type(mask).__name__}; expected None, a NamedArray, "
            "haliax_kernels.AttentionMask, or an object with the fields of Levanter's AttentionMask."
        )
    others = [
        name.replace("explicit_mask", "explicit mask")
        for name in ("explicit_mask", "sliding_window", "bidirectional_window")
        if getattr(mask, name, None) is not None
    ]
    if mask.is_causal and getattr(mask, "causal_offset", None) is not None:
        others.append("causal_offset")
    q_ids = k_ids = None
    ids = getattr(mask, "segment_ids", None)
    if ids is not None:
        q_ids, k_ids = ids if isinstance(ids, tuple) else (ids, ids)
        if k_pos not in (a.name for a in k_ids.axes):
            k_ids = k_ids.rename({q_pos: k_pos})
    return MaskParts(bool(mask.is_causal), q_ids, k_ids, tuple(others))
