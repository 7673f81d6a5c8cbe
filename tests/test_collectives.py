# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The collectives in a user's own `shard_map`, against NumPy on the whole array: values, gradients, bytes moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from haliax_kernels.collectives import exclusive_prefix, exclusive_suffix, halo_exchange, ring
from haliax_kernels.errors import ArgumentError
from support import BOTH_MESHES, collectives, make_mesh

AXES = ["a", ("a", "b"), ("b", "a")]
SIZES = {"a": 2, "b": 3}


def count(axes):
    return int(np.prod([SIZES[a] for a in ((axes,) if isinstance(axes, str) else axes)]))


def mapped(f, axes, dim=0, check_vma=False, axis_type=BOTH_MESHES[0]):
    spec = P(*[None] * dim, axes)
    mesh = make_mesh(axis_type, **SIZES)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))


def blocks_with_halo(x, shards, dim, before, after, edge):
    """The shards of `x` with their halos, one after the other: the reference in NumPy."""
    width = [(0, 0)] * x.ndim
    width[dim] = (before, after)
    padded = np.pad(np.asarray(x), width, constant_values=edge)
    n = x.shape[dim] // shards
    return np.concatenate(
        [np.take(padded, range(i * n, (i + 1) * n + before + after), axis=dim) for i in range(shards)], axis=dim
    )


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    ("before", "after", "edge"), [(1, 0, 0), (0, 2, 0), (2, 1, -3), (5, 7, 2), (40, 40, 0), (0, 0, 1)]
)
def test_halo_exchange(axes, before, after, edge):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 12, 3)), jnp.float32)
    exchange = mapped(lambda v: halo_exchange(v, axes, dim=1, before=before, after=after, edge=edge), axes, 1)
    got, pullback = jax.vjp(exchange, x)
    np.testing.assert_array_equal(got, blocks_with_halo(x, count(axes), 1, before, after, edge))
    # The transpose of "copy row j of the whole to row i of the result" adds row i back to row j.
    rows = blocks_with_halo(np.arange(1, 13), count(axes), 0, before, after, 0)
    ct = np.random.default_rng(1).normal(size=got.shape).astype(np.float32)
    want = np.zeros((4, 13, 3), np.float64)
    np.add.at(want, (slice(None), rows), ct)
    np.testing.assert_allclose(pullback(jnp.asarray(ct))[0], want[:, 1:], rtol=1e-5, atol=1e-5)


def test_halo_exchange_moves_only_its_rows():
    f = mapped(lambda v: halo_exchange(v, "a", dim=0, before=2), "a")
    found = collectives(f.lower(jnp.ones((8, 5))).compile().as_text())
    assert found == {"collective-permute": (1, 2 * 5 * 4)}


def test_halo_exchange_refuses_negative_rows():
    with pytest.raises(ArgumentError, match="before=-1"):
        mapped(lambda v: halo_exchange(v, "a", dim=0, before=-1), "a")(jnp.ones(8))


def test_halo_exchange_without_a_mesh_axis_pads():
    np.testing.assert_array_equal(halo_exchange(jnp.ones(2), (), dim=0, before=1, after=2, edge=7), [7, 1, 1, 7, 7])


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("axis_type", BOTH_MESHES)
@pytest.mark.parametrize("axes", AXES)
def test_ring_shows_every_shard_with_its_index(axes, axis_type, check_vma):
    shards = count(axes)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12,)), jnp.float32)

    def local(v):
        def step(total, visiting, source):
            return total + (source + 1) * jnp.sum(visiting**2) * v

        return ring(step, jnp.zeros_like(v), v, axes)

    def whole(v):
        return jnp.sum(jnp.arange(1, shards + 1) * jnp.sum(v.reshape(shards, -1) ** 2, axis=1)) * v

    sharded = jax.device_put(x, jax.NamedSharding(make_mesh(axis_type, **SIZES), P(axes)))
    got, pullback = jax.vjp(mapped(local, axes, 0, check_vma, axis_type), sharded)
    want, wanted = jax.vjp(whole, x)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(pullback(got)[0], wanted(want)[0], rtol=1e-4)


def compose(f, g):
    """Affine maps x -> a x + b, first f, then g: associative, not commutative."""
    return f[0] * g[0], f[1] * g[0] + g[1]


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("method", ["log", "all_gather", "auto"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("forward", [True, False])
def test_prefix_and_suffix(axes, method, forward, check_vma):
    shards = count(axes)
    r = np.random.default_rng(0)
    a, b = (jnp.asarray(r.normal(size=(shards,)), jnp.float32) for _ in range(2))
    scan = exclusive_prefix if forward else exclusive_suffix

    def whole(a, b):
        one, zero = jnp.ones(()), jnp.zeros(())
        outs = []
        for i in range(shards):
            total = (one, zero)
            for j in range(i) if forward else range(i + 1, shards):
                total = compose(total, (a[j], b[j]))
            outs.append(total)
        return jnp.stack([o[0] for o in outs]), jnp.stack([o[1] for o in outs])

    f = mapped(lambda a, b: scan(compose, (a, b), (1.0, 0.0), axes, method=method), axes, check_vma=check_vma)
    got, pullback = jax.vjp(f, a, b)
    want, wanted = jax.vjp(whole, a, b)
    for x, y in zip((*got, *pullback(got)), (*want, *wanted(want)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_prefix_takes_log_steps_or_one_all_gather():
    def found(method, size):
        f = jax.shard_map(
            lambda v: exclusive_prefix(jnp.add, v, 0.0, "a", method=method),
            mesh=make_mesh(a=8),
            in_specs=P("a"),
            out_specs=P("a"),
            check_vma=False,
        )
        return collectives(jax.jit(f).lower(jnp.ones((8, size))).compile().as_text())

    assert found("log", 10) == {"collective-permute": (4, 4 * 40)}
    assert found("auto", 10) == {"all-gather": (1, 8 * 40)}
    assert found("auto", 1 << 18) == {"collective-permute": (4, 4 << 20)}


@pytest.mark.parametrize(
    ("method", "kind", "times"), [("log", "collective-permute", 4), ("all_gather", "all-gather", 1)]
)
def test_leaves_of_one_dtype_travel_together(method, kind, times):
    """As a summary of linear attention: a matrix, a row, a number, and integers."""
    tree = {"s": jnp.ones((3, 4)), "z": jnp.ones(4), "log": jnp.ones(()), "ids": jnp.ones(3, jnp.int32)}

    def body(v):
        x = jax.tree.map(lambda a: a * (v[0] + 1).astype(a.dtype), tree)
        zero = jax.tree.map(jnp.zeros_like, tree)
        before = exclusive_prefix(lambda a, b: jax.tree.map(jnp.add, a, b), x, zero, "a", method=method)
        return jax.tree.map(lambda a: a[None], before)

    f = jax.shard_map(body, mesh=make_mesh(a=8), in_specs=P("a"), out_specs=P("a"), check_vma=False)
    v = jnp.arange(8.0)
    for name, got in f(v).items():
        expected = np.array([i * (i + 1) / 2 for i in range(8)]).reshape(8, *[1] * tree[name].ndim)
        np.testing.assert_array_equal(got, np.broadcast_to(expected, (8, *tree[name].shape)))
    found = collectives(jax.jit(f).lower(v).compile().as_text())
    rows = 8 if kind == "all-gather" else 1
    assert found == {kind: (2 * times, times * rows * 4 * (12 + 4 + 1 + 3))}


def test_without_mesh_axes_nothing_is_communicated():
    assert exclusive_prefix(jnp.add, jnp.float32(3), 0.0, ()) == 0
    assert ring(lambda c, x, i: c + x + i, jnp.float32(1), jnp.float32(2), ()) == 3
