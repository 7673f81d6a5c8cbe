# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Whole models give with `pallas_flash` what they give with `vanilla`, on one device and on a trainer's mesh."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis, NamedArray

from haliax_kernels.levanter import KernelsConfig, use_options

pytestmark = [pytest.mark.levanter, pytest.mark.slow]

Batch, Vocab = Axis("batch", 4), Axis("vocab", 64)
RELATIVE = 1e-4


def llama(backend: str | None) -> Any:
    from levanter.layers.attention import AttentionBackend
    from levanter.models.llama import LlamaConfig

    # Checkpointing stays on for this one: our kernel under `jax.checkpoint` inside a scan is how Levanter trains.
    return LlamaConfig(max_seq_len=64, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
                       attn_backend=AttentionBackend(backend))  # fmt: skip


def gpt2(backend: str | None) -> Any:
    from levanter.layers.attention import AttentionBackend
    from levanter.models.gpt2 import Gpt2Config

    return Gpt2Config(max_seq_len=48, hidden_dim=32, num_layers=2, num_heads=4, gradient_checkpointing=False,
                      attn_backend=AttentionBackend(backend))  # fmt: skip


def gemma(backend: str | None) -> Any:
    from levanter.layers.attention import AttentionBackend
    from levanter.models.gemma import GemmaConfig

    return GemmaConfig(max_seq_len=32, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
                       head_dim=8, gradient_checkpointing=False, attn_backend=AttentionBackend(backend))  # fmt: skip


def gemma2(backend: str | None) -> Any:
    """Soft caps."""
    from levanter.layers.attention import AttentionBackend
    from levanter.models.gemma import Gemma2Config

    return Gemma2Config(max_seq_len=32, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
                        head_dim=8, query_pre_attn_scalar=8.0, attn_logit_softcapping=1.0,
                        gradient_checkpointing=False, attn_backend=AttentionBackend(backend))  # fmt: skip


def olmo3(backend: str | None) -> Any:
    """Sliding windows in some of its layers."""
    from levanter.layers.attention import AttentionBackend
    from levanter.models.olmo3 import Olmo3Config

    return Olmo3Config(max_seq_len=32, hidden_dim=32, intermediate_dim=64, num_layers=4, num_heads=4, num_kv_heads=2,
                       sliding_window=5, gradient_checkpointing=False, use_flash_attention=backend != "vanilla",
                       attn_backend=AttentionBackend(backend))  # fmt: skip


def whisper(backend: str | None) -> Any:
    from levanter.models.whisper import WhisperConfig

    # It has no say in the backend but this; the test sets `default_backend`.
    return WhisperConfig(vocab_size=Vocab.size, num_mel_bins=16, encoder_layers=2, encoder_attention_heads=4,
                         encoder_ffn_dim=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
                         d_model=32, max_source_positions=48, max_length=32, gradient_checkpointing=False,
                         use_flash_attention=backend != "vanilla")  # fmt: skip


MODELS: dict[str, Callable[[str | None], Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "gemma": gemma,
    "gemma2": gemma2,
    "olmo3": olmo3,
    "whisper": whisper,
}
CASES = [(name, segments) for name in MODELS for segments in (False, True) if not (name == "whisper" and segments)]


@dataclass
class Setting:
    """Where a model runs: the compiler, which knows how parameters are placed, the computation's mapping, the mesh."""

    jit: Callable[[Callable[..., Any]], Callable[..., Any]]
    compute_mapping: dict[str, Any]
    mesh: Callable[[], contextlib.AbstractContextManager[Any]]


def one_device() -> Setting:
    return Setting(eqx.filter_jit, {}, contextlib.nullcontext)


def trainer_mesh() -> Setting:
    """A mesh of 2 x 2 x 2 as `levanter.trainer.Trainer` sets it up, with the batch, heads and parameters sharded."""
    from levanter.tracker import NoopConfig
    from levanter.trainer import MeshConfig, TrainerConfig

    mesh = MeshConfig(
        axes={"replica": 2, "data": 2, "model": 2},
        shared_mapping={"mlp": "model", "heads": "model", "kv_head": "model"},
    )
    config = TrainerConfig(tracker=NoopConfig(), mesh=mesh, train_batch_size=Batch.size)
    jit = functools.partial(hax.named_jit, axis_resources=config.parameter_axis_mapping)
    return Setting(jit, config.compute_axis_mapping, config.use_device_mesh)


def inputs(config: Any, segments: bool) -> tuple[NamedArray, NamedArray, Any, NamedArray | None]:
    """Tokens, the tokens to predict, the mask, and a spectrogram for Whisper."""
    from levanter.layers.attention import AttentionMask

    keys = jax.random.split(jax.random.PRNGKey(1), 4)
    Pos = config.max_Pos
    tokens = hax.random.randint(keys[0], (Batch, Pos), 0, Vocab.size)
    targets = hax.random.randint(keys[1], (Batch, Pos), 0, Vocab.size)
    mask = AttentionMask.causal()
    if segments:
        ends = hax.random.bernoulli(keys[2], (Batch, Pos), 0.1).astype(np.int32)
        mask = mask.with_segment_ids(hax.cumsum(ends, axis=Pos))
    mel = None
    if hasattr(config, "MelPos"):
        mel = hax.random.normal(keys[3], (Batch, config.Mels, config.MelPos))
    return tokens, targets, mask, mel


def logits_and_gradients(name: str, segments: bool, backend: str, setting: Setting) -> tuple[NamedArray, Any]:
    config = MODELS[name](backend)
    tokens, targets, mask, mel = inputs(config, segments)

    def loss_fn(model):
        logits = model(tokens, mask) if mel is None else model(mel, tokens)
        Classes = logits.resolve_axis(config.Vocab.name if mel is not None else Vocab.name)
        loss = hax.nn.cross_entropy_loss(logits, Classes, hax.nn.one_hot(targets, Classes))
        return loss.scalar(), logits

    @setting.jit
    def step(key):
        model = config.model_type.init(config.Vocab if mel is not None else Vocab, config, key=key)
        with hax.axis_mapping(setting.compute_mapping):
            (_, logits), gradients = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model)
        return logits, gradients

    with setting.mesh():
        return jax.device_get(step(jax.random.PRNGKey(0)))


@functools.cache
def vanilla(name: str, segments: bool) -> tuple[NamedArray, Any]:
    return logits_and_gradients(name, segments, "vanilla", one_device())


def check_close(ours: Any, theirs: Any) -> None:
    paths = jax.tree_util.tree_flatten_with_path(ours)[0]
    expected = jax.tree_util.tree_leaves(theirs)
    assert len(paths) == len(expected)
    for (path, leaf), other in zip(paths, expected, strict=True):
        error, size = np.abs(leaf - other).max(), np.abs(other).max()
        assert error <= RELATIVE * size, f"{jax.tree_util.keystr(path)}: {error} of {size}"


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Optimisation is most of the time that these programs take, and what they compute is tiny."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@contextlib.contextmanager
def default_backend() -> Iterator[None]:
    with use_options(KernelsConfig(default_backend=True)):
        yield


@pytest.mark.parametrize("where", [one_device, trainer_mesh], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "segments"), CASES)
def test_same_logits_and_gradients_as_vanilla(spy, name, segments, where):
    expected = vanilla(name, segments)
    assert not spy.ours
    with default_backend() if name == "whisper" else contextlib.nullcontext():
        ours = logits_and_gradients(name, segments, "pallas_flash", where())
    assert spy.ours
    assert spy.jax_flash == 0
    check_close(ours, expected)
