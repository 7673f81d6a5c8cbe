# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the gradient communicates: only the sums that mathematics needs, and exactly what the plan lists."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_kernels import Gather, Parallel, Sum, named_kernel
from support import ATTENTION, BOTH_MESHES, attention, collectives, instructions, make_mesh, planned

B, H, G, Pos, KPos, D = (
    Axis(n, s)
    for n, s in (("batch", 4), ("kv_head", 2), ("group", 2), ("position", 8), ("key_position", 8), ("head_size", 4))
)
AXES = {"q_pos": "position", "k_pos": "key_position", "key": "head_size", "value": "head_size"}
attend = named_kernel(ATTENTION, policies={"q_pos": Parallel()})(attention).bind(**AXES)


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((B, H, G, Pos, D), (B, H, KPos, D), (B, H, KPos, D))
    return tuple(hax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True))


def loss(q, k, v):
    out = attend(q, k, v)
    return jnp.sum(jnp.square(out.array.astype(jnp.float32)))


# The right-hand figures of the design's measurements: all-reduces of the two-shard_map form.
COUNTS = [
    ({"data": 4, "model": 2}, {"batch": "data"}, 0),
    ({"data": 4, "model": 2}, {}, 0),
    ({"context": 4, "model": 2}, {"position": "context"}, 1),
    ({"model": 2}, {"group": "model"}, 1),
    ({"model": 2, "data": 4}, {"kv_head": "model"}, 0),
]


@pytest.mark.parametrize("types", BOTH_MESHES)
@pytest.mark.parametrize(("mesh", "mapping", "count"), COUNTS)
def test_all_reduces_of_the_gradient(mesh, mapping, count, types):
    with jax.set_mesh(make_mesh(types, **mesh)), hax.axis_mapping(mapping):
        args = tuple(hax.shard(x) for x in inputs())
        hlo = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).compile().as_text()
        assert instructions(hlo, "all-reduce") == count
        assert collectives(hlo) == planned(attend.plan(*args), "backward")


CASES = [
    # signature, policies, mapping
    ("rows inner, inner cols -> rows cols", {"inner": Sum()}, {"inner": "model"}),
    ("rows inner, inner cols -> rows cols", {"inner": Sum(), "rows": Parallel()}, {"inner": "model", "rows": "data"}),
    (
        "rows inner, inner cols -> rows cols",
        {"inner": Gather(), "rows": Parallel()},
        {"inner": "model", "rows": "data"},
    ),
    ("rows inner, inner cols -> rows cols", {"cols": Gather(), "rows": Parallel()}, {"cols": "data", "rows": "data"}),
    ("rows inner, inner cols -> rows cols", {"cols": Gather()}, {"cols": ("model", "data"), "batch": "data"}),
    ("rows inner, inner cols -> rows cols", {"cols": Parallel()}, {"cols": "model", "batch": "data"}),
]


@pytest.mark.parametrize("types", BOTH_MESHES)
@pytest.mark.parametrize(("signature", "policies", "mapping"), CASES)
def test_compiled_collectives_are_the_planned_ones(signature, policies, mapping, types):
    kernel = named_kernel(signature, policies=policies)(lambda x, w: jnp.sin(x) @ w)
    x = hax.ones((Axis("batch", 4), Axis("rows", 8), Axis("inner", 16)))
    w = hax.ones((Axis("inner", 16), Axis("cols", 8)))
    with jax.set_mesh(make_mesh(types, data=2, model=4)), hax.axis_mapping(mapping):
        x, w = hax.shard(x), hax.shard(w)
        plan = kernel.plan(x, w)
        forward = jax.jit(lambda x, w: kernel(x, w).array).lower(x, w).compile().as_text()
        assert collectives(forward) == planned(plan, "forward")
        # A loss that is linear in the output, and whose gradient is fixed: nothing but the kernel communicates.
        out = kernel(x, w)

        @jax.jit
        def gradient(x, w, ct):
            return jax.vjp(lambda x, w: kernel(x, w).array, x, w)[1](ct)

        hlo = gradient.lower(x, w, out.array).compile().as_text()
        # The forward's sum is dead code where only the gradient is asked for.
        wanted = planned(plan, "forward", "backward")
        if any(isinstance(p, Sum) for p in policies.values()):
            wanted = planned(plan, "backward")
        assert collectives(hlo) == wanted


def test_no_division_by_an_idle_mesh_axis_of_three():
    """bf16 gradients are the unsharded ones to the last bit where nothing is summed (so: no group axis)."""
    q, k, v = inputs(jnp.bfloat16)
    args = (q["group", 0], k, v)
    ct = jax.random.normal(jax.random.key(7), (4, 2, 8, 4)).astype(jnp.bfloat16)

    def gradients(ct, *args):
        return jax.jit(lambda ct, *args: jax.vjp(lambda *a: attend(*a).array, *args)[1](ct))(ct, *args)

    want = gradients(ct, *args)
    for mapping, mesh in (
        ({"batch": "data"}, {"data": 2, "idle": 3}),
        ({}, {"idle": 3}),
        ({"kv_head": "m"}, {"idle": 3, "m": 2}),
    ):
        with jax.set_mesh(make_mesh(**mesh)), hax.axis_mapping(mapping):
            got = gradients(ct, *(hax.shard(x) for x in args))
        for a, b in zip(got, want, strict=True):
            assert a.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(a.array, np.float32), np.asarray(b.array, np.float32))


@pytest.mark.parametrize("types", BOTH_MESHES)
def test_cotangent_with_another_sharding_than_the_output(types):
    """Field case F09."""
    q, k, v = inputs()
    weight = jax.random.normal(jax.random.key(9), (4, 2, 2, 8, 4))
    mesh = make_mesh(types, data=2, model=2)

    def weighted(q, k, v, w):
        out = attend(q, k, v).array
        if types.name == "Explicit":
            out = jax.sharding.reshard(out, jax.typeof(w).sharding)
        return jnp.sum(out * w)

    want = jax.grad(weighted, argnums=(0, 1, 2))(q, k, v, weight) if types.name == "Auto" else None
    want = want or jax.grad(lambda *a: jnp.sum(attend(*a).array * weight), argnums=(0, 1, 2))(q, k, v)
    with jax.set_mesh(mesh), hax.axis_mapping({"batch": "data"}):
        args = tuple(hax.shard(x) for x in (q, k, v))
        w = jax.device_put(weight, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model")))
        got = jax.jit(jax.grad(weighted, argnums=(0, 1, 2)))(*args, w)
    for a, b, x in zip(got, want, args, strict=True):
        np.testing.assert_allclose(a.array, b.array, atol=1e-5)
        assert a.array.sharding.spec == x.array.sharding.spec or types.name == "Auto"


def test_residuals_are_arguments_and_outputs():
    """What this kernel's backward needs is q, k, v and o: the forward lets no copies of them out."""
    args = inputs()
    with jax.set_mesh(make_mesh(data=2)), hax.axis_mapping({"batch": "data"}):
        _, pullback = jax.vjp(lambda *a: attend(*a).array, *(hax.shard(x) for x in args))
    held = [leaf for leaf in jax.tree.leaves(pullback) if isinstance(leaf, jax.Array) and leaf.ndim]
    assert sorted(x.size for x in held) == sorted([args[0].size, args[0].size, args[1].size, args[2].size])


def test_empty_residual_does_not_cross_the_shard_map():
    """An associative scan leaves residuals of size 0, which crash some jaxlib versions at a shard_map's border."""
    kernel = named_kernel("pos -> pos")(lambda x: jax.lax.associative_scan(jnp.multiply, x))
    x = hax.random.uniform(jax.random.key(0), (Axis("batch", 4), Axis("pos", 5)))
    want = jax.grad(lambda x: kernel(x).sum().scalar())(x)
    with jax.set_mesh(make_mesh(data=4)), hax.axis_mapping({"batch": "data"}):
        got = jax.jit(jax.grad(lambda x: kernel(x).sum().scalar()))(hax.shard(x))
    np.testing.assert_allclose(got.array, want.array, rtol=1e-6)
