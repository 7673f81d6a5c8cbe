# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Feature maps: their values, and what they are exact for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_kernels.errors import ArgumentError
from haliax_kernels.linear import feature_maps, xla
from haliax_kernels.linear.contract import LinearOperands, LinearOptions
from haliax_kernels.linear.reference import recurrence
from linear.cases import Case, error


def test_elu_plus_one_keeps_small_values_in_16_bits():
    """`elu(-8) + 1` in bfloat16 is 0 (flash-linear-attention's issue 1261)."""
    x = jnp.array([-8, -6, -4, 0, 4], jnp.bfloat16)
    np.testing.assert_allclose(
        feature_maps.elu_plus_one(x).astype(np.float32), [3.35e-4, 2.48e-3, 1.83e-2, 1, 5], rtol=4e-3
    )
    one = feature_maps.queries("elu+1", jnp.full((1, 1, 1), -8, jnp.bfloat16))

    def attend(q):
        return xla.forward(LinearOptions(normalize=True), LinearOperands(q, one[0], jnp.ones((1, 1), q.dtype)))[
            0
        ].sum()

    y, dq = jax.value_and_grad(attend)(one)
    assert y == 1 and abs(float(dq[0, 0, 0])) < 1e-2


def test_elu_plus_one_has_finite_gradients():
    x = jnp.array([-1e4, -90.0, -1.0, 0.0, 1e4])
    grads = jax.grad(lambda x: feature_maps.elu_plus_one(x).sum())(x)
    np.testing.assert_allclose(grads, [0, 0, np.exp(-1), 1, 1], atol=1e-30)


@pytest.mark.parametrize("offset", [0.0, 500.0])
def test_exp_is_exact_when_normalised(offset):
    """Where exp itself would overflow; with one shift for all keys, also with that of two shards."""
    case = Case(decay="token")
    x = case.operands()
    q, k = x.q + np.float32(offset), x.k + np.float32(offset)
    want = recurrence(np.exp(x.q.astype(float)), np.exp(x.k.astype(float)), x.v, log_decay=x.log_decay, normalize=True)
    assert feature_maps.needs_normalizer("exp") and not feature_maps.needs_normalizer("elu+1")
    shift = jnp.maximum(feature_maps.key_shift(k[:20]), feature_maps.key_shift(k[20:]))
    parts = [feature_maps.keys("exp", part, shift) for part in (k[:20], k[20:])]
    for keys in (feature_maps.keys("exp", k), jnp.concatenate(parts)):
        x = x._replace(q=feature_maps.queries("exp", q), k=keys)
        y, *_ = xla.forward(LinearOptions(normalize=True), x)
        assert error(y, want[0]) < (2e-5 if offset == 0 else 1e-3)  # 500 and a fraction has fewer digits


def test_the_shift_sends_no_gradient():
    k = jnp.array([[1.0, 3.0]])
    grads = jax.grad(lambda k: feature_maps.keys("exp", k).sum())(k)
    np.testing.assert_allclose(grads, [[np.exp(-2.0), 1]])
    assert (jax.grad(lambda k: feature_maps.queries("exp", k).sum())(k) == grads).all()


def test_names_and_functions():
    x = jnp.array([[-1.0, 2.0]])
    assert feature_maps.keys("relu", x).tolist() == [[0, 2]]
    assert feature_maps.keys("identity", x).tolist() == x.tolist()
    assert feature_maps.queries(jnp.square, x).tolist() == [[1, 4]]
    with pytest.raises(ArgumentError, match=r"feature_map='elu' .*'elu\+1'"):
        feature_maps.queries("elu", x)
