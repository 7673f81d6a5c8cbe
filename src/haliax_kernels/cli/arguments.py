# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Arguments that several commands have."""

from __future__ import annotations

import argparse

from haliax_kernels.compiled.topologies import chip_count
from haliax_kernels.errors import UnsupportedOptionError


def topology(text: str) -> str:
    """The type of an argument that names TPU chips as they are connected."""
    try:
        chip_count(text)
    except UnsupportedOptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
