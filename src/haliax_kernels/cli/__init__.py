# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: `haliax-kernels`, or `python -m haliax_kernels`."""
