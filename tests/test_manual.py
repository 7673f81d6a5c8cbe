# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`Manual` and the keyword `shard`: kernels that communicate themselves, against a float64 reference."""

import functools
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax import lax
from jax.sharding import PartitionSpec

from haliax_kernels import (
    ArgumentError,
    BindingError,
    Gather,
    Manual,
    ManualAxisError,
    MeshAxisConflictError,
    Parallel,
    PolicyError,
    ShardedAxisError,
    SignatureError,
    Sum,
    named_kernel,
)
from haliax_kernels.collectives import exclusive_prefix, ring
from support import BOTH_MESHES, check_against_reference, collectives, make_mesh, planned

B, Pos, KPos, C = Axis("batch", 4), Axis("pos", 24), Axis("key_pos", 24), Axis("channel", 6)
SIZES = {"x": 2, "y": 3}
both_meshes = pytest.mark.parametrize("axis_type", BOTH_MESHES)


def normal(*axes, seed=0):
    shape = [a.size for a in axes]
    return hax.named(jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32), axes)


def check(kernel, reference, arrays, mapping, axis_type, out_axes):
    """Also that the plan's collectives are the compiled program's."""
    plan, (forward, both) = check_against_reference(kernel, reference, arrays, mapping, axis_type, SIZES, out_axes)
    assert collectives(forward) == planned(plan, "forward")
    assert collectives(both) == planned(plan, "forward", "backward")
    return plan


@named_kernel("pos channel -> pos channel", policies={"pos": Manual(), "channel": Parallel()})
def cumulative(x, *, shard):
    own = jnp.cumsum(x, axis=0)
    return own + exclusive_prefix(jnp.add, own[-1], 0.0, shard["pos"].mesh_axes)


@both_meshes
@pytest.mark.parametrize(
    "mapping",
    [{}, {"pos": "x"}, {"pos": ("y", "x")}, {"pos": "y", "batch": "x"}, {"pos": "x", "channel": "y"}],
    ids=str,
)
def test_a_scan_along_the_axis(mapping, axis_type):
    plan = check(cumulative, lambda x: jnp.cumsum(x, axis=1), (normal(B, Pos, C),), mapping, axis_type, (B, Pos, C))
    if mapping == {"pos": "x"}:
        assert planned(plan, "forward") == {"all-gather": (1, 2 * 4 * 6 * 4)}  # two totals of all batches


def weigh(x, w, *, shard, mesh_axes):
    """The weights of a softmax over both, and its normalizer: one output that has the axis, one that lacks it."""
    s = x * w
    m = lax.stop_gradient(jnp.max(s))
    m = lax.pmax(m, mesh_axes) if mesh_axes else m
    p = jnp.exp(s - m)
    total = lax.psum(jnp.sum(p), mesh_axes) if mesh_axes else jnp.sum(p)
    return p / total, jnp.log(total) + m


@named_kernel("pos, pos -> pos, ()", policies={"pos": Manual(reduces=True)})
def normalized(x, w, *, shard):
    return weigh(x, w, shard=shard, mesh_axes=shard["pos"].mesh_axes)


@both_meshes
@pytest.mark.parametrize("mapping", [{}, {"pos": "x"}, {"pos": ("y", "x")}, {"pos": "y", "batch": "x"}], ids=str)
def test_an_output_that_every_shard_has_whole(mapping, axis_type):
    """`w` lacks the loop axis, so that its gradient is summed over it; the normalizer's cotangent counts once."""
    x, w = normal(B, Pos), normal(Pos, seed=1)

    def summed(x, w):
        p, lse = normalized(x, w)
        return p * lse

    class Kernel:
        __call__ = staticmethod(summed)
        plan = staticmethod(normalized.plan)

    def reference(x, w):
        s = x * w
        return jax.nn.softmax(s, axis=-1) * jax.nn.logsumexp(s, axis=-1, keepdims=True)

    check_against_reference(Kernel(), reference, (x, w), mapping, axis_type, SIZES, (B, Pos))


@named_kernel("pos channel, channel out -> out", policies={"pos": Manual(reduces=True)})
def pooled(x, w, *, shard):
    mesh_axes = shard["pos"].mesh_axes
    total = jnp.sum(x, axis=0)
    return jnp.tanh((lax.psum(total, mesh_axes) if mesh_axes else total) @ w)


@both_meshes
@pytest.mark.parametrize("mapping", [{}, {"pos": "x"}, {"pos": "y", "batch": "x"}], ids=str)
def test_only_outputs_that_lack_the_axis(mapping, axis_type):
    Out = Axis("out", 3)
    arrays = normal(B, Pos, C), normal(C, Out, seed=1)
    plan = check(pooled, lambda x, w: jnp.tanh(x.sum(1) @ w), arrays, mapping, axis_type, (B, Out))
    assert plan.outputs[0].once == (plan.inputs[0].axes[1].mesh_axes if mapping else ())


def attend_in_a_ring(q, k, v, shard):
    """Causal attention, online softmax over the visiting keys."""
    q_pos = shard["q_pos"].offset + jnp.arange(q.shape[0])

    def step(carry, visiting, source):
        numerator, denominator, highest = carry
        k, v = visiting
        k_pos = source * shard["k_pos"].local_size + jnp.arange(k.shape[0])
        s = jnp.where(q_pos[:, None] >= k_pos, q @ k.T, -1e30)
        new = jnp.maximum(highest, lax.stop_gradient(jnp.max(s, axis=-1)))
        scale, p = jnp.exp(highest - new), jnp.where(q_pos[:, None] >= k_pos, jnp.exp(s - new[:, None]), 0)
        return numerator * scale[:, None] + p @ v, denominator * scale + jnp.sum(p, axis=-1), new

    start = jnp.zeros_like(q), jnp.zeros_like(q[:, 0]), jnp.full_like(q[:, 0], -1e30)
    numerator, denominator, _ = ring(step, start, (k, v), shard["k_pos"].mesh_axes)
    return numerator / denominator[:, None]


@named_kernel(
    "q_pos channel, k_pos channel, k_pos channel -> q_pos channel",
    policies={"q_pos": Manual(), "k_pos": Manual(reduces=True)},
)
def ring_attention(q, k, v, *, shard):
    return attend_in_a_ring(q, k, v, shard)


def causal_reference(q, k, v):
    s = jnp.einsum("bqc,bkc->bqk", q, k)
    s = jnp.where(jnp.tri(24, dtype=bool), s, -jnp.inf)
    return jnp.einsum("bqk,bkc->bqc", jax.nn.softmax(s, axis=-1), v)


def qkv():
    return normal(B, Pos, C), normal(B, KPos, C, seed=1), normal(B, KPos, C, seed=2)


@both_meshes
@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"pos": "y", "key_pos": "y"},
        {"pos": ("x", "y"), "key_pos": ("x", "y")},
        {"pos": "y", "key_pos": "y", "batch": "x"},
        {"pos": "x", "key_pos": "y"},  # every shard of the queries has a ring of its own
        {"key_pos": "y"},  # queries whole: all shards find the same
        {"pos": "y"},
    ],
    ids=str,
)
def test_ring_attention(mapping, axis_type):
    kernel = ring_attention.bind(q_pos="pos", k_pos="key_pos")
    plan, (forward, _) = check_against_reference(
        kernel, causal_reference, qkv(), mapping, axis_type, SIZES, (B, Pos, C)
    )
    if axis_type is BOTH_MESHES[0]:
        assert collectives(forward) == planned(plan, "forward")
    if mapping == {"pos": "y", "key_pos": "y"}:
        shown = [(c.kind, c.mesh_axes, c.bytes_per_device, c.steps) for c in plan.own if c.phase == "forward"]
        assert shown == [("collective-permute", ("y",), 4 * 8 * 6 * 4, 2)] * 2  # k and v, two transfers each
        assert re.search(r"forward +collective-permute +over y +of the kernel itself +768 B, 2 times", str(plan))
        assert [c.steps for c in plan.own if c.phase == "backward"] == [2, 2]


def test_a_backward_by_hand():
    """It must add up what JAX's transposes would: the cotangent of the shared output is on shard 0 only."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def total(x, shard):
        return lax.psum(jnp.sum(jnp.sin(x)), shard["pos"].mesh_axes)

    def backward(shard, x, ct):
        return (lax.psum(ct, shard["pos"].mesh_axes) * jnp.cos(x),)

    total.defvjp(lambda x, shard: (total(x, shard), x), backward)
    kernel = named_kernel("pos -> ()", policies={"pos": Manual(reduces=True)}, name="total")(
        lambda x, *, shard: total(x, shard)
    )
    check(kernel, lambda x: jnp.sin(x).sum(-1), (normal(B, Pos),), {"pos": "y"}, BOTH_MESHES[0], (B,))


@named_kernel("pos channel, pos channel -> pos channel", policies={"pos": Parallel()})
def with_position(x, y, *, shard):
    assert shard["pos"].global_size == 24 and "channel" in shard and list(shard) == ["pos", "channel"]
    position = shard["pos"].offset + jnp.arange(x.shape[0])
    return x * jnp.cos(position)[:, None] + y * jnp.sin(position)[:, None]


@both_meshes
@pytest.mark.parametrize("mapping", [{}, {"pos": "x"}, {"pos": ("y", "x")}], ids=str)
def test_shard_goes_with_every_policy(mapping, axis_type):
    def reference(x, y):
        position = jnp.arange(24)[:, None]
        return x * jnp.cos(position) + y * jnp.sin(position)

    check(with_position, reference, (normal(B, Pos, C), normal(Pos, C)), mapping, axis_type, (B, Pos, C))


def test_what_shard_says():
    seen = []

    @named_kernel("a, b, d -> a b", policies={"a": Manual(), "b": Gather(), "d": Sum()})
    def told(a, b, d, *, shard):
        seen.append({k: (s.mesh_axes, s.size, s.local_size, s.global_size) for k, s in shard.items()})
        hash(shard)
        return jnp.outer(a, b) * jnp.sum(d)

    xs = [hax.ones(Axis(n, 12)) for n in "abd"]
    told(*xs)
    assert seen.pop() == dict.fromkeys("abd", ((), 1, 12, 12))
    mesh = make_mesh(x=2, y=3, z=1)
    out = told(*xs, mesh=mesh, axis_mapping={"a": ("x", "z"), "b": "x", "d": "y"})
    assert seen.pop() == {"a": (("x",), 2, 6, 12), "b": ((), 1, 12, 12), "d": (("y",), 3, 4, 12)}
    np.testing.assert_array_equal(out.array, np.full((12, 12), 12.0))


def test_decoration():
    with pytest.raises(PolicyError, match=r"'pos' is Manual\(\), but the function has no keyword 'shard'"):
        named_kernel("pos -> pos", policies={"pos": Manual()})(lambda x: x)
    with pytest.raises(SignatureError, match="positional parameter 'shard'"):
        named_kernel("pos -> pos")(lambda x, shard: x)
    with pytest.raises(PolicyError, match="no argument"):
        named_kernel("pos -> pos out", policies={"out": Manual()})(lambda x, *, shard: x)
    anything = named_kernel("pos -> pos", policies={"pos": Manual()})(
        lambda x, **keywords: x * keywords["shard"]["pos"].size
    )
    np.testing.assert_array_equal(anything(hax.ones(Pos)).array, np.ones(24))
    with pytest.raises(ArgumentError, match="shard="):
        cumulative(normal(Pos, C), shard=None)


def refusals(kernel, *arrays, mapping, **bound):
    mesh = make_mesh(**SIZES)
    with pytest.raises(ValueError) as e:
        kernel(*arrays, mesh=mesh, axis_mapping=mapping, axes=bound)
    return e.value


def test_refusals():
    q, k, v = qkv()
    refused = functools.partial(refusals, ring_attention, q, k, v, q_pos="pos", k_pos="key_pos")
    strict = ring_attention.with_policies(k_pos=Manual())
    error = refusals(strict, q, k, v, mapping={"key_pos": "y"}, q_pos="pos", k_pos="key_pos")
    assert isinstance(error, ShardedAxisError)
    assert re.search(
        r"'key_pos' \(its 'k_pos'\) .*'y' \(3 devices\).*output 0 is not.*\n.*Manual\(reduces=True\)", str(error)
    )
    strict.plan(
        q,
        k,
        v,
        mesh=make_mesh(**SIZES),
        axis_mapping={"pos": "y", "key_pos": "y"},
        axes={"q_pos": "pos", "k_pos": "key_pos"},
    )
    error = refused(mapping={"batch": "x", "pos": "x", "key_pos": "y"})
    assert isinstance(error, MeshAxisConflictError)
    half = ring_attention.with_policies(q_pos=Parallel())
    error = refusals(half, q, k, v, mapping={"pos": "y", "key_pos": "y"}, q_pos="pos", k_pos="key_pos")
    assert isinstance(error, MeshAxisConflictError)
    pairs = named_kernel("a, b -> a b", policies={"a": Manual(), "b": Manual()}, name="pairs")(
        lambda a, b, *, shard: jnp.outer(a, b)
    )
    ab = hax.ones(Axis("a", 6)), hax.ones(Axis("b", 6))
    error = refusals(pairs, *ab, mapping={"a": "x", "b": "x"})
    assert isinstance(error, MeshAxisConflictError) and "one block of the diagonal" in str(error)
    error = refusals(cumulative, normal(B, Pos, C), mapping={}, pos=("batch", "pos"))
    assert isinstance(error, BindingError) and "flattened axis" in str(error)


@pytest.mark.parametrize("kernel", [cumulative, with_position])
def test_refused_where_an_enclosing_shard_map_hides_the_offset(kernel):
    mesh = make_mesh(**SIZES)
    arrays = [normal(Pos, C)] * (2 if kernel is with_position else 1)

    def body(*xs):
        local = [hax.named(x, (Axis("pos", 12), C)) for x in xs]
        return kernel(*local, axis_mapping={"pos": "x"}).array

    f = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False)
    with pytest.raises(ManualAxisError, match="'pos'"):
        f(*(x.array for x in arrays))


def test_a_kernel_without_a_backward_is_planned_all_the_same():
    from jax.experimental import pallas as pl

    @named_kernel("pos -> pos", policies={"pos": Manual()})
    def shifted(x, *, shard):
        mesh_axes = shard["pos"].mesh_axes
        x = lax.ppermute(x, mesh_axes, [(0, 1), (1, 0)]) if mesh_axes else x

        def body(source, target):
            target[...] = lax.while_loop(lambda v: v[0] < 3.0, lambda v: v + 1, source[...])

        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    plan = shifted.plan(hax.zeros(Axis("pos", 4)), mesh=make_mesh(x=2), axis_mapping={"pos": "x"})
    assert [(c.phase, c.kind, c.bytes_per_device) for c in plan.collectives] == [("forward", "collective-permute", 8)]
    assert any("cannot be differentiated" in note for note in plan.notes)
    assert plan.outputs[0].axes[0].size == 4
