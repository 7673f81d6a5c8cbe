# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Linear attention: kernels of one contract, feature maps, and the law by which states compose."""
