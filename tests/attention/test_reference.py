# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The oracle against an independent formula and against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_kernels.attention.reference import dense_attention, dense_attention_grad

SCALE = 0.4
LENGTHS = [(6, 6), (4, 7), (7, 4)]


def _inputs(q_len, k_len, segmented, seed=0):
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shape) for shape in ((2, q_len, 3), (k_len, 3), (k_len, 5))]
    ids = {}
    if segmented:
        ids = {"q_segment_ids": rng.integers(0, 3, q_len), "k_segment_ids": rng.integers(1, 4, k_len)}
        ids["q_segment_ids"][0], ids["q_segment_ids"][1], ids["k_segment_ids"][0] = 0, 2, 2
    return arrays, ids


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
def test_values_equal_a_softmax(q_len, k_len, causal):
    (q, k, v), _ = _inputs(q_len, k_len, segmented=False)
    logits = SCALE * jnp.einsum("gqd,kd->gqk", q, k)
    if causal:
        logits = jnp.where(jnp.tril(jnp.ones((q_len, k_len), bool)), logits, -jnp.inf)
    o, lse = dense_attention(q, k, v, scale=SCALE, causal=causal)
    np.testing.assert_allclose(o, jax.nn.softmax(logits) @ v, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, jax.nn.logsumexp(logits, axis=-1), rtol=0, atol=2e-6)
    assert o.dtype == lse.dtype == np.float64


def test_segments_are_separate_attentions():
    (q, k, v), _ = _inputs(6, 6, segmented=False)
    ids = np.array([3, 3, 3, 3, 9, 9])
    o, lse = dense_attention(q, k, v, scale=SCALE, causal=True, q_segment_ids=ids, k_segment_ids=ids)
    for part in (slice(0, 4), slice(4, 6)):
        o_part, lse_part = dense_attention(q[:, part], k[part], v[part], scale=SCALE, causal=True)
        np.testing.assert_allclose(o[:, part], o_part, atol=1e-14)
        np.testing.assert_allclose(lse[:, part], lse_part, atol=1e-14)


def test_rows_that_see_nothing():
    (q, k, v), ids = _inputs(6, 6, segmented=True)
    o, lse = dense_attention(q, k, v, scale=SCALE, **ids)
    dead = ~np.isin(ids["q_segment_ids"], ids["k_segment_ids"])
    assert dead.any() and not dead.all()
    assert (o[:, dead] == 0).all() and (lse[:, dead] == -np.inf).all() and np.isfinite(lse[:, ~dead]).all()
    do, dlse = np.where(dead[:, None], 1.0, np.zeros_like(o)), np.where(dead, np.inf, np.zeros_like(lse))
    for grad in dense_attention_grad(q, k, v, do, dlse, scale=SCALE, **ids)[:3]:
        assert (grad == 0).all()


def _everything(q_len, k_len, seed=3):
    """All options at once, so that most queries still see something."""
    rng = np.random.default_rng(seed)
    return {
        "left": 3,
        "right": 2,
        "q_offset": 2,
        "k_offset": 1,
        "mask": rng.random((2, q_len, k_len)) < 0.9,
        "bias": rng.normal(size=(1, q_len, k_len)),
        "soft_cap": 1.5,
        "keep": rng.random((2, q_len, k_len)) < 0.7,
        "dropout": 0.3,
        "sink": rng.normal(size=2),
    }


@pytest.mark.parametrize("options", [{"causal": True}, {}, None], ids=["causal", "full", "everything"])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
def test_gradients_equal_finite_differences(q_len, k_len, segmented, options):
    arrays, ids = _inputs(q_len, k_len, segmented)
    rng = np.random.default_rng(1)
    do, dlse = rng.normal(size=(2, q_len, 5)), rng.normal(size=(2, q_len))
    options = {"scale": SCALE, **ids, **(_everything(q_len, k_len) if options is None else options)}
    moving = {"q": arrays[0], "k": arrays[1], "v": arrays[2]} | {
        name: options.pop(name) for name in ("bias", "sink") if name in options
    }

    def loss(moving):
        o, lse = dense_attention(**moving, **options)
        return np.sum(o * do) + np.sum(np.where(np.isfinite(lse), lse, 0) * dlse)

    grads = dense_attention_grad(**moving, **options, do=do, dlse=dlse)
    for name, x in moving.items():
        step, grad = rng.normal(size=x.shape), getattr(grads, name)
        assert grad.shape == x.shape
        ahead, behind = (loss(moving | {name: x + by * step}) for by in (1e-5, -1e-5))
        np.testing.assert_allclose((ahead - behind) / 2e-5, np.sum(grad * step), rtol=1e-7, atol=1e-8, err_msg=name)


def test_windows_offsets_masks_biases_caps_and_sinks_written_out():
    """Query by query and key by key, as the contract's sentences say it."""
    (q, k, v), ids = _inputs(6, 6, segmented=True)
    options = _everything(6, 6) | ids
    o, lse = dense_attention(q, k, v, scale=SCALE, **options)
    for g in range(2):
        for row in range(6):
            total, weighted = np.exp(options["sink"][g]), 0
            for column in range(6):
                logit = SCALE * q[g, row] @ k[column] + options["bias"][0, row, column]
                logit = 1.5 * np.tanh(logit / 1.5)
                seen = -3 <= (column + 1) - (row + 2) <= 2 and options["mask"][g, row, column]
                if seen and ids["q_segment_ids"][row] == ids["k_segment_ids"][column]:
                    total += np.exp(logit)
                    weighted = weighted + np.exp(logit) * options["keep"][g, row, column] / 0.7 * v[column]
            np.testing.assert_allclose(o[g, row], weighted / total, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(lse[g, row], np.log(total), rtol=1e-12)
