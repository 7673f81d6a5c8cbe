# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Run Pallas kernels on Haliax NamedArrays over device meshes: planned, checked, and never silently wrong."""

from haliax_kernels.errors import NamedKernelError as NamedKernelError
from haliax_kernels.kernel import NamedKernel as NamedKernel
from haliax_kernels.kernel import named_kernel as named_kernel
from haliax_kernels.plan import KernelPlan as KernelPlan
from haliax_kernels.policies import Gather as Gather
from haliax_kernels.policies import Local as Local
from haliax_kernels.policies import Parallel as Parallel
from haliax_kernels.policies import Sum as Sum

__version__ = "0.1.0.dev0"
