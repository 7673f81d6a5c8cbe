# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

import logging
import sys

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import haliax_kernels
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.levanter import KernelsConfig, dispatch, use_options

pytestmark = pytest.mark.levanter

Batch, Pos, KPos, Key = Axis("batch", 2), Axis("position", 16), Axis("key_position", 16), Axis("head_size", 8)


@pytest.fixture(scope="module")
def qkv():
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    axes = ((Batch, Pos, Key), (Batch, KPos, Key), (Batch, KPos, Key))
    return tuple(hax.random.normal(key, ax) for key, ax in zip(keys, axes, strict=True))


@pytest.fixture
def attend(registered, qkv):
    """Levanter's dispatcher on one small call, as a function of its options."""
    from levanter.layers.attention import dot_product_attention

    def call(**options):
        return dot_product_attention("position", "key_position", "head_size", *qkv, **options)

    return call


def causal():
    from levanter.layers.attention import AttentionMask

    return AttentionMask.causal()


def close(a, b):
    np.testing.assert_allclose(a.array, b.rearrange(a.axes).array, rtol=1e-5, atol=1e-5)


def test_every_module_that_bound_the_function_reaches_ours(registered, spy, qkv):
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "levanter" and hasattr(module, "dot_product_attention")
    ]
    found = {module.__name__.split(".")[-1] for module in modules}
    assert {"attention", "gpt2", "olmo", "whisper", "flash_attention"} <= found
    for calls, module in enumerate(modules, start=1):
        module.dot_product_attention(
            "position", "key_position", "head_size", *qkv, attn_backend=registered.PALLAS_FLASH
        )
        assert len(spy.ours) == calls, module.__name__
    assert spy.jax_flash == 0


@pytest.mark.parametrize("with_mask", [False, True])
def test_same_values_as_vanilla(attend, with_mask):
    mask = causal() if with_mask else None
    close(attend(attn_backend="pallas_flash", mask=mask), attend(attn_backend="vanilla", mask=mask))
    scaled = {"mask": mask, "scaling_factor": 0.5}
    close(attend(attn_backend="pallas_flash", **scaled), attend(attn_backend="vanilla", **scaled))


def test_other_backends_run_levanters_code(attend, spy):
    with use_options(KernelsConfig(on_unsupported="fallback")):
        attend(attn_backend="vanilla")
        attend(use_flash=False)
        assert spy.jax_flash == 0
        attend(attn_backend="jax_flash")
        attend(attn_backend="default")
        attend()
        assert spy.jax_flash == 3
    assert not spy.ours


@pytest.mark.parametrize("how", [{}, {"attn_backend": "default"}, {"use_flash": True}, {"flash_block_size": 3}])
def test_default_backend(attend, spy, how):
    with use_options(KernelsConfig(default_backend=True)):
        attend(mask=causal(), **how)
    assert len(spy.ours) == 1


@pytest.mark.parametrize("how", [{"use_flash": False}, {"attn_backend": "vanilla"}, {"attn_backend": "jax_flash"}])
def test_default_backend_leaves_explicit_choices_alone(attend, spy, how):
    with use_options(KernelsConfig(default_backend=True)):
        attend(**how)
    assert not spy.ours


def test_contradictions_are_refused_as_levanter_does(attend, qkv):
    from levanter.layers.attention import dot_product_attention

    with pytest.raises(ValueError, match="use_flash is False, but attn_backend is pallas_flash"):
        attend(attn_backend="pallas_flash", use_flash=False)
    with pytest.raises(ValueError, match="QPos and KPos must have different names"):
        dot_product_attention("position", "position", "head_size", *qkv, attn_backend="pallas_flash")


def test_options_reach_the_kernel(attend, spy, monkeypatch):
    seen = []

    def record(QPos, KPos, Key, query, key, value, mask=None, **options):
        seen.append({**options, "dtypes": {query.dtype, key.dtype, value.dtype}})
        return query

    monkeypatch.setattr(haliax_kernels, "flash_attention", record)
    options = KernelsConfig(context_parallel="error", implementation="xla", block_q=8)
    with use_options(options):
        attend(attn_backend="pallas_flash", flash_block_size=16)
    with use_options(KernelsConfig(block_k=4)):
        attend(attn_backend="pallas_flash")
    attend(attn_backend="pallas_flash", flash_block_size=16)
    out = attend(attn_backend="pallas_flash", dropout=0.5, inference=True, attention_dtype=jnp.bfloat16)
    attend(attn_backend="pallas_flash", dropout=0.5, inference=False, precision="default")
    assert (seen[0]["context_parallel"], seen[0]["implementation"]) == ("error", "xla")
    assert [call["block_sizes"] for call in seen[:3]] == [BlockSizes(8, 16), BlockSizes(4, 4), BlockSizes(16, 16)]
    assert [call["block_sizes"] for call in seen[3:]] == [None, None]
    assert [call["dropout"] for call in seen] == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert seen[3]["dtypes"] == {jnp.dtype(jnp.bfloat16)}
    assert out.dtype == jnp.float32


UNSUPPORTED = {
    "precision": lambda: {"precision": "highest"},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_requested_backend_never_falls_back(attend, spy, name):
    with pytest.raises(UnsupportedOptionError, match=name):
        attend(attn_backend="pallas_flash", **UNSUPPORTED[name]())
    assert spy.jax_flash == 0


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fallback_runs_vanilla_and_says_why_once(attend, spy, caplog, monkeypatch, name):
    monkeypatch.setattr(dispatch, "_logged", set())
    options = UNSUPPORTED[name]()
    with use_options(KernelsConfig(on_unsupported="fallback")), caplog.at_level(logging.WARNING):
        outs = [attend(attn_backend="pallas_flash", **options) for _ in range(2)]
    expected = attend(attn_backend="vanilla", **options)
    for out in outs:
        close(out, expected)
    (message,) = [record.getMessage() for record in caplog.records if record.name == dispatch.__name__]
    assert "falls back to vanilla" in message
    assert name in message
    assert spy.jax_flash == 0


def test_only_an_unsupported_option_falls_back(attend, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("sharded")

    monkeypatch.setattr(haliax_kernels, "flash_attention", broken)
    with use_options(KernelsConfig(on_unsupported="fallback")), pytest.raises(ValueError, match="sharded"):
        attend(attn_backend="pallas_flash")


def test_an_argument_of_a_later_levanter_is_refused_when_used():
    def later(QPos, KPos, Key, query, key, value, mask=None, bias=None, attention_dtype=None, precision=None,
              use_flash=None, attn_backend=None, flash_block_size=None, dropout=0.0, *, logits_soft_cap=None,
              scaling_factor=None, inference=True, prng=None, alibi=None):  # fmt: skip
        raise AssertionError

    with pytest.raises(UnsupportedOptionError, match="does not know Levanter's argument alibi=3"):
        dispatch.make_dispatcher(later)(*"pkdqkv", attn_backend="pallas_flash", alibi=3)
