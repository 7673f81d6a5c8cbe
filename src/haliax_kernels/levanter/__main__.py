# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Run one of Levanter's mains with `pallas_flash` registered: `python -m haliax_kernels.levanter train_lm ...`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import runpy
import sys
import tempfile
from pathlib import Path

from haliax_kernels.cpu_devices import device_count, use_cpu_devices
from haliax_kernels.distributions import DistributionError, require_levanter
from haliax_kernels.levanter.config import KernelsConfig, KernelsConfigError, nearest, set_options
from haliax_kernels.levanter.config_files import LauncherConfig, read_launcher_config

_PROG = "python -m haliax_kernels.levanter"

_EPILOG = f"""\
All other arguments go to the Levanter main (`{_PROG} train_lm -- --help` shows them).
Two top-level keys of the config are for this launcher:
  kernels: {{{", ".join(field.name for field in dataclasses.fields(KernelsConfig))}}}
           also as arguments, for example --kernels.on_unsupported fallback
  tiny_corpus: DIR
           make a small corpus and a byte-level tokenizer in DIR if they are not there yet
"""


def main(argv: list[str] | None = None) -> None:
    """Runs the launcher; `argv` is the command line without the program's name."""
    names = levanter_mains()
    args, rest = _parser(names).parse_known_args(argv)
    if rest[:1] == ["--"]:
        rest = rest[1:]
    try:
        require_levanter()
        _check_name(args.name, names)
        if args.devices is not None:
            use_cpu_devices(args.devices)
        with tempfile.TemporaryDirectory(prefix="haliax_kernels_") as copies:
            _run(args.name, read_launcher_config(rest, Path(copies)))
    except (KernelsConfigError, DistributionError) as error:
        _stop(str(error))


def levanter_mains() -> list[str]:
    """The modules of `levanter.main`, found without importing Levanter (which takes seconds, and imports JAX)."""
    spec = importlib.util.find_spec("levanter")
    if spec is None or not spec.submodule_search_locations:
        return []
    folders = [Path(location) / "main" for location in spec.submodule_search_locations]
    return sorted(path.stem for folder in folders for path in folder.glob("*.py") if path.stem != "__init__")


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} MAIN [--devices N] [--config_path FILE] [arguments of the main]",
        description="Run one of Levanter's mains with the attention backend pallas_flash registered.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="MAIN", help=f"one of {', '.join(names) or '(Levanter is not installed)'}")
    parser.add_argument("--devices", type=device_count, metavar="N", help="run on N CPU devices of this machine")
    return parser


def _check_name(name: str, names: list[str]) -> None:
    if name not in names:
        raise KernelsConfigError(
            f"Levanter has no main {name!r};{nearest(name, names)} there are: {', '.join(names)}."
        )


def _run(name: str, config: LauncherConfig) -> None:
    if config.tiny_corpus is not None:
        from haliax_kernels.levanter.tiny_corpus import make_tiny_corpus

        make_tiny_corpus(config.tiny_corpus)

    from draccus.utils import DecodingError

    from haliax_kernels.levanter.backend import register

    hook = register()
    set_options(config.kernels)
    print(f"haliax_kernels: pallas_flash registered (hook: {hook}); {config.kernels}", file=sys.stderr)
    sys.argv = [name, *config.args]
    try:
        runpy.run_module(f"levanter.main.{name}", run_name="__main__", alter_sys=True)
    except DecodingError as error:
        # Levanter has read a copy of the file, and its message would name none.
        _stop(f"{', '.join(config.files) or 'command line'}: {error}")


def _stop(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
