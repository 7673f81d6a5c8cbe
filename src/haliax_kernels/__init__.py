# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Run Pallas kernels on Haliax NamedArrays over device meshes: planned, checked, and never silently wrong."""

from haliax_kernels.distributions import refuse_old_distributions

# Before anything imports haliax: which of two distributions answers to that name would be chance.
refuse_old_distributions()

from haliax_kernels.attention.block_sizes import BlockSizes as BlockSizes
from haliax_kernels.attention.flash import flash_attention as flash_attention
from haliax_kernels.attention.flash import flash_attention_plan as flash_attention_plan
from haliax_kernels.attention.mask import AttentionMask as AttentionMask
from haliax_kernels.attention.plain import plain_flash_attention as plain_flash_attention
from haliax_kernels.context.zigzag import from_zigzag_layout as from_zigzag_layout
from haliax_kernels.context.zigzag import zigzag_layout as zigzag_layout
from haliax_kernels.errors import ArgumentError as ArgumentError
from haliax_kernels.errors import AxisSizeError as AxisSizeError
from haliax_kernels.errors import BindingError as BindingError
from haliax_kernels.errors import InconsistentShardingError as InconsistentShardingError
from haliax_kernels.errors import ManualAxisError as ManualAxisError
from haliax_kernels.errors import MeshAxisConflictError as MeshAxisConflictError
from haliax_kernels.errors import MissingShardingError as MissingShardingError
from haliax_kernels.errors import MultipleOfError as MultipleOfError
from haliax_kernels.errors import NamedKernelError as NamedKernelError
from haliax_kernels.errors import NoImplementationError as NoImplementationError
from haliax_kernels.errors import OutputError as OutputError
from haliax_kernels.errors import PolicyError as PolicyError
from haliax_kernels.errors import ShardedAxisError as ShardedAxisError
from haliax_kernels.errors import SignatureError as SignatureError
from haliax_kernels.errors import TransformError as TransformError
from haliax_kernels.errors import UnevenShardingError as UnevenShardingError
from haliax_kernels.errors import UnknownMeshAxisError as UnknownMeshAxisError
from haliax_kernels.errors import UnsupportedOptionError as UnsupportedOptionError
from haliax_kernels.kernel import NamedKernel as NamedKernel
from haliax_kernels.kernel import named_kernel as named_kernel
from haliax_kernels.linear.call import LinearAttentionState as LinearAttentionState
from haliax_kernels.linear.linear_attention import linear_attention as linear_attention
from haliax_kernels.linear.linear_attention import linear_attention_plan as linear_attention_plan
from haliax_kernels.linear.linear_attention import linear_attention_step as linear_attention_step
from haliax_kernels.plan import KernelPlan as KernelPlan
from haliax_kernels.policies import Gather as Gather
from haliax_kernels.policies import Halo as Halo
from haliax_kernels.policies import Local as Local
from haliax_kernels.policies import Manual as Manual
from haliax_kernels.policies import Parallel as Parallel
from haliax_kernels.policies import Sum as Sum
from haliax_kernels.shard_context import ShardContext as ShardContext

__version__ = "0.1.0.dev0"
