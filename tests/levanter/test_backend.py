# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

import copy
import dataclasses
import io
import pickle
import subprocess
import sys
import types
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata

import draccus
import pytest

from haliax_kernels import distributions
from haliax_kernels.levanter import backend, register

pytestmark = pytest.mark.levanter


def model_types() -> dict[str, type]:
    """Levanter's model types that let the user choose an attention backend."""
    from levanter.models.lm_model import LmConfig

    choices = LmConfig.get_known_choices()
    return {n: c for n, c in choices.items() if "attn_backend" in {f.name for f in dataclasses.fields(c)}}


def test_the_member_is_a_real_one(registered):
    member = registered.PALLAS_FLASH
    assert member is registered("pallas_flash") is registered["PALLAS_FLASH"]
    assert isinstance(member, registered)
    assert member in registered
    assert list(registered).count(member) == 1
    assert member == "pallas_flash"
    assert str(member) == "pallas_flash"
    assert len({member, registered.VANILLA}) == 2


def test_registering_again_changes_nothing(registered):
    import levanter.layers.attention as attention

    def state():
        cells = [cell.cell_contents for cell in attention.dot_product_attention.__closure__]
        return attention.dot_product_attention, cells, list(registered)

    before = state()
    assert register() == "wrapper"
    assert state() == before


@pytest.mark.parametrize("written", ["pallas_flash", "PALLAS_FLASH"])
def test_every_model_type_decodes_it_from_yaml(registered, written):
    from levanter.models.lm_model import LmConfig

    types_ = model_types()
    assert {"llama", "gpt2", "gemma", "whisper", "olmo2", "qwen3", "mixtral"} <= types_.keys()
    for name, config_class in types_.items():
        config = draccus.decode(LmConfig, {"type": name, "attn_backend": written})
        assert type(config) is config_class
        assert config.attn_backend is registered.PALLAS_FLASH


@pytest.mark.parametrize("written", ["pallas_flash", "PALLAS_FLASH"])
def test_every_model_type_decodes_it_from_the_command_line(registered, written):
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmConfig

    @dataclass
    class Config:
        model: LmConfig = field(default_factory=LlamaConfig)

    for name in model_types():
        config = draccus.parse(Config, args=["--model.type", name, "--model.attn_backend", written])
        assert config.model.attn_backend is registered.PALLAS_FLASH


def test_an_unknown_name_lists_those_there_are(registered):
    from levanter.models.lm_model import LmConfig

    with pytest.raises(draccus.ParsingError) as error:
        draccus.decode(LmConfig, {"type": "llama", "attn_backend": "pallas_flush"})
    assert "unknown attention backend 'pallas_flush'; did you mean 'pallas_flash'?" in str(error.value)
    for member in registered:
        assert member.value in str(error.value)


def test_a_dumped_config_loads_again(registered):
    from levanter.models.gpt2 import Gpt2Config
    from levanter.models.llama import LlamaConfig

    for config_class in (LlamaConfig, Gpt2Config):
        for member in [*registered, None]:
            config = config_class(attn_backend=member)
            text = draccus.dump(config)
            assert "!!python" not in text
            assert draccus.load(config_class, io.StringIO(text)) == config


def test_copies_are_the_same_member(registered):
    for member in registered:
        assert copy.deepcopy(member) is member
        assert pickle.loads(pickle.dumps(member)) is member


@pytest.mark.slow
def test_a_fresh_process_unpickles_it_and_reaches_modules_imported_later(registered):
    from levanter.models.llama import LlamaConfig

    pickled = pickle.dumps([LlamaConfig(attn_backend=registered.PALLAS_FLASH), registered.VANILLA])
    script = f"""
import pickle, sys
config, vanilla = pickle.loads({pickled!r})
assert repr(config.attn_backend) == "<AttentionBackend.PALLAS_FLASH: 'pallas_flash'>"
assert vanilla is type(vanilla).VANILLA
import levanter.models.gpt2, levanter.models.olmo, levanter.models.whisper
from levanter.layers.attention import dot_product_attention
for module in (levanter.models.gpt2, levanter.models.olmo, levanter.models.whisper):
    assert module.dot_product_attention is dot_product_attention
try:
    dot_product_attention("p", "k", "d", *[None] * 3, attn_backend=config.attn_backend, use_flash=False)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "attn_backend is pallas_flash" in done.stdout


class FakeBackend(StrEnum):
    VANILLA = "vanilla"


def fake_levanter(monkeypatch: pytest.MonkeyPatch, function) -> tuple[types.ModuleType, types.ModuleType]:
    """A Levanter whose dispatcher is a bare function, and a model that bound it at import."""
    attention, model = types.ModuleType("levanter.fake_attention"), types.ModuleType("levanter.fake_model")
    for module in (attention, model):
        module.dot_product_attention = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
    attention.AttentionBackend = FakeBackend
    return attention, model


def test_without_a_wrapper_the_name_is_rebound_in_every_module(monkeypatch):
    from levanter.layers.attention import dot_product_attention as real

    def plain(QPos, KPos, Key, query, key, value, mask=None, bias=None, attention_dtype=None, precision=None,
              use_flash=None, attn_backend=None, flash_block_size=None, dropout=0.0, *, logits_soft_cap=None,
              scaling_factor=None, inference=True, prng=None):  # fmt: skip
        return "theirs"

    attention, model = fake_levanter(monkeypatch, plain)
    assert backend._hook_dispatcher(attention) == "rebound"
    assert model.dot_product_attention is attention.dot_product_attention is not plain
    assert model.dot_product_attention(*"pkdqkv", attn_backend="vanilla") == "theirs"
    with pytest.raises(ValueError, match="use_flash is False, but attn_backend is pallas_flash"):
        model.dot_product_attention(*"pkdqkv", attn_backend="pallas_flash", use_flash=False)
    from levanter.layers.attention import dot_product_attention

    assert dot_product_attention is real


def test_a_levanter_that_cannot_be_hooked_is_refused(monkeypatch):
    def without_arguments(query, key, value):
        raise AssertionError

    attention, model = fake_levanter(monkeypatch, without_arguments)
    with pytest.raises(RuntimeError, match="has no argument KPos, Key, QPos, attention_dtype, attn_backend") as error:
        backend._hook_dispatcher(attention)
    assert model.dot_product_attention is without_arguments
    for part in ("found:", "expected:", "pip install", metadata.version("marin-levanter")):
        assert part in str(error.value)
    del attention.dot_product_attention
    with pytest.raises(RuntimeError, match="has no dot_product_attention"):
        backend._hook_dispatcher(attention)


def test_without_levanter(monkeypatch):
    distributions.require_levanter()
    monkeypatch.setattr(distributions, "installed_version", {}.get)
    with pytest.raises(distributions.DistributionError, match="haliax-kernels\\[levanter\\]"):
        distributions.require_levanter()
