# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The `kernels:` block of a Levanter config: what it may say, and the options now in force."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from haliax_kernels.context.strategy import CHOICES, ContextParallel
from haliax_kernels.errors import NamedKernelError
from haliax_kernels.linear.feature_maps import Name as LinearFeatureMap
from haliax_kernels.linear.feature_maps import needs_normalizer

Implementation = Literal["pallas_tpu", "splash", "pallas_gpu", "xla"]
OnUnsupported = Literal["error", "fallback"]

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "context_parallel": CHOICES,
    "implementation": (None, "pallas_tpu", "splash", "pallas_gpu", "xla"),
    "on_unsupported": ("error", "fallback"),
    "linear_feature_map": get_args(LinearFeatureMap),
}
_MODES = tuple(mode for mode in CHOICES if mode not in ("auto", "error"))
_BLOCKS = ("block_q", "block_k")
_SWITCHES = ("default_backend", "linear_normalize")


class KernelsConfigError(NamedKernelError):
    """The `kernels:` block of a config, or the launcher's command line, is wrong; the message is one line."""


@dataclass(frozen=True)
class KernelsConfig:
    """How the backends `pallas_flash` and `linear` run; the `kernels:` block of a Levanter YAML file.

    Attributes:
        context_parallel: How the shards of a sharded sequence work together, as in `haliax_kernels.flash_attention`;
            a mapping gives each mesh axis its own mode.
        implementation: The attention implementation to insist on; None takes the best one for the platform.
        block_q: Query block size; None leaves it to the model's `flash_attention_block_size`, then to the kernel.
        block_k: Key block size, likewise. When only one of the two is given, it holds for both.
        on_unsupported: What to do when the model asks for something that the kernel cannot do. `error` stops;
            `fallback` runs Levanter's `vanilla` attention instead, with one warning per reason.
        linear_feature_map: For `linear`, what queries and keys go through, as in `haliax_kernels.linear_attention`.
        linear_normalize: For `linear`, whether results are divided by the normaliser; off, they are scaled by
            1/sqrt(head size).
        default_backend: Makes an unset or `default` backend mean `pallas_flash`. Whisper needs it, together with
            `model.use_flash_attention: true`, because it ignores `model.attn_backend`.
    """

    context_parallel: ContextParallel = "auto"
    implementation: Implementation | None = None
    block_q: int | None = None
    block_k: int | None = None
    on_unsupported: OnUnsupported = "error"
    default_backend: bool = False
    linear_feature_map: LinearFeatureMap = "elu+1"
    linear_normalize: bool = True

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if name == "context_parallel" and isinstance(value, Mapping):
                for mesh_axis, mode in value.items():
                    _check_choice(f"{name}.{mesh_axis}", mode, _MODES)
            else:
                _check_choice(name, value, allowed)
        for name in _BLOCKS:
            value = getattr(self, name)
            # bool is an int in Python, and `block_q: true` is a slip.
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
                raise KernelsConfigError(f"kernels.{name}: {value!r} is not a positive integer or null.")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise KernelsConfigError(f"kernels.{name}: {getattr(self, name)!r} is not true or false.")
        if needs_normalizer(self.linear_feature_map) and not self.linear_normalize:
            raise KernelsConfigError(
                f"kernels.linear_feature_map: {self.linear_feature_map} needs kernels.linear_normalize: true."
            )

    @classmethod
    def from_mapping(cls, block: Mapping[str, Any] | None) -> KernelsConfig:
        """Makes the options from a parsed `kernels:` block.

        Args:
            block: The block as YAML gives it; None, as an empty block gives, means the defaults.

        Raises:
            KernelsConfigError: If the block is no mapping, or a key or value is not allowed.
        """
        if block is None:
            return cls()
        keys = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(block, Mapping):
            raise KernelsConfigError(f"kernels: expected a mapping with keys {', '.join(keys)}; got {block!r}.")
        for key in block:
            if key not in keys:
                raise KernelsConfigError(
                    f"kernels.{key}: unknown key;{nearest(str(key), keys)} allowed: {', '.join(keys)}."
                )
        return cls(**block)


def nearest(word: str, choices: list[str]) -> str:
    """The hint ` did you mean X?` for the choice nearest to `word`, or an empty string when none is near."""
    close = difflib.get_close_matches(word.lower(), choices, n=1)
    return f" did you mean {close[0]!r}?" if close else ""


def _check_choice(name: str, value: object, allowed: tuple[str | None, ...]) -> None:
    if value in allowed:
        return
    named = [choice for choice in allowed if choice is not None]
    shown = ", ".join("null" if choice is None else choice for choice in allowed)
    raise KernelsConfigError(f"kernels.{name}: unknown value {value!r};{nearest(str(value), named)} allowed: {shown}.")


_current = KernelsConfig()


def current_options() -> KernelsConfig:
    """The options in force, read while tracing: a function already compiled keeps those it was traced with."""
    return _current


def set_options(options: KernelsConfig) -> None:
    """Puts `options` in force for the whole process."""
    global _current
    _current = options


@contextmanager
def use_options(options: KernelsConfig) -> Iterator[KernelsConfig]:
    """Puts `options` in force inside a `with` block, for all threads of the process."""
    previous = current_options()
    set_options(options)
    try:
        yield options
    finally:
        set_options(previous)
