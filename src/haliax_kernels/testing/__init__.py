# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Check a kernel: the same values and gradients under every sharding that it accepts."""

from haliax_kernels.compiled.topologies import topology_mesh as topology_mesh
from haliax_kernels.testing.check import check_kernel as check_kernel
from haliax_kernels.testing.report import CheckReport as CheckReport
from haliax_kernels.testing.report import KernelCheckError as KernelCheckError
