# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The statistics of the dropout mask."""

import jax.numpy as jnp
import numpy as np
import pytest

from haliax_kernels.attention.dropout import keep

SEEDS, LENGTH = 4, 512


def _mask(rate, seeds=None, q_start=0, k_start=0, q_len=LENGTH, k_len=LENGTH):
    seeds = jnp.arange(SEEDS, dtype=jnp.uint32) if seeds is None else jnp.asarray(seeds, jnp.uint32)
    q, k = q_start + jnp.arange(q_len), k_start + jnp.arange(k_len)
    return np.asarray(keep(seeds[:, None, None], q[None, :, None], k[None, None, :], rate))


def _deviations(x, rate):
    """Fractions of the kept, in standard deviations of a fair draw."""
    x = x.reshape(-1, x.shape[-1])
    return (x.mean(-1) - (1 - rate)) / np.sqrt(rate * (1 - rate) / x.shape[-1])


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_rates_of_heads_rows_and_columns(rate):
    mask = _mask(rate)
    assert mask.shape == (SEEDS, LENGTH, LENGTH) and mask.dtype == bool
    assert np.abs(_deviations(mask.reshape(SEEDS, -1), rate)).max() < 4
    for lines in (mask, mask.swapaxes(1, 2)):
        deviations = _deviations(lines, rate)
        assert np.abs(deviations).max() < 6
        # Also no more equal than a fair draw would be: a mask of exactly the rate in each row is no dropout.
        assert 0.9 < deviations.std() < 1.1


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_rows_columns_and_heads_are_independent(rate):
    centred = (_mask(rate) - (1 - rate)) / np.sqrt(rate * (1 - rate))
    for lines in (centred[0], centred[0].T, centred.reshape(SEEDS, -1)):
        correlation = lines @ lines.T / np.sqrt(lines.shape[-1])
        np.fill_diagonal(correlation, 0)
        off = correlation[~np.eye(len(lines), dtype=bool)]
        assert np.abs(off).max() < 6 and (len(off) < 100 or 0.97 < off.std() < 1.03)
    for shift in ((0, 1), (1, 0), (1, 1), (1, -1), (0, 16), (64, 0)):
        moved = np.roll(centred, shift, (1, 2))
        assert np.abs((centred * moved).mean()) * np.sqrt(centred.size) < 5, shift
    # Products of the corners of a rectangle: what a hash of the xor of two hashes would show if it mixed too little.
    corners = centred[:, :-1, :-1] * centred[:, 1:, :-1] * centred[:, :-1, 1:] * centred[:, 1:, 1:]
    assert np.abs(corners.mean()) * np.sqrt(corners.size) < 5


def test_a_part_of_the_sequence_has_the_part_of_the_mask():
    whole = _mask(0.3)
    np.testing.assert_array_equal(_mask(0.3, q_start=100, k_start=37, q_len=8, k_len=9), whole[:, 100:108, 37:46])
    assert (_mask(0.3, q_start=-8, k_start=2**30, q_len=8, k_len=9).mean() - 0.7) < 0.1


def test_extreme_rates():
    assert _mask(0.0).all()
    assert _mask(0.999999).mean() < 1e-4
