# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from typing import Any

from haliax_kernels.compiled.topologies import chip_count
from haliax_kernels.errors import UnsupportedOptionError


def add_config_command(commands: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    """Adds a command about a Levanter config, which hands arguments that it does not know on to Levanter."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="a config of Levanter's train_lm")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(takes_more=True)
    return parser


def topology(text: str) -> str:
    """The type of an argument that names TPU chips as they are connected."""
    try:
        chip_count(text)
    except UnsupportedOptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
