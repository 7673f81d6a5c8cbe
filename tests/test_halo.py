# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`Halo`: values and gradients against a float64 reference on the whole axis, and exactly the rows that are moved."""

import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_kernels import (
    AxisSizeError,
    BindingError,
    Halo,
    InconsistentShardingError,
    MeshAxisConflictError,
    OutputError,
    Parallel,
    PolicyError,
    named_kernel,
)
from support import BOTH_MESHES, check_against_reference, collectives, make_mesh, planned

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


@pytest.mark.parametrize("axis_type", BOTH_MESHES)
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_causal_convolution(mapping, axis_type):
    r = np.random.default_rng(0)
    x = hax.named(jnp.asarray(r.normal(size=(4, 24, 6)), jnp.float32), (B, Pos, C))
    w = hax.named(jnp.asarray(r.normal(size=(3, 6)), jnp.float32), (TAPS, C))
    plan, (forward, both) = check_against_reference(
        causal_conv, conv_reference, (x, w), mapping, axis_type, {"x": 2, "y": 3}, x.axes
    )
    assert collectives(forward) == planned(plan, "forward")
    assert collectives(both) == planned(plan, "forward", "backward")
    if mapping == {"pos": "x"}:
        assert planned(plan, "forward") == {"collective-permute": (1, 2 * 4 * 6 * 4)}  # two rows, all batches


WINDOW = 5
KPos = Axis("key_pos", 24)


@named_kernel(
    "q_pos channel, k_pos channel, k_pos channel -> q_pos channel",
    policies={"q_pos": Parallel(), "k_pos": Halo(before=WINDOW - 1, aligned_with="q_pos")},
)
def window_attention(q, k, v, *, shard):
    # The keys' rows begin WINDOW - 1 before the queries'.
    i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])
    distance = i + WINDOW - 1 - j
    inside = shard["q_pos"].offset + j >= WINDOW - 1
    s = jnp.where((distance >= 0) & (distance < WINDOW) & inside, q @ k.T, -jnp.inf)
    return jax.nn.softmax(s, axis=-1) @ v


def window_reference(q, k, v):
    i = jnp.arange(q.shape[1])
    s = jnp.einsum("bqc,bkc->bqk", q, k)
    distance = i[:, None] - i
    s = jnp.where((distance >= 0) & (distance < WINDOW), s, -jnp.inf)
    return jnp.einsum("bqk,bkc->bqc", jax.nn.softmax(s, axis=-1), v)


def window_arguments():
    r = np.random.default_rng(0)
    return [hax.named(jnp.asarray(r.normal(size=(4, 24, 6)), jnp.float32), (B, p, C)) for p in (Pos, KPos, KPos)]


@pytest.mark.parametrize("axis_type", BOTH_MESHES)
@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"pos": "x", "key_pos": "x"},
        {"pos": ("x", "y"), "key_pos": ("x", "y")},
        {"pos": "y", "batch": "x"},  # keys and values lie whole: cut for free
        {"key_pos": "y", "batch": "x"},
    ],
    ids=str,
)
def test_sliding_window_attention(mapping, axis_type):
    """With six shards of four rows the window is as long as a shard."""
    kernel = window_attention.bind(q_pos=Pos, k_pos=KPos)
    plan, (forward, both) = check_against_reference(
        kernel, window_reference, window_arguments(), mapping, axis_type, {"x": 2, "y": 3}, (B, Pos, C)
    )
    assert collectives(forward) == planned(plan, "forward")
    if not plan.reshards:  # else gradients go back to where the arguments lie
        assert collectives(both) == planned(plan, "forward", "backward")
    if mapping.get("pos") == "x":  # four rows of keys and of values, all batches and channels
        assert planned(plan, "forward") == {"collective-permute": (2, 2 * 4 * 4 * 6 * 4)}


def test_aligned_axes_lie_alike():
    q, k, v = window_arguments()
    kernel = window_attention.bind(q_pos="pos", k_pos="key_pos")
    mesh = make_mesh(x=2, y=3)
    refusal, *_ = kernel.plan(q, k, v, mesh=mesh, axis_mapping={"pos": "x", "key_pos": "y"}).refusals
    assert isinstance(refusal, InconsistentShardingError)
    assert re.search(r"'pos' \(its 'q_pos'\).* 'key_pos' \(its 'k_pos'\)", str(refusal))
    longer = (hax.concatenate("key_pos", (x, x)) for x in (k, v))
    with pytest.raises(AxisSizeError, match=r"'k_pos' has size 48, but 'q_pos'"):
        kernel(q, *longer)
    for wrong in ("k_pos", "channel", "other"):
        with pytest.raises(PolicyError, match=rf"aligned_with='{wrong}'"):
            window_attention.with_policies(k_pos=Halo(1, aligned_with=wrong))
    scores = named_kernel(
        "q_pos, k_pos -> q_pos k_pos", policies={"q_pos": Parallel(), "k_pos": Halo(aligned_with="q_pos")}
    )(jnp.outer)
    (refusal,) = scores.plan(
        hax.ones(Axis("q_pos", 4)), hax.ones(Axis("k_pos", 4)), mesh=mesh, axis_mapping={"q_pos": "x"}
    ).refusals
    assert isinstance(refusal, MeshAxisConflictError) and "one block of the diagonal" in str(refusal)


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
    plan, (forward, _) = check_against_reference(box, box_reference, (x,), mapping, BOTH_MESHES[0], sizes, x.axes)
    assert collectives(forward) == planned(plan, "forward")


@pytest.mark.parametrize("mapping", [{}, {"h": "x"}, {"w": "x"}, {"h": "x", "w": "y"}], ids=str)
@pytest.mark.parametrize("axes", [(H, W), (W, H)], ids=["h w", "w h"])
def test_corners_where_two_ends_differ(axes, mapping):
    """The axis that stands later in the signature has them, however the axes lie and are sharded."""

    @named_kernel("h w -> h w", policies={"h": Halo(1, edge=5), "w": Halo(1, edge=7)})
    def corner(x):
        return x[:-1, :-1]

    x = hax.named(jnp.arange(48.0).reshape(6, 8), (H, W)).rearrange(axes)
    out = corner(x, mesh=make_mesh(x=2, y=2), axis_mapping=mapping).rearrange((H, W)).array
    want = np.full((6, 8), 7.0)
    want[0, 1:] = 5
    want[1:, 1:] = np.arange(48.0).reshape(6, 8)[:-1, :-1]
    np.testing.assert_array_equal(out, want)


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
