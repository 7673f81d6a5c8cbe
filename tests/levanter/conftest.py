# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the Levanter tests share: the registered backend, and a spy that says which attention ran."""

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest

import haliax_kernels


@dataclass
class Spy:
    """The keyword arguments of each call of our `flash_attention`, and how often Levanter's `jax_flash` ran."""

    ours: list[dict[str, Any]] = field(default_factory=list)
    jax_flash: int = 0


@pytest.fixture(scope="session")
def registered() -> type:
    """Registers after every model was imported; returns Levanter's enum of backends."""
    from levanter.models.lm_model import LmConfig

    from haliax_kernels.levanter import register

    LmConfig.get_known_choices()
    register()
    from levanter.layers.attention import AttentionBackend

    return AttentionBackend


@pytest.fixture
def spy(registered: type, monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen = Spy()
    ours = haliax_kernels.flash_attention
    # The module moved between the two generations of Levanter.
    found = importlib.util.find_spec("levanter.layers.flash_attention")
    theirs = importlib.import_module(found.name if found else "levanter.models.flash_attention")
    jax_flash = theirs.flash_attention

    def call_ours(*args, **kwargs):
        seen.ours.append(kwargs)
        return ours(*args, **kwargs)

    def call_theirs(*args, **kwargs):
        seen.jax_flash += 1
        return jax_flash(*args, **kwargs)

    monkeypatch.setattr(haliax_kernels, "flash_attention", call_ours)
    monkeypatch.setattr(theirs, "flash_attention", call_theirs)
    return seen
