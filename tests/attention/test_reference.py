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
    for grad in dense_attention_grad(q, k, v, do, dlse, scale=SCALE, **ids):
        assert (grad == 0).all()


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
def test_gradients_equal_finite_differences(q_len, k_len, causal, segmented):
    arrays, ids = _inputs(q_len, k_len, segmented)
    rng = np.random.default_rng(1)
    do, dlse = rng.normal(size=(2, q_len, 5)), rng.normal(size=(2, q_len))

    def loss(arrays):
        o, lse = dense_attention(*arrays, scale=SCALE, causal=causal, **ids)
        return np.sum(o * do) + np.sum(np.where(np.isfinite(lse), lse, 0) * dlse)

    grads = dense_attention_grad(*arrays, do, dlse, scale=SCALE, causal=causal, **ids)
    for place, grad in enumerate(grads):
        step = rng.normal(size=grad.shape)
        ahead, behind = (
            [x + moved * step if i == place else x for i, x in enumerate(arrays)] for moved in (1e-5, -1e-5)
        )
        np.testing.assert_allclose((loss(ahead) - loss(behind)) / 2e-5, np.sum(grad * step), rtol=1e-7, atol=1e-8)
