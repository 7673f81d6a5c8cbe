# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What a linear attention in a Levanter config may say, and which of Levanter's masks it can honour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from haliax import Axis, NamedArray

from haliax_kernels.attention.mask import read_mask
from haliax_kernels.errors import ArgumentError, UnsupportedOptionError
from haliax_kernels.linear.backends import IMPLEMENTATIONS
from haliax_kernels.linear.feature_maps import check_name, needs_normalizer

Decay = Literal["none", "head", "token", "channel"]


@dataclass(frozen=True)
class LinearAttentionConfig:
    """How the attention of a `linear_llama` computes; the `model.linear:` block of a Levanter YAML file.

    Attributes:
        feature_map: what queries and keys go through: `elu+1`, `relu`, `identity` or `exp`.
        normalize: whether results are divided by the normaliser. Off, they are scaled by 1/sqrt(head size).
        decay: `none`; `head`, a constant for each head, 1 - 2^-5 and slower for later ones (RetNet, Sun et al. 2023,
            https://arxiv.org/abs/2307.08621, equation 8); `token`, learned from each token for each head; `channel`,
            learned from each token for each key channel (GLA, Yang et al. 2024, https://arxiv.org/abs/2312.06635,
            equation 4 without the bottleneck).
        gate_temperature: what the logarithms of learned decays are divided by, so that they begin near 1.
        delta_rule: the gated delta rule, with a learned beta and keys of length 1. Needs `normalize: false` and a
            sequence that is not sharded.
        chunk_size: tokens per chunk; None for what suits.
        implementation: the implementation to insist on; None takes the best one for the platform.
    """

    feature_map: str = "elu+1"
    normalize: bool = True
    decay: str = "none"
    gate_temperature: float = 16.0
    delta_rule: bool = False
    chunk_size: int | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        check_name(self.feature_map)  # pyright: ignore[reportArgumentType]
        if self.decay not in get_args(Decay):
            raise ArgumentError(f"linear.decay={self.decay!r} is none of {', '.join(map(repr, get_args(Decay)))}.")
        if needs_normalizer(self.feature_map) and not self.normalize:  # pyright: ignore[reportArgumentType]
            raise ArgumentError(f"linear.feature_map: {self.feature_map} needs linear.normalize: true.")
        if self.delta_rule and self.normalize:
            raise ArgumentError("linear.delta_rule: its results have no normaliser; set linear.normalize: false.")
        for name in ("normalize", "delta_rule"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"linear.{name}: {getattr(self, name)!r} is not true or false.")
        if isinstance(self.gate_temperature, bool) or not isinstance(self.gate_temperature, int | float):
            raise ArgumentError(f"linear.gate_temperature: {self.gate_temperature!r} is not a number.")
        if not self.gate_temperature > 0:
            raise ArgumentError(f"linear.gate_temperature={self.gate_temperature!r} must be positive.")
        size = self.chunk_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size <= 0):
            raise ArgumentError(f"linear.chunk_size: {size!r} is not a positive integer or null.")
        known = [i.name for i in IMPLEMENTATIONS]
        if self.implementation is not None and self.implementation not in known:
            raise ArgumentError(
                f"linear.implementation: {self.implementation!r} is none of {', '.join(known)}, or null for the best."
            )


def causal_segments(mask: Any, Pos: Axis, who: str) -> NamedArray | None:
    """The segment ids of a causal mask.

    Args:
        mask: one of Levanter's.
        Pos: the position axis of queries and keys.
        who: the user of the mask, for messages.

    Raises:
        UnsupportedOptionError: the mask is not causal, or more than that.
    """
    parts = read_mask(mask, Pos, Pos)
    reasons = {
        "an explicit mask": parts.explicit is not None,
        "a sliding window": parts.left is not None,
        "a causal offset": parts.q_offset is not None or parts.right not in (None, 0),
        "a mask that is not causal": parts.explicit is None and parts.right is None,
    }
    found = [name for name, there in reasons.items() if there]
    if found:
        raise UnsupportedOptionError(
            f"{who}: linear attention sees all tokens before, of the same segment, and no others; the model asks for "
            f"{' and '.join(found)}. Use pallas_flash for it."
        )
    return parts.q_segment_ids
