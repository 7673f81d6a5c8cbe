# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`Halo`: values and gradients against a float64 reference on the whole axis, and exactly the rows that are moved."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from haliax_kernels import BindingError, Halo, OutputError, Parallel, PolicyError, named_kernel
from support import BOTH_MESHES, collectives, make_mesh, planned

B, Pos, C = Axis("batch", 4), Axis("pos", 24), Axis("channel", 6)
TAPS = Axis("taps", 3)
MAPPINGS = [
    {},
    {"pos": "x"},
    {"pos": ("x", "y")},
    {"pos": ("y", "x")},
    {"pos": "y", "batch": "x"},
    {"pos": "y", "channel": "x"},
]


@named_kernel("pos channel, taps channel -> pos channel", policies={"pos": Halo(before=2), "channel": Parallel()})
def causal_conv(x, w):
    n = x.shape[0] - 2
    return sum(x[i : i + n] * w[i] for i in range(3))


def conv_reference(x, w):
    """x (batch, pos, channel), w (taps, channel)."""
    padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
    return sum(padded[:, i : i + x.shape[1]] * w[i] for i in range(3))


def check(kernel, reference, arrays, mapping, axis_type, sizes, out_axes):
    """Values and gradients of all arguments under a random cotangent; returns the plan and what was compiled."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a.array), jnp.float64) for a in arrays]
        want, pullback = jax.vjp(reference, *wide)
        ct = np.random.default_rng(5).normal(size=want.shape)
        wanted = [np.asarray(g) for g in pullback(jnp.asarray(ct))]
        want = np.asarray(want)

    def run(*xs):
        return kernel(*xs).rearrange(out_axes).array

    def both(ct, *xs):
        out, back = jax.vjp(run, *xs)
        return out, back(ct)

    with jax.set_mesh(make_mesh(axis_type, **sizes)), hax.axis_mapping(mapping):
        xs = [hax.shard(a) for a in arrays]
        ct = hax.shard(NamedArray(jnp.asarray(ct, jnp.float32), out_axes)).array
        got, grads = jax.jit(both)(ct, *xs)
        plan = kernel.plan(*xs)
        hlo = jax.jit(run).lower(*xs).compile().as_text(), jax.jit(both).lower(ct, *xs).compile().as_text()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for g, w in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(g.array, w, rtol=1e-4, atol=1e-4)
    return plan, hlo


@pytest.mark.parametrize("axis_type", BOTH_MESHES)
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_causal_convolution(mapping, axis_type):
    r = np.random.default_rng(0)
    x = hax.named(jnp.asarray(r.normal(size=(4, 24, 6)), jnp.float32), (B, Pos, C))
    w = hax.named(jnp.asarray(r.normal(size=(3, 6)), jnp.float32), (TAPS, C))
    plan, (forward, both) = check(causal_conv, conv_reference, (x, w), mapping, axis_type, {"x": 2, "y": 3}, x.axes)
    assert collectives(forward) == planned(plan, "forward")
    assert collectives(both) == planned(plan, "forward", "backward")
    if mapping == {"pos": "x"}:
        assert planned(plan, "forward") == {"collective-permute": (1, 2 * 4 * 6 * 4)}  # two rows, all batches


WINDOW = 5


@named_kernel(
    "pos channel, pos channel, pos channel, pos -> pos channel", policies={"pos": Halo(before=WINDOW - 1, edge=-99)}
)
def window_attention(q, k, v, position):
    own = slice(WINDOW - 1, None)
    distance = position[own, None] - position
    s = jnp.where((distance >= 0) & (distance < WINDOW) & (position >= 0), q[own] @ k.T, -jnp.inf)
    return jax.nn.softmax(s, axis=-1) @ v


def window_reference(q, k, v):
    i = jnp.arange(q.shape[1])
    s = jnp.einsum("bqc,bkc->bqk", q, k)
    distance = i[:, None] - i
    s = jnp.where((distance >= 0) & (distance < WINDOW), s, -jnp.inf)
    return jnp.einsum("bqk,bkc->bqc", jax.nn.softmax(s, axis=-1), v)


@pytest.mark.parametrize(
    "mapping", [{}, {"pos": "x"}, {"pos": ("x", "y"), "batch": None}, {"pos": "y", "batch": "x"}], ids=str
)
def test_sliding_window_attention(mapping):
    """With six shards of four rows the window is as long as a shard."""
    r = np.random.default_rng(0)
    qkv = [hax.named(jnp.asarray(r.normal(size=(4, 24, 6)), jnp.float32), (B, Pos, C)) for _ in range(3)]
    position = hax.named(jnp.arange(24), Pos)

    class Kernel:
        def __call__(self, *xs):
            return window_attention(*xs, position)

        def plan(self, *xs):
            return window_attention.plan(*xs, position)

    check(Kernel(), window_reference, qkv, mapping, BOTH_MESHES[0], {"x": 2, "y": 3}, (B, Pos, C))


H, W = Axis("h", 6), Axis("w", 8)


@named_kernel("h w -> h w", policies={"h": Halo(3, 4), "w": Halo(1, 2)})
def box(x):
    h, w = x.shape[0] - 7, x.shape[1] - 3
    return sum((i + 2 * j + 1) * x[i : i + h, j : j + w] ** 2 for i in range(8) for j in range(4))


def box_reference(x):
    padded = jnp.pad(x, ((0, 0), (3, 4), (1, 2)))
    return sum((i + 2 * j + 1) * padded[:, i : i + 6, j : j + 8] ** 2 for i in range(8) for j in range(4))


@pytest.mark.parametrize(
    "mapping", [{}, {"h": "y"}, {"w": "x"}, {"h": "y", "w": "x"}, {"h": "x", "w": ("p", "q")}], ids=str
)
def test_two_halos_reach_over_the_corners_and_over_several_shards(mapping):
    sizes = {"x": 2, "p": 2, "q": 2} if "p" in str(mapping) else {"x": 2, "y": 3}
    x = hax.named(jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 8)), jnp.float32), (B, H, W))
    plan, (forward, _) = check(box, box_reference, (x,), mapping, BOTH_MESHES[0], sizes, x.axes)
    assert collectives(forward) == planned(plan, "forward")


def test_on_one_device_the_ends_are_filled():
    @named_kernel("pos -> pos", policies={"pos": Halo(1, 1, edge=7)})
    def ends(x):
        return x[:-2] + 10 * x[2:]

    np.testing.assert_array_equal(ends(hax.named(jnp.array([1.0, 2.0, 3.0]), "pos")).array, [27, 31, 72])


def test_collapse_and_rows_of_integers():
    @named_kernel("pos, pos -> pos", policies={"pos": Halo(1, edge=-1)}, loop="collapse")
    def previous(x, ids):
        return jnp.where(ids[:, :-1] == ids[:, 1:], x[:, :-1], 0.0)

    x = hax.named(jnp.arange(1.0, 49).reshape(2, 24), (Axis("batch", 2), Pos))
    ids = hax.named(jnp.arange(24) // 5, Pos)
    want = np.where(np.arange(24) % 5 == 0, 0, np.asarray(x.array) - 1)
    with jax.set_mesh(make_mesh(x=4)), hax.axis_mapping({"pos": "x"}):
        np.testing.assert_array_equal(jax.jit(previous)(x, ids).array, want)


def test_refusals():
    with pytest.raises(PolicyError, match="before=-1"):
        Halo(-1)
    with pytest.raises(PolicyError, match=r"'pos' is Halo\(\), but output 0 .* lacks it"):
        named_kernel("pos channel -> channel", policies={"pos": Halo(1)})(lambda x: x)
    x = hax.ones((Axis("a", 2), Axis("b", 4)))
    flat = named_kernel("pos -> pos", policies={"pos": Halo(1)}, name="flat")(lambda x: x[1:])
    with pytest.raises(BindingError, match="bound to several array axes 'a', 'b'"):
        flat(x, axes={"pos": ("a", "b")})
    whole = named_kernel("pos -> pos", policies={"pos": Halo(1)}, name="whole")(lambda x: x)
    with pytest.raises(OutputError, match="has size 5, but is 4"):
        whole(hax.ones(Axis("pos", 4)))
