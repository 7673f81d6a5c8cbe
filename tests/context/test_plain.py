# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`plain_flash_attention` under plain `jit`, with the shardings that the arrays happen to have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels import ArgumentError, plain_flash_attention
from haliax_kernels.attention.reference import dense_attention, dense_attention_grad
from support import BOTH_MESHES, collectives, make_mesh

SHAPES = (2, 32, 4, 8), (2, 32, 2, 8), (2, 32, 2, 6)


def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in (*SHAPES, (2, 32, 4, 6), (2, 32, 4))]


def oracle(left, right):
    q, k, v, do, dlse = (np.float64(x) for x in arrays())
    want = [np.zeros(x.shape) for x in (do, dlse, q, k, v)]
    for b in range(2):
        for h in range(2):
            own = slice(2 * h, 2 * h + 2)
            args = q[b, :, own].transpose(1, 0, 2), k[b, :, h], v[b, :, h]
            options = {"scale": 8**-0.5, "left": left, "right": right}
            o, lse = dense_attention(*args, **options)
            dq, dk, dv, *_ = dense_attention_grad(
                *args, do[b, :, own].transpose(1, 0, 2), dlse[b, :, own].T, **options
            )
            want[0][b, :, own], want[1][b, :, own] = o.transpose(1, 0, 2), lse.T
            want[2][b, :, own], want[3][b, :, h], want[4][b, :, h] = dq.transpose(1, 0, 2), dk, dv
    return want


def both(q, k, v, do, dlse, **options):
    outs, pullback = jax.vjp(lambda *a: plain_flash_attention(*a, return_lse=True, **options), q, k, v)
    return *outs, *pullback((do, dlse))


@pytest.mark.parametrize("axis_type", BOTH_MESHES)
@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        (("data", "context"), "ring"),
        ((None, ("data", "context")), "zigzag"),
        (("data", "context"), "allgather"),
        ((None, "context", "data"), "auto"),
        (("data", None, "context"), "ring"),
        ((), "ring"),
    ],
)
def test_sharded_arrays(spec, mode, axis_type):
    """Values and gradients, with lse in the loss."""
    mesh = make_mesh(axis_type, data=2, context=2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))) for x in arrays()]
        run = jax.jit(lambda *a: both(*a, is_causal=True, context_parallel=mode))
        found = run(*placed)
    for got, want in zip(found, oracle(None, 0), strict=True):
        assert np.abs(np.float64(got) - want).max() <= 2e-5 * max(1, np.abs(want).max())


def test_the_ring_runs_where_the_sequence_is_sharded():
    mesh = make_mesh(context=4)
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "context"))) for x in arrays()]
    text = jax.jit(lambda q, k, v: plain_flash_attention(q, k, v, context_parallel="ring")).lower(*placed[:3])
    found = collectives(text.compile().as_text())
    assert set(found) == {"collective-permute"}


def test_window_without_a_mesh():
    found = both(*arrays(), sliding_window=5)
    for got, want in zip(found, oracle(4, 0), strict=True):
        assert np.abs(np.float64(got) - want).max() <= 2e-5 * max(1, np.abs(want).max())


def test_arguments():
    q, k, v, *_ = arrays()
    with pytest.raises(ArgumentError, match="4 query heads are no multiple of 3"):
        plain_flash_attention(q, jnp.ones((2, 32, 3, 8)), jnp.ones((2, 32, 3, 8)))
    with pytest.raises(ArgumentError, match="sliding_window=0"):
        plain_flash_attention(q, k, v, sliding_window=0)
