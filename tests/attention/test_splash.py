# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Splash attention in interpret mode against the oracle, and compiled for a TPU without one."""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.attention.reference import dense_attention, dense_attention_grad
from haliax_kernels.attention.splash import attention

FLOAT32_TOLERANCE = 2e-5


def _inputs(q_len, k_len, group, key_size, value_size, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((group, q_len, key_size), (k_len, key_size), (k_len, value_size), (group, q_len, value_size))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@functools.partial(jax.jit, static_argnames=("causal", "scale", "block_sizes"))
def _run(q, k, v, do, q_ids=None, k_ids=None, *, causal, scale, block_sizes=None):
    def f(q, k, v):
        return attention(q, k, v, q_ids, k_ids, causal=causal, scale=scale, block_sizes=block_sizes, interpret=True)

    o, pullback = jax.vjp(f, q, k, v)
    return o, *pullback(do)


def _oracle(q, k, v, do, q_ids=None, k_ids=None, *, causal, scale):
    options = {"scale": scale, "causal": causal, "q_segment_ids": q_ids, "k_segment_ids": k_ids}
    return dense_attention(q, k, v, **options)[0], *dense_attention_grad(q, k, v, do, **options)[:3]


def _check(got, want, tolerance=FLOAT32_TOLERANCE):
    for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        assert g.shape == w.shape, name
        assert np.abs(np.asarray(g, np.float64) - w).max() <= tolerance * np.abs(w).max(), name


def _ids(length, values, seed):
    return np.sort(np.random.default_rng(seed).choice(values, length)).astype(np.int32)


@pytest.mark.parametrize(
    ("q_len", "k_len", "group", "key_size", "value_size", "causal", "segmented"),
    [
        (128, 128, 1, 64, 64, True, False),
        (256, 256, 3, 128, 128, True, True),
        (100, 192, 2, 64, 64, False, False),
        (192, 100, 1, 64, 128, True, True),
        (192, 100, 1, 64, 64, True, False),
        (100, 192, 1, 128, 64, True, True),
        (256, 128, 1, 64, 64, False, True),
    ],
)
def test_values_and_gradients(q_len, k_len, group, key_size, value_size, causal, segmented):
    inputs = _inputs(q_len, k_len, group, key_size, value_size)
    ids = (_ids(q_len, range(5), 0), _ids(k_len, range(1, 4), 1)) if segmented else ()
    options = {"causal": causal, "scale": key_size**-0.5}
    got, want = _run(*inputs, *ids, **options), _oracle(*inputs, *ids, **options)
    if segmented:
        dead = (want[0] == 0).all((0, 2))
        assert dead.any() and not dead.all()
        assert (np.asarray(got[0])[:, dead] == 0).all() and (np.asarray(got[1])[:, dead] == 0).all()
    _check(got, want)


def test_several_blocks_and_causally_dead_rows():
    # Ids in any order: query 0 may come before the first key of its segment, and then sees nothing.
    inputs = _inputs(300, 300, 1, 64, 64)
    rng = np.random.default_rng(2)
    q_ids, k_ids = (rng.integers(-2, 3, 300).astype(np.int32) for _ in range(2))
    q_ids[0], k_ids[0], q_ids[1], q_ids[2] = 1, 2, np.iinfo(np.int32).min, np.iinfo(np.int32).max
    options = {"causal": True, "scale": 0.2}
    got = _run(*inputs, q_ids, k_ids, block_sizes=BlockSizes(q=128, k=256), **options)
    want = _oracle(*inputs, q_ids, k_ids, **options)
    assert (want[0][0, :3] == 0).all() and (np.asarray(got[0])[0, :3] == 0).all()
    _check(got, want)


def test_rows_that_see_nothing_send_no_gradient():
    q, k, v, do = _inputs(256, 256, 1, 128, 128)
    q_ids, k_ids = np.zeros(256, np.int32), np.zeros(256, np.int32)
    q_ids[200:], do[:, :200] = 7, 0
    o, *grads = _run(q, k, v + 1, do, q_ids, k_ids, causal=True, scale=0.1)
    assert (o[:, 200:] == 0).all() and all((grad == 0).all() for grad in grads)


def test_bfloat16_error_is_one_rounding():
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in _inputs(256, 256, 1, 64, 64)]
    got = _run(*inputs, causal=True, scale=0.125)  # a power of two, so that scaling q is exact
    assert all(x.dtype == jnp.bfloat16 for x in got)
    want = _oracle(*(np.asarray(x, np.float64) for x in inputs), causal=True, scale=0.125)
    assert np.abs(np.asarray(got[0], np.float64) - want[0]).max() <= 0.008 * np.abs(want[0]).max()
    _check(got, want, tolerance=0.016)


def test_nested_vmap_with_mapped_segment_ids():
    batch, heads, length = 2, 2, 128
    every = [[_inputs(length, length, 2, 64, 64, 10 * b + h) for h in range(heads)] for b in range(batch)]
    stacked = [np.stack([np.stack([one[i] for one in row]) for row in every]) for i in range(4)]
    q_ids, k_ids = (np.stack([_ids(length, values, b) for b in range(batch)]) for values in (range(4), range(1, 4)))
    run = functools.partial(_run, causal=True, scale=0.125)
    got = jax.vmap(jax.vmap(run, (0, 0, 0, 0, None, None)))(*stacked, q_ids, k_ids)
    for b in range(batch):
        for h in range(heads):
            want = _oracle(*every[b][h], q_ids[b], k_ids[b], causal=True, scale=0.125)
            _check([x[b, h] for x in got], want)


def test_the_mask_is_never_whole(monkeypatch):
    sizes = []
    for mask in (splash_attention_mask.CausalMask, splash_attention_mask.FullMask):

        def sliced(self, index, original=mask.__getitem__):
            chunk = original(self, index)
            sizes.append(chunk.size)
            return chunk

        monkeypatch.setattr(mask, "__getitem__", sliced)
    q, k, v, _ = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _inputs(2048, 2048, 2, 64, 64))
    for causal in (False, True):
        jax.eval_shape(functools.partial(attention, causal=causal, scale=1.0), q, k, v)
    assert sizes and max(sizes) == 512 * 512


@pytest.mark.parametrize(("q_len", "k_len"), [(3, 0), (0, 3)])
def test_empty_lengths(q_len, k_len):
    o, *grads = _run(*_inputs(q_len, k_len, 1, 64, 64), causal=False, scale=1.0)
    assert o.shape == (1, q_len, 64) and (o == 0).all() and all((grad == 0).all() for grad in grads)


def test_what_cannot_be_honoured_is_named():
    q, k, v, _ = _inputs(128, 128, 1, 64, 64)
    with pytest.raises(NotImplementedError, match="block_sizes"):
        attention(q, k, v, causal=True, scale=1.0, block_sizes=BlockSizes(q=64, k=128))
    with pytest.raises(NotImplementedError, match=r"^q: .*float16"):
        attention(q.astype(np.float16), k, v, causal=True, scale=1.0)
    with pytest.raises(ValueError, match="q_segment_ids and k_segment_ids"):
        attention(q, k, v, jnp.zeros(128, jnp.int32), causal=True, scale=1.0)


@pytest.mark.tpu_compile
def test_compiles_for_a_tpu():
    pytest.importorskip("libtpu")
    script = pathlib.Path(__file__).parent / "_compile_splash_for_tpu.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
