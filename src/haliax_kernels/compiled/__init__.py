# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Compile for TPUs that are not there, and read what the compiler made: collectives, kernels, cycles."""
