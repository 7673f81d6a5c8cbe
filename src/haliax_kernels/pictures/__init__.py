# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Pictures of a plan: which device holds which part of each array, and what each does at each step of a ring."""
