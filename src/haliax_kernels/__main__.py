# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`python -m haliax_kernels`: the same as the command `haliax-kernels`."""

from haliax_kernels.cli.main import main

if __name__ == "__main__":
    main()
