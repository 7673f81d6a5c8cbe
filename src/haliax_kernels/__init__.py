# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

__version__ = "0.1.0.dev0"
