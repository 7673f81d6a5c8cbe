# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Take this package's keys out of a Levanter command line and its YAML files, which Levanter would reject."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from haliax_kernels.levanter.config import KernelsConfig, KernelsConfigError

_CONFIG_FLAGS = ("--config_path", "--config", "--configs")
_KERNELS_FLAG = "--kernels."
_KERNELS, _TINY_CORPUS = "kernels", "tiny_corpus"


@dataclass(frozen=True)
class LauncherConfig:
    """What the launcher took out, and what is left for Levanter.

    Attributes:
        args: Levanter's own command line, naming copies of the files that had keys of ours.
        kernels: The options of the `kernels:` block, with those of the command line over them.
        tiny_corpus: The folder to fill with the tiny corpus, if the config asks for it.
        files: The config files as the user named them.
    """

    args: list[str]
    kernels: KernelsConfig
    tiny_corpus: str | None
    files: list[str]


@dataclass
class _Taken:
    kernels: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    tiny_corpus: str | None = None


def read_launcher_config(args: list[str], copies: Path) -> LauncherConfig:
    """Reads our keys from the config files that `args` names, and from arguments such as `--kernels.block_q 128`.

    Args:
        args: Levanter's command line.
        copies: A folder for the copies without our keys. A file without any is handed on as it is.

    Raises:
        KernelsConfigError: If a file cannot be read, or says something of ours that is not allowed.
    """
    left: list[str] = []
    files: list[str] = []
    taken = _Taken()
    reading_files = False
    pending = iter(_split_equals(args))
    for arg in pending:
        if arg.startswith(_KERNELS_FLAG):
            override = {arg.removeprefix(_KERNELS_FLAG): _parse_value(arg, next(pending, None))}
            _check_block(override, "command line")
            taken.overrides.update(override)
            reading_files = False
        elif arg.startswith("-"):
            reading_files = arg in _CONFIG_FLAGS
            left.append(arg)
        elif reading_files:
            files.append(arg)
            left.append(_strip_file(arg, taken, copies))
        else:
            left.append(arg)
    kernels = KernelsConfig.from_mapping({**taken.kernels, **taken.overrides})
    return LauncherConfig(args=left, kernels=kernels, tiny_corpus=taken.tiny_corpus, files=files)


def _check_block(block: Any, where: str) -> None:
    try:
        KernelsConfig.from_mapping(block)
    except KernelsConfigError as error:
        raise KernelsConfigError(f"{where}: {error}") from None


def _split_equals(args: list[str]) -> list[str]:
    """Writes `--config_path=X` and `--kernels.a=X` as two words, the only form that Levanter reads for a config."""
    words: list[str] = []
    for arg in args:
        flag, equals, value = arg.partition("=")
        ours = flag in _CONFIG_FLAGS or flag.startswith(_KERNELS_FLAG)
        words.extend([flag, value] if equals and ours else [arg])
    return words


def _parse_value(flag: str, text: str | None) -> Any:
    from draccus import cfgparsing

    if text is None:
        raise KernelsConfigError(f"command line: {flag} needs a value.")
    return cfgparsing.parse_string(text)


def _strip_file(name: str, taken: _Taken, copies: Path) -> str:
    content = _load(name)
    if not isinstance(content, dict) or not content.keys() & {_KERNELS, _TINY_CORPUS}:
        return name
    block = content.pop(_KERNELS, None)
    _check_block(block, name)
    taken.kernels.update(block or {})
    corpus = content.pop(_TINY_CORPUS, None)
    if corpus is not None and not isinstance(corpus, str):
        raise KernelsConfigError(f"{name}: tiny_corpus: expected the path of a folder; got {corpus!r}.")
    taken.tiny_corpus = corpus or taken.tiny_corpus

    import yaml

    with tempfile.NamedTemporaryFile(
        "w", dir=copies, prefix=f"{Path(name).stem}-", suffix=".yaml", delete=False, encoding="utf-8"
    ) as copy:
        yaml.dump(content, copy, sort_keys=False)
    return copy.name


def _load(name: str) -> Any:
    from draccus import cfgparsing
    from draccus.utils import ParsingError

    try:
        if urlparse(name).scheme:
            import fsspec

            with fsspec.open(name, "r") as remote:
                return cfgparsing.load_config(remote, file=name)  # pyright: ignore[reportArgumentType]
        path = _find(name)
        with path.open(encoding="utf-8") as local:
            return cfgparsing.load_config(local, file=path)
    except OSError as error:
        raise KernelsConfigError(f"cannot read the config {name}: {error.strerror or error}") from error
    except ParsingError as error:
        # The cause is the parser's own message, which spreads over several lines.
        reason = " ".join(str(error.__cause__ or error).split())
        raise KernelsConfigError(f"cannot read the config {name}: {reason}") from error


def _find(name: str) -> Path:
    """The file that Levanter would take for `name`, if it is not one of those that Levanter ships."""
    for candidate in (name, f"{name}.yaml", f"{name}.yml"):
        if Path(candidate).is_file():
            return Path(candidate)
    return Path(name)
