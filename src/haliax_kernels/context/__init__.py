# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0
