# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Every way of calling: eager, jit, scan, remat, vmap, inside other shard_maps, under every kind of mesh."""

import functools
import warnings

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_kernels import Gather, Sum, named_kernel
from support import BOTH_MESHES, collectives, make_mesh

B, D = Axis("batch", 8), Axis("embed", 6)
MAPPING = {"batch": "data"}


@named_kernel("embed, embed -> embed")
def scaled(x, w):
    return jnp.sin(x) * w * jnp.sum(x)


def arrays():
    return hax.random.normal(jax.random.key(0), (B, D)), hax.random.normal(jax.random.key(1), (D,))


def reference(x, w):
    return np.sin(x) * w * x.sum(-1, keepdims=True)


def check(out, x, w):
    assert [a.name for a in out.axes] == ["batch", "embed"]
    np.testing.assert_allclose(out.array, reference(np.float64(x.array), np.float64(w.array)), rtol=2e-5, atol=1e-5)


def contexts():
    auto, explicit = make_mesh(data=4, model=2), make_mesh(AxisType.Explicit, data=4, model=2)
    mixed = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    mixed2 = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    return {"auto": auto, "explicit": explicit, "mixed": mixed, "mixed, data auto": mixed2}


@pytest.mark.parametrize("kind", ["auto", "explicit", "mixed", "mixed, data auto"])
@pytest.mark.parametrize("how", ["eager", "jit", "named_jit", "grad"])
def test_meshes(kind, how):
    x, w = arrays()
    with jax.set_mesh(contexts()[kind]), hax.axis_mapping(MAPPING):
        sx, sw = hax.shard(x), hax.shard(w)
        if how == "grad":
            got = jax.jit(jax.grad(lambda x, w: jnp.sum(scaled(x, w).array ** 2), argnums=(0, 1)))(sx, sw)
            want = jax.grad(lambda x, w: jnp.sum((jnp.sin(x) * w * x.sum(-1, keepdims=True)) ** 2), argnums=(0, 1))(
                x.array, w.array
            )
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a.array, b, rtol=2e-4, atol=1e-5)
            return
        call = {"eager": scaled, "jit": jax.jit(scaled), "named_jit": hax.named_jit(scaled)}[how]
        out = call(sx, sw)
        check(out, x, w)
        assert out.array.sharding.spec[0] == "data"


@pytest.mark.parametrize("how", ["eager", "jit", "grad"])
def test_legacy_mesh(how):
    x, w = arrays()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with make_mesh(data=4, model=2), hax.axis_mapping(MAPPING):
            if how == "grad":
                g = jax.jit(jax.grad(lambda x: jnp.sum(scaled(x, w).array)))(x)
                assert np.isfinite(g.array).all()
            out = (jax.jit(scaled) if how == "jit" else scaled)(x, w)
    check(out, x, w)
    assert out.array.sharding.spec[0] == "data"


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_mesh_argument(how):
    x, w = arrays()
    mesh = make_mesh(data=4)

    def call(x, w):
        return scaled(x, w, mesh=mesh, axis_mapping=MAPPING)

    out = (jax.jit(call) if how == "jit" else call)(x, w)
    check(out, x, w)
    assert out.array.sharding.spec[0] == "data"


def test_sharding_of_concrete_arrays():
    x, w = arrays()
    mesh = make_mesh(data=4)
    sx = NamedArray(jax.device_put(x.array, NamedSharding(mesh, P("data"))), x.axes)
    sw = NamedArray(jax.device_put(w.array, NamedSharding(mesh, P())), w.axes)
    out = scaled(sx, sw)
    check(out, x, w)
    assert out.array.sharding.spec[0] == "data"
    g = jax.grad(lambda x: jnp.sum(scaled(x, sw).array))(sx)
    assert g.array.sharding.spec[0] == "data"


def test_without_a_mesh():
    x, w = arrays()
    check(scaled(x, w), x, w)
    check(jax.jit(scaled)(x, w), x, w)
    assert scaled.plan(x, w).mesh is None
    with jax.set_mesh(make_mesh(data=1)), hax.axis_mapping(MAPPING):
        check(scaled(x, w), x, w)
        assert scaled.plan(x, w).mesh is None


def test_eager_arrays_on_one_device_under_a_mesh_and_no_mapping():
    x, w = arrays()
    with jax.set_mesh(make_mesh(data=4)):
        check(scaled(x, w), x, w)
        assert scaled.plan(x, w).mesh is None


def test_explicit_mesh_with_a_disagreeing_mapping_reshards():
    x, w = arrays()
    with jax.set_mesh(make_mesh(AxisType.Explicit, data=4, model=2)):
        sx, sw = hax.shard(x, {"batch": "model"}), hax.shard(w, {"embed": "model"})
        plan = scaled.plan(sx, sw, axis_mapping=MAPPING)
        assert len(plan.reshards) == 2 and "'x'" in plan.reshards[0] and "reshards:" in str(plan)
        call = functools.partial(scaled, axis_mapping=MAPPING)
        for f in (call, jax.jit(call)):
            out = f(sx, sw)
            check(out, x, w)
            assert out.array.sharding.spec[0] == "data"


@pytest.mark.parametrize("types", BOTH_MESHES)
def test_scan_and_remat(types):
    x, _ = arrays()
    Layers = Axis("layers", 3)
    ws = hax.random.normal(jax.random.key(3), (Layers, D))

    def run(x, ws, checkpoint):
        def layer(carry, w):
            return (carry + 0.1 * scaled(carry, w)).rearrange(carry.axes), None

        step = jax.checkpoint(layer) if checkpoint else layer
        out, _ = jax.lax.scan(lambda c, w: step(c, NamedArray(w, (D,))), x, ws.array)
        return jnp.sum(out.array**2)

    want = jax.grad(run, argnums=(0, 1))(x, ws, False)
    with jax.set_mesh(make_mesh(types, data=4, model=2)), hax.axis_mapping(MAPPING):
        sx, sws = hax.shard(x), hax.shard(ws)
        for checkpoint in (False, True):
            got = jax.jit(jax.grad(run, argnums=(0, 1)), static_argnums=2)(sx, sws, checkpoint)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a.array, b.array, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize(("policy", "saved"), [("kept", 2), ("nothing", 1)])
def test_checkpoint_name_policies(policy, saved, capsys):
    """A name inside the kernel is one that a remat policy outside can keep."""
    kernel = named_kernel("embed -> embed")(lambda x: jnp.sin(checkpoint_name(jnp.exp(x), "kept")))
    x = hax.random.normal(jax.random.key(0), (B, D))
    policies = jax.checkpoint_policies
    chosen = policies.save_only_these_names("kept") if policy == "kept" else policies.nothing_saveable
    with jax.set_mesh(make_mesh(data=4)), hax.axis_mapping(MAPPING):
        f = jax.checkpoint(lambda x: jnp.sum(kernel(NamedArray(x, (B, D))).array), policy=chosen)
        print_saved_residuals(f, x.array)
        residuals = capsys.readouterr().out.strip().splitlines()
        assert len(residuals) == saved, residuals
        gradient = jax.jit(jax.grad(f))(x.array)
    np.testing.assert_allclose(gradient, np.cos(np.exp(x.array)) * np.exp(x.array), rtol=1e-4)


@pytest.mark.parametrize("how", ["jax.vmap", "hax.vmap", "hax.vmap of an unmapped axis"])
def test_vmap(how):
    """Field case F28."""
    x, _ = arrays()
    N = Axis("layers", 3)
    ws = hax.random.normal(jax.random.key(3), (N, D))
    with jax.set_mesh(make_mesh(data=4, model=2)), hax.axis_mapping(MAPPING):
        sx = hax.shard(x)
        if how == "jax.vmap":
            out = jax.jit(jax.vmap(lambda w: scaled(sx, NamedArray(w, (D,))).array))(ws.array)
        elif how == "hax.vmap":
            out = hax.named_jit(lambda: hax.vmap(lambda x, w: scaled(x, w), N)(sx, ws))().array
        else:
            f = hax.named_jit(lambda x: hax.vmap(lambda x: scaled(x, ws), B)(x))
            out = f(sx).rearrange(("layers", "batch", "embed")).array
    for i in range(3):
        np.testing.assert_allclose(
            out[i], reference(np.float64(x.array), np.float64(ws.array[i])), rtol=2e-5, atol=1e-5
        )


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_a_shard_map_that_is_manual_over_some_axes(check_vma):
    x, w = arrays()
    mesh = make_mesh(data=2, model=2, context=2)
    kernel = named_kernel("embed, embed -> embed", policies={"embed": Gather()})(
        lambda x, w: jnp.sin(x) * w * jnp.sum(x)
    )

    def body(x, w):
        x, w = hax.named(x, (B.resize(4), D)), hax.named(w, D)
        return kernel(x, w, axis_mapping={"batch": "data", "embed": "model"}).array

    f = jax.shard_map(
        body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}, check_vma=check_vma
    )
    out = jax.jit(f)(x.array, w.array)
    np.testing.assert_allclose(out, reference(np.float64(x.array), np.float64(w.array)), rtol=2e-5, atol=1e-5)

    def plain(x, w):
        return jnp.sum((jnp.sin(x) * w * x.sum(-1, keepdims=True)) ** 2)

    for argnums in ((0, 1), 1, 0):  # w alone is the same on every shard: its gradient is the sum over them
        got = jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), argnums=argnums))(x.array, w.array)
        want = jax.grad(plain, argnums=argnums)(x.array, w.array)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)


def test_inside_a_shard_map_that_is_manual_over_all():
    x, w = arrays()

    def body(x, w):
        return scaled(hax.named(x, (B.resize(2), D)), hax.named(w, D)).array

    f = jax.shard_map(body, mesh=make_mesh(data=4), in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)
    with hax.axis_mapping(MAPPING):  # a loop axis on a manual mesh axis: its shard is all the kernel needs
        out = f(x.array, w.array)
    np.testing.assert_allclose(out, reference(np.float64(x.array), np.float64(w.array)), rtol=2e-5, atol=1e-5)


def test_second_eager_call_compiles_nothing():
    x, w = arrays()
    traces = []

    @named_kernel("embed, embed -> embed")
    def kernel(x, w, *, power=1):
        traces.append(power)
        return x * w**power

    with jax.set_mesh(make_mesh(data=4)), hax.axis_mapping(MAPPING):
        sx, sw = hax.shard(x), hax.shard(w)
        kernel(sx, sw)
        assert len(traces) == 1
        kernel(sx, sw)
        assert len(traces) == 1
        kernel(sx, sw, power=2)
        assert traces == [1, 2]
    with jax.set_mesh(make_mesh(data=4)), hax.axis_mapping({}):
        kernel(sx, sw)  # another mapping is another plan
        assert len(traces) == 3


def test_second_eager_gradient_compiles_nothing():
    x, w = arrays()
    traces = []

    @named_kernel("embed, embed -> embed")
    def kernel(x, w):
        traces.append(1)
        return x * w

    with jax.set_mesh(make_mesh(data=4)), hax.axis_mapping(MAPPING):
        gradient = jax.grad(lambda x: jnp.sum(kernel(x, w).array))
        gradient(hax.shard(x))
        first = len(traces)
        gradient(hax.shard(x))
        assert len(traces) == first == 1


def test_derived_kernels_share_what_is_compiled():
    x, w = arrays()
    traces = []
    kernel = named_kernel("e, e -> e")(lambda x, w: (traces.append(1), x * w)[1])
    with jax.set_mesh(make_mesh(data=4)), hax.axis_mapping(MAPPING):
        for _ in range(3):
            kernel.bind(e="embed")(hax.shard(x), w)
        assert len(traces) == 1
        kernel.with_policies(e=Gather()).bind(e="embed")(hax.shard(x), w)
        assert len(traces) == 2


def test_gradient_under_hax_vmap_over_a_sharded_axis():
    """Field case F28: hax.vmap over the batch, which the mapping shards."""
    x, w = arrays()

    def loss(x, w):
        return jnp.sum(hax.vmap(lambda x: scaled(x, w), B)(x).array ** 2)

    want = jax.grad(lambda x, w: jnp.sum((jnp.sin(x) * w * x.sum(-1, keepdims=True)) ** 2), argnums=(0, 1))(
        x.array, w.array
    )
    with jax.set_mesh(make_mesh(data=4, model=2)), hax.axis_mapping(MAPPING):
        got = hax.named_jit(jax.grad(loss, argnums=(0, 1)))(hax.shard(x), hax.shard(w))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.array, b, rtol=2e-4, atol=1e-4)


def test_the_cache_does_not_confuse_equal_hashes():
    kernel = named_kernel("embed -> embed")(lambda x, flag: x * (2.0 if flag is True else 3.0))
    x = hax.ones(D)
    assert kernel(x, True).array[0] == 2.0
    assert kernel(x, 1).array[0] == 3.0
    assert kernel(x, 1.0).array[0] == 3.0


def test_no_collective_where_none_is_needed():
    x, w = arrays()
    with jax.set_mesh(make_mesh(data=4, model=2)), hax.axis_mapping(MAPPING):
        sx, sw = hax.shard(x), hax.shard(w)
        hlo = jax.jit(lambda x, w: scaled(x, w).array).lower(sx, sw).compile().as_text()
        assert collectives(hlo) == {}


def test_sum_over_two_mesh_axes():
    K = Axis("k", 8)
    kernel = named_kernel("k, k -> ()", policies={"k": Sum()})(lambda x, y: jnp.sum(jnp.sin(x) * y))
    x, y = hax.random.normal(jax.random.key(0), (B, K)), hax.random.normal(jax.random.key(1), (K,))
    with jax.set_mesh(make_mesh(data=2, model=4)), hax.axis_mapping({"k": ("model", "data")}):
        out = kernel(hax.shard(x), hax.shard(y))
        g = jax.grad(lambda y: jnp.sum(kernel(hax.shard(x), y).array ** 2))(hax.shard(y))
    want = np.sin(np.float64(x.array)) @ np.float64(y.array)
    np.testing.assert_allclose(out.array, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(g.array, 2 * want @ np.sin(np.float64(x.array)), rtol=1e-5, atol=1e-5)
