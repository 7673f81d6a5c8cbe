# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`model.type: linear_llama` and `attn_backend: linear`: what they compute, refuse, decode, and how they shard."""

import dataclasses
import re
from typing import Any

import draccus
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_kernels import ArgumentError, UnsupportedOptionError
from haliax_kernels.levanter import KernelsConfig, KernelsConfigError, use_options
from launching import EXAMPLES, launch, losses_of
from support import make_mesh

pytestmark = pytest.mark.levanter

Batch, Vocab = Axis("batch", 2), Axis("vocab", 32)
LINEAR = {
    "plain": {},
    "not normalised": {"normalize": False, "feature_map": "identity"},
    "retention": {"normalize": False, "feature_map": "identity", "decay": "head"},
    "tokens": {"decay": "token", "feature_map": "exp"},
    "channels": {"decay": "channel", "feature_map": "relu", "normalize": False, "chunk_size": 8},
    "delta": {"normalize": False, "feature_map": "identity", "decay": "token", "delta_rule": True},
}


def model_config(**linear: Any) -> Any:
    from haliax_kernels.levanter.linear_config import LinearAttentionConfig
    from haliax_kernels.levanter.linear_llama import LinearLlamaConfig

    return LinearLlamaConfig(
        max_seq_len=32, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
        gradient_checkpointing=False, linear=LinearAttentionConfig(**linear),
    )  # fmt: skip


def batch(config, segments=False):
    from levanter.layers.attention import AttentionMask

    keys = jax.random.split(jax.random.PRNGKey(1), 2)
    tokens = hax.random.randint(keys[0], (Batch, config.max_Pos), 0, Vocab.size)
    mask = AttentionMask.causal()
    if segments:
        ends = hax.random.bernoulli(keys[1], (Batch, config.max_Pos), 0.1).astype(np.int32)
        mask = mask.with_segment_ids(hax.cumsum(ends, axis=config.max_Pos))
    return tokens, mask


def next_token_loss(model, tokens, mask):
    logits = model(tokens, mask)
    Pos = logits.resolve_axis("position")
    targets = hax.nn.one_hot(hax.roll(tokens, -1, Pos), Vocab)
    return hax.nn.cross_entropy_loss(logits, Vocab, targets).scalar()


def trained(config, steps=3):
    """A model a few steps of gradient descent away from its start."""
    tokens, mask = batch(config)
    model = eqx.filter_jit(config.model_type.init)(Vocab, config, key=jax.random.PRNGKey(0))

    @eqx.filter_jit
    def step(model):
        grads = eqx.filter_grad(next_token_loss)(model, tokens, mask)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.5 * g, grads))

    for _ in range(steps):
        model = step(model)
    return model


@pytest.mark.parametrize(
    "linear",
    [pytest.param(o, marks=() if n in ("tokens", "delta") else pytest.mark.slow, id=n) for n, o in LINEAR.items()],
)
def test_decoding_gives_the_parallel_logits(registered, linear):
    """Of a trained model, token by token, rotary embeddings included."""
    config = model_config(**linear)
    model = trained(config)
    tokens, mask = batch(config)
    want = eqx.filter_jit(model)(tokens, mask)
    step = eqx.filter_jit(lambda model, ids, states, pos: model.step(ids, states, pos_ids=pos))
    Pos, states = config.max_Pos, None
    for t in range(Pos.size):
        logits, states = step(model, tokens[Pos, t], states, jnp.int32(t))
        np.testing.assert_allclose(logits.array, want[Pos, t].rearrange(logits.axes).array, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mapping", [{"position": "context"}, {"batch": "context", "kv_head": "model"}], ids=str)
@pytest.mark.parametrize("linear", [LINEAR["tokens"], LINEAR["channels"]], ids=["tokens", "channels"])
def test_sharded_as_on_one_device(registered, linear, mapping):
    config = model_config(**linear)
    tokens, mask = batch(config, segments=True)
    model = config.model_type.init(Vocab, config, key=jax.random.PRNGKey(0))
    run = eqx.filter_jit(eqx.filter_value_and_grad(next_token_loss))
    want, want_grads = run(model, tokens, mask)
    with hax.axis_mapping(mapping), jax.set_mesh(make_mesh(context=2, model=2)):
        found, grads = eqx.filter_jit(lambda *a: eqx.filter_value_and_grad(next_token_loss)(*a))(model, tokens, mask)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_a_segment_does_not_see_the_one_before(registered):
    config = model_config(decay="token")
    tokens, mask = batch(config)
    Pos = config.max_Pos
    ids = (hax.arange(Pos) >= 10).astype(np.int32).broadcast_axis(Batch)
    model = config.model_type.init(Vocab, config, key=jax.random.PRNGKey(0))
    packed = model(tokens, mask.with_segment_ids(ids), pos_ids=hax.arange(Pos))
    other = hax.where(hax.arange(Pos) < 10, (tokens + 1) % Vocab.size, tokens)
    again = model(other, mask.with_segment_ids(ids), pos_ids=hax.arange(Pos))
    np.testing.assert_allclose(packed[Pos, 10:].array, again[Pos, 10:].array, rtol=1e-4, atol=1e-5)
    assert np.abs(packed[Pos, :10].array - again[Pos, :10].array).max() > 1e-3


def test_parameters_and_operations_are_counted(registered):
    for linear in LINEAR.values():
        config = model_config(**linear)
        model = config.model_type.init(Vocab, config, key=jax.random.PRNGKey(0))
        count = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        assert config.total_trainable_params(Vocab.size) == count
    short, long = (config.flops_per_token(Vocab.size, n) for n in (32, 65536))
    assert short == long > config.llama.flops_per_token(Vocab.size, 1)


def test_yaml(registered):
    from levanter.models.lm_model import LmConfig

    text = {"type": "linear_llama", "num_layers": 3, "linear": {"decay": "channel", "normalize": False}}
    config: Any = draccus.decode(LmConfig, text)
    assert dataclasses.asdict(config.linear)["decay"] == "channel" and config.num_layers == 3
    assert draccus.decode(LmConfig, draccus.encode(config, LmConfig)) == config


@pytest.mark.parametrize(
    ("linear", "match"),
    [
        ({"feature_map": "elu"}, "'elu' is none of"),
        ({"decay": "heads"}, "linear.decay='heads' is none of 'none', 'head', 'token', 'channel'"),
        ({"feature_map": "exp", "normalize": False}, "exp needs linear.normalize: true"),
        ({"delta_rule": True}, "set linear.normalize: false"),
        ({"gate_temperature": 0.0}, "must be positive"),
        ({"gate_temperature": "cold"}, "linear.gate_temperature: 'cold' is not a number"),
        ({"normalize": "no"}, "linear.normalize: 'no' is not true or false"),
        ({"chunk_size": 0}, "linear.chunk_size: 0 is not a positive integer or null"),
        ({"implementation": "palas"}, "linear.implementation: 'palas' is none of pallas_tpu"),
    ],
)
def test_options_refused(registered, linear, match):
    with pytest.raises(ArgumentError, match=match):
        model_config(**linear)


def test_masks_refused(registered):
    from levanter.layers.attention import AttentionMask

    config = model_config()
    tokens, causal = batch(config)
    model = config.model_type.init(Vocab, config, key=jax.random.PRNGKey(0))
    masks = {
        "a mask that is not causal": None,
        "a sliding window": causal.with_sliding_window(4),
        "an explicit mask": AttentionMask(
            is_causal=True,
            explicit_mask=hax.ones((config.max_Pos, config.max_Pos.alias("key_position")), dtype=bool),
        ),
    }
    for what, mask in masks.items():
        with pytest.raises(UnsupportedOptionError, match=f"linear_llama: linear attention sees .* asks for {what}"):
            model(tokens, mask)


def test_hugging_face_and_pages_refused(registered):
    from levanter.compat.hf_checkpoints import HFCompatConfig

    config = model_config()
    model = config.model_type.init(Vocab, config, key=jax.random.PRNGKey(0))
    # Levanter refuses `hf_save_path` at the start of a run for what is none of these.
    assert not isinstance(config, HFCompatConfig)
    for refused in (config.hf_checkpoint_converter, lambda: config.to_hf_config(32)):
        with pytest.raises(UnsupportedOptionError, match=r"no counterpart among Hugging Face's models.*hf_save_path"):
            refused()
    for refused in (model.decode, model.initial_cache, model.transformer.layers.unstacked()[0].decode):
        with pytest.raises(UnsupportedOptionError, match=r"Decode with LinearLlamaLMHeadModel\.step"):
            refused()


def llama(backend):
    from levanter.layers.attention import AttentionBackend
    from levanter.models.llama import LlamaConfig

    return LlamaConfig(max_seq_len=32, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
                       gradient_checkpointing=False, attn_backend=AttentionBackend(backend))  # fmt: skip


def attend(backend, q, k, v, mask, **options):
    from levanter.layers.attention import AttentionBackend, dot_product_attention

    return dot_product_attention("position", "key_position", "head_size", q, k, v, mask,
                                 attn_backend=AttentionBackend(backend), **options)  # fmt: skip


def operands(k_len=24):
    B, P, K, D = Axis("batch", 2), Axis("position", 24), Axis("key_position", k_len), Axis("head_size", 8)
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    return tuple(hax.random.normal(key, (B, axis, D)) for key, axis in zip(keys, (P, K, K), strict=True))


@pytest.mark.parametrize("normalize", [True, False])
def test_the_backend_is_linear_attention(registered, normalize):
    from levanter.layers.attention import AttentionMask

    q, k, v = operands()
    ids = (hax.arange(q.resolve_axis("position")) // 10).broadcast_axis(q.axes[0])
    options = KernelsConfig(linear_feature_map="relu", linear_normalize=normalize)
    with use_options(options):
        found = attend("linear", q, k, v, AttentionMask.causal().with_segment_ids(ids))
    fq, fk = (np.maximum(np.asarray(x.array, np.float64), 0) for x in (q, k))
    segment = np.arange(24) // 10
    scores = np.einsum("bqd,bkd->bqk", fq, fk) * (np.tri(24) * (segment[:, None] == segment))
    divisor = np.maximum(scores.sum(-1, keepdims=True), 1e-12) if normalize else 8**0.5
    np.testing.assert_allclose(found.array, scores / divisor @ np.asarray(v.array), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("what", "options", "k_len"),
    [
        ("bias", {"bias": 0}, 24),
        ("logits_soft_cap", {"logits_soft_cap": 2.0}, 24),
        ("scaling_factor", {"scaling_factor": 0.5}, 24),
        ("dropout", {"dropout": 0.1, "inference": False}, 24),
        ("different lengths", {}, 16),
        ("a mask that is not causal", {"mask": None}, 24),
    ],
)
def test_the_backend_refuses(registered, what, options, k_len):
    """And does not fall back: another attention would be another model."""
    from levanter.layers.attention import AttentionMask

    q, k, v = operands(k_len)
    if "bias" in options:
        options = {"bias": hax.zeros((q.axes[1], k.axes[1]))}
    mask = options.pop("mask") if "mask" in options else AttentionMask.causal()
    with use_options(KernelsConfig(on_unsupported="fallback")), pytest.raises(UnsupportedOptionError, match=what):
        attend("linear", q, k, v, mask, prng=jax.random.PRNGKey(0), **options)


def test_a_llama_takes_the_backend(registered):
    config = llama("linear")
    tokens, mask = batch(config, segments=True)
    model = config.model_type.init(Vocab, config, key=jax.random.PRNGKey(0))
    want = eqx.filter_jit(next_token_loss)(model, tokens, mask)
    with hax.axis_mapping({"position": "context", "batch": "data"}), jax.set_mesh(make_mesh(data=2, context=4)):
        found = eqx.filter_jit(lambda *a: next_token_loss(*a))(model, tokens, mask)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    vanilla = llama("vanilla").model_type.init(Vocab, llama("vanilla"), key=jax.random.PRNGKey(0))
    assert not np.isclose(want, next_token_loss(vanilla, tokens, mask), rtol=1e-6)


def test_kernels_block():
    with pytest.raises(KernelsConfigError, match="did you mean 'relu'"):
        KernelsConfig.from_mapping({"linear_feature_map": "rel"})
    with pytest.raises(KernelsConfigError, match=r"exp needs kernels.linear_normalize: true"):
        KernelsConfig(linear_feature_map="exp", linear_normalize=False)


@pytest.mark.slow
def test_the_example_learns_as_on_whole_sequences(tmp_path):
    sharded = EXAMPLES / "linear_llama_tiny_cpu.yaml"
    ours = losses_of(launch("train_lm", "--config_path", str(sharded), "--devices", "8", cwd=tmp_path))
    text = sharded.read_text().replace("context: 2}", "context: 1}").replace("data: 2,", "data: 4,")
    assert re.search("data: 4, model: 2, context: 1", text)
    (tmp_path / "whole.yaml").write_text(text)
    whole = losses_of(launch("train_lm", "--config_path", "whole.yaml", "--devices", "8", cwd=tmp_path))
    assert sorted(ours)[-18:] == list(range(2, 20)) and ours.keys() == whole.keys()
    worst = max(abs(ours[step] / whole[step] - 1) for step in ours)
    late = np.mean([ours[step] for step in range(15, 20)])
    print(f"{len(ours)} steps, loss {ours[2]:.4f} to {late:.4f} (last five), largest relative difference {worst:.1e}")
    assert worst <= 1e-4 and ours[2] > 4.5 and late < 3.2
