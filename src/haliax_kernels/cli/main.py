# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The commands and their arguments."""

from __future__ import annotations

import argparse
import sys

from haliax_kernels.cli import doctor, plan, preflight
from haliax_kernels.distributions import DistributionError
from haliax_kernels.errors import NamedKernelError


def main(argv: list[str] | None = None) -> None:
    """Runs a command and exits with its status; `argv` is the command line without the program's name."""
    parser = argparse.ArgumentParser(
        prog="haliax-kernels",
        description="See what the kernels of a training run will do, before it runs.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (plan, preflight, doctor):
        module.add_parser(commands)
    args, rest = parser.parse_known_args(argv)
    if rest and not args.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status = args.run(args, rest)
    except (NamedKernelError, DistributionError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)
