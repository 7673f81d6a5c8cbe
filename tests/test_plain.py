# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`.plain`: plain arrays, however they lie, against float64 references that know nothing of this package."""

import contextlib

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_kernels import (
    ArgumentError,
    AxisSizeError,
    Gather,
    Halo,
    Parallel,
    ShardedAxisError,
    Sum,
    TransformError,
    UnsupportedOptionError,
    named_kernel,
)
from support import ATTENTION, BOTH_MESHES, attention, collectives, make_mesh

attend = named_kernel(ATTENTION, policies={"q_pos": Parallel()}, name="attend")(attention)
gathering = attend.with_policies(k_pos=Gather())


@named_kernel("row k, k col -> row col", policies={"row": Parallel(), "k": Sum(), "col": Parallel()})
def contract(x, w):
    return jnp.sin(x) @ w


@named_kernel("pos channel, taps channel -> pos channel", policies={"pos": Halo(2), "channel": Parallel()})
def convolution(x, w):
    n = x.shape[0] - 2
    return sum(x[i : i + n] * w[i] for i in range(3))


@named_kernel("pos embed -> pos embed, pos", policies={"pos": Gather()})
def mixed(x, scale=1.0):
    """Two outputs; the first mixes the positions."""
    y = jnp.sin(x) * scale
    return y * jnp.sum(y), jnp.sum(y, axis=-1)


def attention64(q, k, v):
    s = jnp.einsum("...qd,...kd->...qk", q, k)
    return jax.nn.softmax(s, axis=-1) @ v


def contract64(x, w):
    return jnp.sin(x) @ w


def convolution64(x, w):
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(2, 0), (0, 0)])
    return sum(padded[..., i : i + x.shape[-2], :] * w[..., i, None, :] for i in range(3))


def mixed64(x):
    y = jnp.sin(x)
    return y * jnp.sum(y, axis=(-2, -1), keepdims=True), jnp.sum(y, axis=-1)


def arrays(*shapes):
    r = np.random.default_rng(0)
    return [jnp.asarray(r.normal(size=shape), jnp.float32) for shape in shapes]


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def both(f):
    """From cotangents and arguments to values and gradients."""

    def run(cts, *xs):
        out, pullback = jax.vjp(f, *xs)
        return out, pullback(cts)

    return run


def wanted(reference, xs):
    """Values, random cotangents and gradients, in float64."""
    with jax.enable_x64(True):
        out, pullback = jax.vjp(reference, *(jnp.asarray(np.asarray(x), jnp.float64) for x in xs))
        r = np.random.default_rng(7)
        cts = jax.tree.map(lambda o: jnp.asarray(r.normal(size=o.shape)), out)
        grads = pullback(cts)
        return jax.tree.map(np.asarray, (out, cts, grads))


def close(got, want, tolerance=1e-4):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


def check(f, reference, mesh, xs, specs, context=None):
    out, cts, grads = wanted(reference, xs)
    cts = jax.tree.map(lambda c: put(mesh, jnp.asarray(c, jnp.float32), ()), cts)
    with context or contextlib.nullcontext():
        got = jax.jit(both(f))(cts, *(put(mesh, x, s) for x, s in zip(xs, specs, strict=True)))
    close(got, (out, grads))


# (kernel, reference, shapes, specs), on a mesh x 2, y 3
CASES = {
    "nothing sharded": (attend, attention64, [(4, 6, 4), (4, 5, 4), (4, 5, 4)], [(), (), ()]),
    "loop": (attend, attention64, [(4, 6, 4), (4, 5, 4), (4, 5, 4)], [("x",), ("x",), ("x",)]),
    "loop, core": (attend, attention64, [(4, 6, 4), (4, 5, 4), (4, 5, 4)], [("x", "y"), ("x",), ("x",)]),
    "shared": (attend, attention64, [(3, 4, 6, 4), (4, 5, 4), (4, 5, 4)], [("y", "x"), ("x",), ("x",)]),
    "shared, the first": (attend, attention64, [(6, 4), (3, 4, 5, 4), (4, 5, 4)], [(), ("y", "x"), ("x",)]),
    "one lies elsewhere": (attend, attention64, [(4, 6, 4), (4, 5, 4), (4, 5, 4)], [("x",), (), ("x",)]),
    "two ways": (attend, attention64, [(6, 6, 4), (6, 5, 4), (6, 5, 4)], [("x",), ("y",), ()]),
    "gather": (gathering, attention64, [(4, 6, 4), (4, 6, 4), (4, 6, 4)], [("x",), ("x", "y"), ("x", "y")]),
    "gather one": (gathering, attention64, [(4, 6, 4), (4, 6, 4), (4, 6, 4)], [(), (None, "y"), (None, None)]),
    "gather, q over it": (gathering, attention64, [(6, 4), (6, 4), (6, 4)], [("y",), ("y",), ("y",)]),
    "sum": (contract, contract64, [(4, 6), (6, 4)], [("x", "y"), ("y",)]),
    "sum, one whole": (contract, contract64, [(4, 6), (6, 4)], [(None, "y"), ()]),
    "sum over two": (contract, contract64, [(5, 4, 12), (12, 4)], [(None, None, ("y", "x")), (("y", "x"),)]),
    "halo": (convolution, convolution64, [(4, 12, 6), (3, 6)], [("x", "y"), ()]),
    "halo over two": (convolution, convolution64, [(4, 12, 6), (3, 6)], [(None, ("x", "y")), ()]),
    "halo and channel": (convolution, convolution64, [(4, 12, 6), (3, 6)], [(None, "x", "y"), (None, "y")]),
    "two outputs": (mixed, mixed64, [(4, 6, 5)], [("x", "y")]),
}


@pytest.mark.parametrize("axis_type", BOTH_MESHES)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, axis_type):
    kernel, reference, shapes, specs = CASES[case]
    mesh = make_mesh(axis_type, x=2, y=3)
    if axis_type == AxisType.Explicit and case == "two ways":
        pytest.skip("the types themselves disagree")
    check(kernel.plain, reference, mesh, arrays(*shapes), specs)
