# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Blockwise attention in plain XLA operations, for every platform: the whole contract, in memory linear in the length.

A mask and a bias are quadratic themselves, and so is the bias' gradient. NaN or infinities in a key or query that
is hidden from everything in its block stay there; one that something sees can spoil its block, as in dense attention.
"""

from haliax_kernels.attention.xla._attention import attention as attention
from haliax_kernels.attention.xla._backward import backward as backward
from haliax_kernels.attention.xla._forward import forward as forward
