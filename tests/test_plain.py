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
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_kernels import (
    ArgumentError,
    AxisSizeError,
    Gather,
    Halo,
    Manual,
    Parallel,
    ShardedAxisError,
    Sum,
    TransformError,
    UnsupportedOptionError,
    named_kernel,
)
from haliax_kernels.collectives import exclusive_prefix
from haliax_kernels.plain_program import PlainProgram
from support import ATTENTION, attention, collectives, make_mesh

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
        return out, pullback(jax.tree.map(as_typed, cts, out))

    return run


def as_typed(ct, out):
    """The types of an Explicit mesh must agree."""
    sharding = jax.typeof(out).sharding
    return ct if sharding.mesh.are_all_axes_auto or sharding.mesh.empty else jax.sharding.reshard(ct, sharding)


def wanted(reference, xs):
    """Values, random cotangents and gradients, in float64."""
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in xs]
        r = np.random.default_rng(7)
        cts = jax.tree.map(lambda o: r.normal(size=o.shape), jax.eval_shape(reference, *wide))
        out, grads = jax.tree.map(np.asarray, jax.jit(both(reference))(cts, *wide))
        return out, cts, grads


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


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    kernel, reference, shapes, specs = CASES[case]
    check(kernel.plain, reference, make_mesh(x=2, y=3), arrays(*shapes), specs)


@pytest.mark.parametrize("set_mesh", [False, True])
@pytest.mark.parametrize("case", ["loop, core", "shared, the first", "sum, one whole", "halo"])
def test_explicit_mesh(case, set_mesh):
    kernel, reference, shapes, specs = CASES[case]
    mesh = make_mesh(AxisType.Explicit, x=2, y=3)
    context = jax.set_mesh(mesh) if set_mesh else None
    check(kernel.plain, reference, mesh, arrays(*shapes), specs, context)


def refused_text(f, *xs):
    """The text of a refusal while XLA compiles."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(f)(*xs)
    return str(caught.value)


def test_a_sharded_local_axis_is_refused():
    mesh = make_mesh(x=2, y=3)
    q, k, v = (put(mesh, x, s) for x, s in zip(arrays(*[(6, 4)] * 3), [(), ("y",), ("y",)], strict=True))
    text = refused_text(attend.plain, q, k, v)
    assert "ShardedAxisError: kernel 'attend' needs axis 'k_pos' whole on every device, but argument 'k'" in text
    assert "mesh axis 'y' (3 devices), as the compiler lays it out" in text
    assert "attend.with_policies(k_pos=Gather()).plain(...)" in text
    text = refused_text(jax.grad(lambda q, k, v: jnp.sum(attend.plain(q * 2, k * 2, v * 2))), q, k, v)
    assert "needs axis 'k_pos' whole" in text
    for axis_mapping in ({}, {"k_pos": "x"}):  # the mapping has no say
        with hax.axis_mapping(axis_mapping), pytest.raises(ShardedAxisError, match="over mesh axis 'y'"):
            attend.plain(q, k, v)
    explicit = make_mesh(AxisType.Explicit, x=2, y=3)
    with pytest.raises(ShardedAxisError, match=r"own type on the Explicit mesh"):
        jax.jit(attend.plain)(
            *(put(explicit, np.asarray(x), s) for x, s in zip([q, k, v], [(), ("y",), ()], strict=True))
        )


def test_unsharded_intermediates_and_results_that_are_wanted_in_parts():
    """Where XLA itself chooses the sharding."""
    mesh = make_mesh(x=2, y=3)
    x, w = arrays((4, 12, 6), (3, 6))

    def run(x, w):
        out = convolution.plain(x * 2, w + 1)
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P("x", "y")))

    out, _, _ = wanted(lambda x, w: convolution64(x * 2, w + 1), (x, w))
    f = jax.jit(run)
    close(f(x, w), out)
    assert collectives(f.lower(x, w).compile().as_text()).keys() == {"collective-permute"}
    total = jax.jit(lambda x, w: convolution.plain(x * 2, w + 1).sum())
    close(total(put(mesh, x, ()), put(mesh, w, ())), out.sum(), 1e-3)


def test_with_gspmd_in_place_of_shardy():
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        for case in ("loop, core", "sum, one whole"):
            test_values_and_gradients(case)
        test_a_sharded_local_axis_is_refused()
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_a_result_wanted_in_parts_of_a_local_axis_does_not_spread_to_the_argument():
    mesh = make_mesh(x=2)
    cumulative = named_kernel("pos -> pos")(lambda x: jnp.cumsum(x))
    (x,) = arrays((4, 8))
    constrain = NamedSharding(mesh, P(None, "x"))
    out = jax.jit(lambda x: jax.lax.with_sharding_constraint(cumulative.plain(x * 2), constrain))(x)
    assert out.sharding.spec == P(None, "x")
    close(out, np.cumsum(2 * x, axis=-1))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_scan_and_remat(checkpoint):
    mesh = make_mesh(x=2, y=3)
    x, ws = arrays((4, 6, 6), (3, 6, 6))

    def run(call):
        def loss(x, ws):
            layer = jax.checkpoint(call) if checkpoint else call
            out, _ = jax.lax.scan(lambda c, w: (c + 0.1 * layer(c, w), None), x, ws)
            return out

        return loss

    check(run(contract.plain), run(contract64), mesh, (x, ws), [("x", None, "y"), (None, "y")])


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_within_the_gradient_and_around_it(axis):
    mesh = make_mesh(x=2, y=3)
    q, k, v = arrays((4, 6, 4), (6, 5, 4), (6, 5, 4))  # q is shared by one loop axis of k and v

    def outside(call):
        return lambda q, k, v: jax.vmap(call, in_axes=(axis, None, None))(q, k, v)

    def inside(call):
        def gradients(q, k, v):
            def one(q):
                return jax.grad(lambda q, k: jnp.sum(call(q, k, v) ** 2), argnums=(0, 1))(q, k)

            return jax.vmap(one, in_axes=axis)(q)

        return gradients

    specs = [("x",), ("y",), ("y",)]
    check(outside(attend.plain), outside(attention64), mesh, (q, k, v), specs)
    with jax.enable_x64(True):
        want = jax.jit(inside(attention64))(*(np.asarray(a, np.float64) for a in (q, k, v)))
    got = jax.jit(inside(attend.plain))(*(put(mesh, a, s) for a, s in zip((q, k, v), specs, strict=True)))
    close(got, want, 1e-3)


def test_vmap_twice_maps_keys_too():
    dropout = named_kernel("pos -> pos", policies={"pos": Parallel()})(
        lambda x, key, scale: x * scale * jax.random.bernoulli(key, 0.5, x.shape)
    )
    mesh = make_mesh(x=2, y=2)
    (x,) = arrays((4, 3, 8))
    keys = jax.random.split(jax.random.key(0), 4)
    scale = jnp.arange(1.0, 4)

    def run(x, keys, scale):
        inner = jax.vmap(dropout.plain, in_axes=(0, None, 0))
        return jax.vmap(inner, in_axes=(0, 0, None))(x, keys, scale)

    got = jax.jit(run)(put(mesh, x, ("x",)), keys, scale)
    masks = jnp.stack([jax.random.bernoulli(k, 0.5, (8,)) for k in keys])
    close(got, x * scale[:, None] * masks[:, None])


def test_prng_keys_are_folded_and_the_gradient_draws_the_same():
    dropout = named_kernel("pos -> pos", policies={"pos": Parallel()})(
        lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape)
    )
    mesh = make_mesh(x=4, y=2)
    x = put(mesh, jnp.ones((2, 64)), (None, "x"))
    key = jax.random.key(3)
    out, gradient = (
        jax.jit(lambda x, k: jax.vjp(lambda x: dropout.plain(x, k), x))(x, key)[0],
        jax.jit(jax.grad(lambda x, k: jnp.sum(dropout.plain(x, k))))(x, key),
    )
    close(gradient, out, 0)
    parts = np.split(np.asarray(out)[0], 4)
    for i, part in enumerate(parts):
        assert all((part != other).any() for other in parts[:i])
        close(part, jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (16,)), 0)
    named = dropout(hax.named(x, ("batch", "pos")), key)  # by the array's own sharding
    close(named.array, out, 0)
    shared = named_kernel("pos -> pos", policies={"pos": Parallel()}, rng="replicated")(
        lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape)
    )
    parts = np.split(np.asarray(jax.jit(shared.plain)(x, key))[0], 4)
    assert all((part == parts[0]).all() for part in parts)
    # A place in the signature: a key for each loop index.
    placed = named_kernel("pos, () -> pos", policies={"pos": Parallel()}, rng="replicated")(
        lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape)
    )
    keys = jax.random.split(key, 4)
    close(
        jax.jit(placed.plain)(put(mesh, jnp.ones((4, 8)), ("x",)), keys),
        jnp.stack([jax.random.bernoulli(k, 0.5, (8,)) for k in keys]),
        0,
    )


def test_a_gradient_split_otherwise_than_the_forward_is_not_silently_wrong(monkeypatch):
    """Its keys would be others; XLA lays both out alike, but nothing promises it."""
    dropout = named_kernel("pos -> pos", policies={"pos": Parallel()})(
        lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape)
    )
    layouts = iter(range(100))
    monkeypatch.setattr(PlainProgram, "_witness", lambda self, plan: next(layouts))
    x = put(make_mesh(x=4), jnp.ones(64), ("x",))
    gradient = jax.jit(jax.grad(lambda x, k: jnp.sum(dropout.plain(x, k))))(x, jax.random.key(0))
    assert np.isnan(gradient).all()


def test_statics_integers_and_arrays_without_a_place():
    @named_kernel("pos embed, pos -> pos embed, pos", policies={"pos": Parallel()})
    def kernel(x, ids, table, *, power, flag=False):
        y = x**power * table[ids, None]
        return (y, ids * 2) if flag else (-y, ids)

    mesh = make_mesh(x=2, y=3)
    x, table = arrays((4, 6, 2), (7,))
    ids = jnp.arange(6) % 4
    placed = put(mesh, x, ("x", "y")), put(mesh, ids, ("y",)), table

    def loss(x, ids, table):
        y, doubled = kernel.plain(x, ids, table, power=2, flag=True)
        return jnp.sum(y * doubled[..., None]), doubled

    (value, doubled), (dx, dtable) = jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))(*placed)

    def reference(x, table):
        return jnp.sum(x**2 * table[ids, None] * 2 * ids[:, None])

    close(doubled, np.broadcast_to(2 * ids, (4, 6)), 0)
    close((value, dx, dtable), (reference(x, table), *jax.grad(reference, argnums=(0, 1))(x, table)), 1e-4)
    y, same = jax.jit(lambda *a: kernel.plain(*a, power=1))(*placed)
    close((y, same), (-x * table[ids, None], np.broadcast_to(ids, (4, 6))), 1e-6)


def test_constants_that_the_kernel_closes_over():
    (table,) = arrays((8,))
    key = jax.random.key(1)
    kernel = named_kernel("pos -> pos")(lambda x: x * table * jax.random.bernoulli(key, 0.5, (8,)))
    (x,) = arrays((4, 8))
    mesh = make_mesh(x=2)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(kernel.plain(x) ** 2)))(put(mesh, x, ("x",)))
    factor = table * jax.random.bernoulli(key, 0.5, (8,))
    close((value, gradient), (np.sum((x * factor) ** 2), 2 * x * factor**2))


def test_a_pallas_kernel():
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    kernel = named_kernel("row col -> row col", policies={"row": Parallel()})(
        lambda x: pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    )
    (x,) = arrays((3, 8, 4))
    f = jax.jit(jax.vmap(kernel.plain))
    placed = put(make_mesh(x=2, y=2), x[None], (None, None, ("x", "y")))
    out = f(placed)
    assert out.sharding.spec[2] == ("x", "y") and not collectives(f.lower(placed).compile().as_text())
    close(out[0], 2 * x, 0)


@pytest.mark.parametrize("context", ["none", "auto", "legacy"])
def test_mesh_contexts(context):
    mesh = make_mesh(x=2, y=3)
    kernel, reference, shapes, specs = CASES["sum"]
    entered = {"none": None, "auto": jax.set_mesh, "legacy": lambda m: m}[context]
    check(kernel.plain, reference, mesh, arrays(*shapes), specs, entered and entered(mesh))


def test_eager_and_on_one_device():
    kernel, reference, shapes, specs = CASES["shared, the first"]
    xs = arrays(*shapes)
    want, cts, grads = wanted(reference, xs)
    cts = jnp.asarray(cts, jnp.float32)
    placed = [put(make_mesh(x=2, y=3), x, s) for x, s in zip(xs, specs, strict=True)]
    for run in (both(kernel.plain), jax.jit(both(kernel.plain))):
        close(run(cts, *xs), (want, grads))
    close(both(kernel.plain)(cts, *placed), (want, grads))
    close(jax.vmap(kernel.plain)(xs[0][None], xs[1][None], xs[2][None])[0], want)
    with jax.set_mesh(make_mesh(x=1)):
        close(jax.jit(kernel.plain)(*xs), want)


def test_inside_shard_maps():
    kernel, reference, _, _ = CASES["loop"]
    xs = arrays((4, 6, 4), (4, 5, 4), (4, 5, 4))
    mesh = make_mesh(x=2, y=2)
    want, cts, grads = wanted(reference, xs)
    manual = jax.shard_map(kernel.plain, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    close(jax.jit(both(manual))(jnp.asarray(cts, jnp.float32), *xs), (want, grads))
    partly = jax.shard_map(
        kernel.plain, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )
    with pytest.raises(
        TransformError, match=r"inside a shard_map that is manual over mesh axis 'x' \(2 devices\) only"
    ):
        jax.jit(partly)(*xs)
    mixed_mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mixed_mesh), pytest.raises(TransformError, match="both Auto and Explicit"):
        jax.jit(kernel.plain)(*xs)


def test_forward_mode_is_refused():
    (x,) = arrays((4, 8))
    kernel = named_kernel("pos -> pos")(jnp.cumsum)
    with pytest.raises(TransformError, match="forward-mode"):
        jax.jvp(jax.vmap(kernel.plain), (x,), (x,))
    with pytest.raises(TypeError, match="forward-mode"):  # JAX's own, when it lowers the program
        jax.jit(lambda x: jax.jvp(kernel.plain, (x,), (x,)))(x)


def test_on_tpu_it_refuses_where_xla_would_not_understand():
    x = put(make_mesh(x=4), jnp.ones((4, 8)), ("x",))
    kernel = named_kernel("pos -> pos", name="running")(jnp.cumsum)
    for f in (kernel.plain, jax.grad(lambda x: jnp.sum(kernel.plain(x)))):
        with pytest.raises(UnsupportedOptionError, match=r"not support on TPU[^$]*running\(haliax.named"):
            jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))
        assert jax.jit(f).trace(jnp.ones((4, 8))).lower(lowering_platforms=("tpu",))  # one device
    explicit = put(make_mesh(AxisType.Explicit, x=4), jnp.ones((4, 8)), ("x",))
    assert jax.jit(kernel.plain).trace(explicit).lower(lowering_platforms=("tpu",))


def test_arguments_that_cannot_be():
    q, k, v = arrays((4, 6, 4), (1, 5, 4), (4, 5, 4))
    with pytest.raises(AxisSizeError, match=r"loop axis 0.* size 4 in argument 'q', but 1 in argument 'k'"):
        attend.plain(q, k, v)
    with pytest.raises(ArgumentError, match=r"'k' has shape \(4,\), but its place in the signature .* 2 core axes"):
        attend.plain(q, k[0, 0], v)
    with pytest.raises(ArgumentError, match=r"'q' of a .plain call is a NamedArray"):
        attend.plain(hax.named(q[0], ("q_pos", "key")), k[0], v[0])
    with pytest.raises(AxisSizeError, match="axis 'key' has size 4"):
        jax.jit(attend.plain)(q, v[..., :3], v)


def test_uneven_shards_that_xla_chose_are_refused():
    mesh = make_mesh(x=4)
    (x,) = arrays((8, 5))
    kernel = named_kernel("pos -> pos")(jnp.cumsum)
    text = refused_text(lambda x: kernel.plain(x[:6]), put(mesh, x, ("x",)))
    assert "UnevenShardingError" in text and "has size 6, which is not divisible by mesh axis 'x' (4 devices)" in text
    assert "takes no axis_mapping=" in text


NAMED = {
    "loop": [("batch", "q_pos", "key"), ("batch", "k_pos", "key"), ("batch", "k_pos", "value")],
    "loop, core": [("batch", "q_pos", "key"), ("batch", "k_pos", "key"), ("batch", "k_pos", "value")],
    "shared": [("head", "batch", "q_pos", "key"), ("batch", "k_pos", "key"), ("batch", "k_pos", "value")],
    "gather, q over it": [("q_pos", "key"), ("k_pos", "key"), ("k_pos", "value")],
    "sum": [("row", "k"), ("k", "col")],
    "halo": [("batch", "pos", "channel"), ("taps", "channel")],
    "halo and channel": [("batch", "pos", "channel"), ("taps", "channel")],
}


@pytest.mark.parametrize("case", NAMED)
def test_collectives_are_those_of_the_named_form(case):
    kernel, _, shapes, specs = CASES[case]
    mesh = make_mesh(x=2, y=3)
    xs = [put(mesh, x, s) for x, s in zip(arrays(*shapes), specs, strict=True)]
    mapping = {n: m for names, spec in zip(NAMED[case], specs, strict=True) for n, m in zip(names, spec) if m}  # noqa: B905

    def named(*xs):
        return kernel(*map(hax.named, xs, NAMED[case]), axis_mapping=mapping, mesh=mesh).array

    out = jax.eval_shape(kernel.plain, *xs)
    ct = put(mesh, jnp.ones(out.shape), jax.jit(kernel.plain)(*xs).sharding.spec)

    def compiled(f, *args):
        return collectives(jax.jit(f).lower(*args).compile().as_text())

    forward = compiled(named, *xs)
    assert compiled(kernel.plain, *xs) == forward
    # Residuals are arguments and outputs only: what was gathered or exchanged before the kernel is so again.
    gradient = compiled(both(named), ct, *xs)
    for kind in forward.keys() & {"all-gather", "collective-permute"}:
        gradient[kind] = tuple(np.add(gradient[kind], forward[kind]))
    assert compiled(both(kernel.plain), ct, *xs) == gradient


def test_a_kernel_that_saves_arguments_and_outputs_runs_once():
    @jax.custom_vjp
    def tanh(x):
        return jnp.tanh(x)

    tanh.defvjp(lambda x: (y := jnp.tanh(x), (y,)), lambda saved, ct: (ct * (1 - saved[0] ** 2),))
    kernel = named_kernel("pos -> pos", policies={"pos": Parallel()})(tanh)
    (x,) = arrays((4, 6, 8))
    for placed in (put(make_mesh(x=2, y=3), x, ("x", "y")), x):
        f = jax.jit(jax.value_and_grad(lambda x: jnp.sum(kernel.plain(x))))
        close(f(placed), (np.tanh(x).sum(), 1 - np.tanh(x) ** 2))
        assert f.lower(placed).compile().as_text().count(" tanh(") == 1


LOOPS = [((4, 4), (4,)), ((4,), (4,)), ((), (4,)), ((4, 4), ())]


@st.composite
def layouts(draw, mesh, shape):
    """For every dimension the mesh axes that shard it; each at most once, and only where it divides the size."""
    dims = [()] * len(shape)
    for m in draw(st.permutations(mesh.axis_names)):
        d = draw(st.integers(-2, len(shape) - 1))
        if d >= 0 and shape[d] % np.prod([mesh.shape[n] for n in (*dims[d], m)]) == 0:
            dims[d] = (*dims[d], m)
    return tuple(d or None for d in dims)


@seed(0)
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_layout_is_right_or_refused(data):
    kernel, reference, cores = data.draw(
        st.sampled_from(
            [
                (contract, contract64, ((4, 8), (8, 4))),
                (
                    gathering.with_policies(key=Gather(), value=Gather()),
                    lambda q, k: attention64(q, k, k),
                    ((8, 8), (8, 8)),
                ),
                (convolution, convolution64, ((8, 4), (3, 4))),
            ]
        )
    )
    mesh = make_mesh(x=2, y=2, z=2)  # not 3: resharding crashes XLA in jaxlib 0.11.2
    lead = data.draw(st.sampled_from(LOOPS))
    xs = arrays(*((*loops, *core) for loops, core in zip(lead, cores, strict=True)))
    specs = [data.draw(layouts(mesh, x.shape)) for x in xs]
    call = (lambda q, k: kernel.plain(q, k, k)) if kernel not in (contract, convolution) else kernel.plain
    out, cts, grads = wanted(reference, xs)
    # Arguments that have their sharding, and intermediates that XLA gives one.
    factor = data.draw(st.sampled_from([1.0, 2.0]))
    placed = [put(mesh, x / factor, s) for x, s in zip(xs, specs, strict=True)]
    try:
        got, gradients = jax.jit(both(lambda *xs: call(*(x * factor for x in xs))))(
            jnp.asarray(cts, jnp.float32), *placed
        )
    except jax.errors.JaxRuntimeError as e:
        assert "MeshAxisConflictError" in str(e) or "ShardedAxisError" in str(e)
        return
    close((got, [g / factor for g in gradients]), (out, grads))


# Kernels that communicate, and rows that lie alike


@named_kernel("pos channel -> pos channel, channel", policies={"pos": Manual(reduces=True), "channel": Parallel()})
def accumulated(x, *, shard):
    mesh_axes = shard["pos"].mesh_axes
    own = jnp.cumsum(jnp.sin(x), axis=0)
    position = shard["pos"].offset + jnp.arange(x.shape[0])
    total = jnp.sum(x * x, axis=0)
    own = own + exclusive_prefix(jnp.add, own[-1], 0.0, mesh_axes)
    return own * position[:, None], lax.psum(total, mesh_axes) if mesh_axes else total


def accumulated64(x):
    return jnp.cumsum(jnp.sin(x), axis=-2) * jnp.arange(x.shape[-2])[:, None], jnp.sum(x * x, axis=-2)


@named_kernel(
    "q_pos channel, k_pos channel -> q_pos channel",
    policies={"q_pos": Parallel(), "k_pos": Halo(1, aligned_with="q_pos"), "channel": Parallel()},
)
def with_previous(q, k):
    return q * k[:-1] + k[1:] ** 2


def with_previous64(q, k):
    padded = jnp.pad(k, [(0, 0)] * (k.ndim - 2) + [(1, 0), (0, 0)])
    return q * padded[..., :-1, :] + k**2


@pytest.mark.parametrize("spec", [(None, None, None), (None, "x", None), ("y", "x", None), (None, ("x", "y"), None)])
def test_manual(spec):
    check(accumulated.plain, accumulated64, make_mesh(x=2, y=2), arrays((4, 8, 6)), [spec])


@pytest.mark.parametrize("specs", [((None, "x", None), (None, "x", None)), ((None, "x", None), (None, None, None))])
def test_aligned(specs):
    check(with_previous.plain, with_previous64, make_mesh(x=2), arrays((4, 8, 6), (4, 8, 6)), specs)
