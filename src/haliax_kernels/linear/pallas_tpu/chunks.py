# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The decays of a block's chunks, from a kernel's references."""

from typing import Any

from haliax_kernels.linear.pallas_tpu.channel import ChannelDecay
from haliax_kernels.linear.pallas_tpu.decay import NoDecay, TokenDecay
from haliax_kernels.linear.pallas_tpu.plan import Plan


def chunk_decay(plan: Plan, refs: dict[str, Any], c: int) -> NoDecay | TokenDecay | ChannelDecay:
    """Of the block's chunk `c`."""
    if plan.decay == "none":
        return NoDecay(plan)
    if plan.decay == "token":
        return TokenDecay(plan, refs["rows"][c])
    return ChannelDecay(plan, refs["log"][plan.rows(c), :])
