# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Register `pallas_flash` and `linear` with Levanter: enum members, the dispatcher, and how members are written down.

Levanter has no registry of attention backends. A member added to `AttentionBackend` alone would be a trap, because
the `match` in Levanter's dispatcher sends what it does not know to `jax_flash` in silence; so the dispatcher is hooked
first.
"""

from __future__ import annotations

import copyreg
import importlib
import logging
import sys
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import Any, Literal

import aenum
import draccus
from draccus.utils import DecodingError

from haliax_kernels.distributions import require_levanter
from haliax_kernels.levanter.config import nearest
from haliax_kernels.levanter.dispatch import BACKEND_VALUE, LINEAR_VALUE, make_dispatcher

logger = logging.getLogger(__name__)

_MEMBERS = {"PALLAS_FLASH": BACKEND_VALUE, "LINEAR": LINEAR_VALUE}

HookKind = Literal["wrapper", "rebound"]

_hook: HookKind | None = None


def register() -> HookKind:
    """Makes `pallas_flash` and `linear` attention backends of Levanter, for every model and whatever was imported
    before, and `linear_llama` a model type.

    A second call does nothing. The backends that Levanter has keep running Levanter's code.

    Returns:
        How the dispatcher was reached: `wrapper` (inside the function object that every module holds) or `rebound`
        (the name replaced in every Levanter module that holds it).

    Raises:
        RuntimeError: If this Levanter is not laid out in a way that can be hooked.
        DistributionError: If Levanter is not installed.
    """
    global _hook
    if _hook is None:
        require_levanter()
        import levanter.layers.attention as attention

        kind = _hook_dispatcher(attention)
        _add_members(attention.AttentionBackend)
        _register_codecs(attention.AttentionBackend)
        # Importing it registers the model type.
        importlib.import_module("haliax_kernels.levanter.linear_llama")
        logger.info("registered attention backends %s with Levanter (hook: %s)", ", ".join(_MEMBERS.values()), kind)
        _hook = kind
    return _hook


def _hook_dispatcher(attention: ModuleType) -> HookKind:
    function: Any = getattr(attention, "dot_product_attention", None)
    if function is None or not hasattr(attention, "AttentionBackend"):
        raise _cannot_hook(f"{attention.__name__} has no dot_product_attention with an AttentionBackend")
    try:
        cell = _wrapper_cell(function)
        if cell is not None:
            cell.cell_contents = make_dispatcher(cell.cell_contents)
            return "wrapper"
        _rebind(function, make_dispatcher(function))
    except RuntimeError as error:
        raise _cannot_hook(str(error)) from error
    return "rebound"


def _wrapper_cell(function: Any) -> Any | None:
    """The closure cell in which a wrapper, such as haliax's `named_call` makes, holds the function that it calls."""
    wrapped = getattr(function, "__wrapped__", None)
    cells = [cell for cell in getattr(function, "__closure__", None) or () if cell.cell_contents is wrapped]
    return cells[0] if wrapped is not None and len(cells) == 1 else None


def _rebind(function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "levanter" and getattr(module, "dot_product_attention", None) is function:
            module.dot_product_attention = replacement  # pyright: ignore[reportAttributeAccessIssue]


def _cannot_hook(found: str) -> RuntimeError:
    from importlib.metadata import version

    return RuntimeError(
        f"cannot add the attention backends {' and '.join(map(repr, _MEMBERS.values()))} to marin-levanter "
        f"{version('marin-levanter')}.\n"
        f"  found:    {found}\n"
        "  expected: levanter.layers.attention.dot_product_attention(QPos, KPos, Key, query, key, value, ..., "
        "attn_backend, ...) and the enum AttentionBackend beside it\n"
        "  - use a Levanter that is known to work:  pip install 'marin-levanter<=0.2.227'\n"
        "  - use the kernel without Levanter's switch:  haliax_kernels.flash_attention(...)"
    )


def _add_members(enum: Any) -> None:
    for name, value in _MEMBERS.items():
        existing = enum.__members__.get(name)
        if existing is None:
            aenum.extend_enum(enum, name, value)
        elif existing.value != value:
            raise _cannot_hook(f"AttentionBackend already has a {name}, with value {existing.value!r}")


def _register_codecs(enum: Any) -> None:
    def encode(value: str, declared_type: Any = None) -> str:
        # Draccus leaves an enum of strings as it is, and YAML then writes a Python object that it cannot read back.
        # This is for all such enums, because an encoder for `AttentionBackend` alone would not make a model's config
        # readable: its activation function is another one.
        return value.value if isinstance(value, Enum) else value

    def decode(raw: Any, path: Any = ()) -> Any:
        for member in enum:
            if raw in (member.value, member.name):
                return member
        values = [member.value for member in enum]
        raise DecodingError(
            path, f"unknown attention backend {raw!r};{nearest(str(raw), values)} there are: {', '.join(values)}"
        )

    # Draccus hangs its registries on plain functions, which a type checker cannot see.
    encoders: Any = draccus.encode
    decoders: Any = draccus.decode
    encoders.register(str, encode, include_subclasses=True)
    decoders.register(enum, decode)
    copyreg.pickle(enum, _reduce_member)


def _reduce_member(member: Any) -> tuple[Callable[[str], Any], tuple[str]]:
    return _member, (member.value,)


def _member(value: str) -> Any:
    """Finds a member for `pickle`, in a process that may not have registered yet."""
    register()
    from levanter.layers.attention import AttentionBackend

    return AttentionBackend(value)
