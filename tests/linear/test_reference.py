# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The float64 recurrence: its gradients against finite differences."""

import itertools

import numpy as np
import pytest

from haliax_kernels.linear.reference import recurrence, recurrence_grad


def _inputs(decay, segments, seed=0):
    rng = np.random.default_rng(seed)
    group, length, key, value = 2, 7, 3, 2
    arrays = {
        "q": rng.uniform(0.1, 1, (group, length, key)),
        "k": rng.uniform(0.1, 1, (length, key)),
        "v": rng.normal(size=(length, value)),
        "s": rng.normal(size=(key, value)),
        "z": rng.uniform(0.1, 1, key),
    }
    shape = {"head": (), "token": (length,), "channel": (length, key)}.get(decay)
    if shape is not None:
        arrays["log_decay"] = -rng.exponential(size=shape)
    ids = np.array([3, 3, 1, 1, 1, 3, 3]) if segments else None
    outputs = rng.normal(size=(group, length, value)), rng.normal(size=(key, value)), rng.normal(size=key)
    return arrays, {"scale": 0.7, "segment_ids": ids}, outputs


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("decay", [None, "head", "token", "channel"])
def test_gradients_are_finite_differences(decay, segments, normalize):
    arrays, options, (dy, ds, dz) = _inputs(decay, segments)
    options["normalize"] = normalize

    def loss(**arrays):
        y, s, z = recurrence(**arrays, **options)
        return (y * dy).sum() + (s * ds).sum() + (z * dz).sum()

    positional = (arrays.pop(name) for name in ("q", "k", "v"))
    q, k, v = positional
    grads = recurrence_grad(q, k, v, dy, ds, dz, **arrays, **options)._asdict()
    arrays |= {"q": q, "k": k, "v": v}
    step = 1e-6
    for name, x in arrays.items():
        found = np.zeros(np.shape(x))
        for place in itertools.product(*(range(n) for n in np.shape(x))):
            shift = np.zeros(np.shape(x))
            shift[place] = step
            both = [loss(**(arrays | {name: x + sign * shift})) for sign in (1, -1)]
            found[place] = (both[0] - both[1]) / (2 * step)
        np.testing.assert_allclose(grads[name], found, rtol=1e-6, atol=1e-7, err_msg=name)


def test_normaliser_is_clamped_with_its_sign():
    q, v, none = np.ones((1, 3, 1)), np.ones((3, 1)), np.zeros((1, 1))
    k = np.array([[0.0], [-1e-15], [2e-15]])
    y, _, z = recurrence(q, k, v, normalize=True, epsilon=1e-12)
    np.testing.assert_allclose(z, 1e-15)
    np.testing.assert_allclose(y[0, :, 0], [0, 1e-3, 1e-3])
    grads = recurrence_grad(q, k, v, np.ones((1, 3, 1)), none, none[0], normalize=True, epsilon=1e-12)
    # No gradient through the normaliser: what remains is that of `q S / (sign * epsilon)`.
    np.testing.assert_allclose(grads.q[0, :, 0], [0, 1e-3, 1e-3])


def test_a_decay_of_0_is_a_new_segment():
    arrays, options, _ = _inputs("token", False)
    arrays["log_decay"][4] = -np.inf
    want = recurrence(**arrays, **options)
    arrays["log_decay"][4] = -0.5
    got = recurrence(**arrays, **(options | {"segment_ids": np.array([5, 5, 5, 5, 0, 0, 0])}))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
