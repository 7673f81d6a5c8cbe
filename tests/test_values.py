# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Values and gradients under random shardings equal a float64 einsum that knows nothing of this package."""

import math
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from haliax_kernels import Gather, Parallel, Sum, named_kernel
from support import make_mesh

NAMES = ["alpha", "b", "position", "x9", "heads", "Embed", "kv"]
MESHES = [
    {"data": 1},
    {"data": 2},
    {"data": 3},
    {"data": 8},
    {"data": 2, "model": 2},
    {"data": 1, "model": 4},
    {"data": 3, "model": 2},
    {"data": 2, "model": 4},
    {"data": 2, "model": 2, "context": 2},
    {"replica": 2, "data": 1, "model": 3},
]


def contract(x, w):
    """x (rows, inner), w (inner, cols): additive over inner, independent in rows and in cols."""
    return jnp.sin(x) @ w


def mix(x, w):
    """The same, not additive over inner, and mixing the columns: needs both whole."""
    y = jnp.sin(x) @ w
    return y * jnp.sum(y, axis=-1, keepdims=True)


def contract64(x, w, dy, ins):
    """(y, dx, dw) in float64; `ins` are the einsum terms of x, w and y."""
    tx, tw, ty = ins
    y = np.einsum(f"{tx},{tw}->{ty}", np.sin(x), w)
    return y, np.einsum(f"{ty},{tw}->{tx}", dy, w) * np.cos(x), np.einsum(f"{ty},{tx}->{tw}", dy, np.sin(x))


def mix64(x, w, dy, ins):
    tx, tw, ty = ins
    z = np.einsum(f"{tx},{tw}->{ty}", np.sin(x), w)
    total = z.sum(-1, keepdims=True)
    dz = dy * total + (dy * z).sum(-1, keepdims=True)
    _, dx, dw = contract64(x, w, dz, ins)
    return z * total, dx, dw


@dataclass
class Case:
    mesh: dict[str, int]
    axis_type: AxisType
    mapping: dict[str, tuple[str, ...]]
    x_axes: list[Axis]
    w_axes: list[Axis]
    names: dict[str, str]
    policies: dict
    mixing: bool
    loop: str
    batched: bool
    dtype: str


@st.composite
def cases(draw):
    mesh = draw(st.sampled_from(MESHES))
    names = draw(st.permutations(NAMES))
    core = dict(zip(("rows", "inner", "cols"), names, strict=False))
    loops = names[3 : 3 + draw(st.integers(0, 3))]
    mixing = draw(st.booleans())
    inner = draw(st.sampled_from(["local", "gather"] if mixing else ["local", "gather", "sum", "sum"]))
    policies: dict = {"rows": Parallel()}
    if inner != "local":
        policies["inner"] = Gather() if inner == "gather" else Sum()
    if mixing:
        if draw(st.booleans()):
            policies["cols"] = Gather()
    else:
        policies["cols"] = draw(st.sampled_from([Parallel(), Gather()]))
    may = [*loops, core["rows"]] + [core[c] for c in ("inner", "cols") if c in policies]
    mapping: dict[str, tuple[str, ...]] = {}
    for mesh_axis in draw(st.permutations(list(mesh))):
        target = draw(st.sampled_from([None, *may]))
        if target is not None:
            mapping[target] = (*mapping.get(target, ()), mesh_axis)
    sizes = {
        n: math.prod(mesh[m] for m in mapping.get(n, ())) * draw(st.integers(1, 2)) for n in (*core.values(), *loops)
    }
    has = {n: draw(st.sampled_from(["x", "w", "xw"])) for n in loops}
    x_names = [core["rows"], core["inner"], *(n for n in loops if "x" in has[n])]
    w_names = [core["inner"], core["cols"], *(n for n in loops if "w" in has[n])]
    return Case(
        mesh=mesh,
        axis_type=draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])),
        mapping=mapping,
        x_axes=[Axis(n, sizes[n]) for n in draw(st.permutations(x_names))],
        w_axes=[Axis(n, sizes[n]) for n in draw(st.permutations(w_names))],
        names=core,
        policies=policies,
        mixing=mixing,
        loop=draw(st.sampled_from(["vmap", "vmap", "collapse"])),
        batched=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16"])),
    )


def build(case: Case):
    fn = mix if case.mixing else contract
    if case.loop == "collapse" or case.batched:
        star = "*loop " if case.batched else ""
        signature = f"{star}rows inner, {star}inner cols -> {star}rows cols"
    else:
        signature = "rows inner, inner cols -> rows cols"
    return named_kernel(signature, policies=case.policies, loop=case.loop)(fn).bind(**case.names)


def reference(case: Case, x, w, dy, out_axes):
    letters = {a.name: chr(97 + i) for i, a in enumerate({a.name: a for a in [*case.x_axes, *case.w_axes]}.values())}
    terms = ["".join(letters[a.name] for a in axes) for axes in (case.x_axes, case.w_axes, out_axes)]
    fn = mix64 if case.mixing else contract64
    return fn(*(np.asarray(v, np.float64) for v in (x, w, dy)), terms)


def expected_axes(case: Case) -> list[str]:
    core = set(case.names.values())
    loops = list(dict.fromkeys(a.name for a in [*case.x_axes, *case.w_axes] if a.name not in core))
    return [*loops, case.names["rows"], case.names["cols"]]


@pytest.mark.slow
@seed(20261201)
@settings(max_examples=220, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False, database=None)
@given(cases(), st.integers(0, 2**31))
def test_values_and_gradients(case: Case, number: int):
    rng = np.random.default_rng(number)
    dtype = jnp.dtype(case.dtype)
    x, w = (
        hax.named(jnp.asarray(rng.normal(size=[a.size for a in axes]), dtype), axes)
        for axes in (case.x_axes, case.w_axes)
    )
    kernel = build(case)
    sizes = {a.name: a for a in [*case.x_axes, *case.w_axes]}
    out_axes = [sizes[n] for n in expected_axes(case)]
    dy = jnp.asarray(rng.normal(size=[a.size for a in out_axes]), dtype)

    @jax.jit
    def run(x, w, dy):
        out, pullback = jax.vjp(lambda x, w: kernel(x, w), x, w)
        return out, pullback(NamedArray(dy, out.axes))

    with jax.set_mesh(make_mesh(case.axis_type, **case.mesh)), hax.axis_mapping(case.mapping):
        sharded_x, sharded_w = hax.shard(x), hax.shard(w)
        sharded_dy = hax.shard(hax.named(dy, out_axes)).array if case.axis_type == AxisType.Explicit else dy
        if case.axis_type == AxisType.Explicit:
            sharded_dy = match_output(kernel, sharded_x, sharded_w, sharded_dy)
        out, (dx, dw) = run(sharded_x, sharded_w, sharded_dy)
    assert [a.name for a in out.axes] == expected_axes(case)
    y64, dx64, dw64 = reference(case, x.array, w.array, dy, out_axes)
    tolerance = 2e-5 if case.dtype == "float32" else 6e-2
    for what, got, want in (("y", out.array, y64), ("dx", dx.array, dx64), ("dw", dw.array, dw64)):
        assert got.dtype == dtype
        scale = max(1.0, np.abs(want).max())
        assert np.abs(np.asarray(got, np.float64) - want).max() <= tolerance * scale, what


def match_output(kernel, x, w, dy):
    """On an Explicit mesh a cotangent has its output's type."""
    return jax.sharding.reshard(dy, jax.typeof(kernel(x, w).array).sharding)


def test_gathered_weights_share_the_batch_mesh_axis():
    """Weights sharded over the mesh axis that shards the batch (FSDP): gathered forward, gradient reduce-scattered."""
    batch, rows, inner, cols = Axis("batch", 8), Axis("rows", 3), Axis("inner", 4), Axis("cols", 8)
    kernel = named_kernel("rows inner, inner cols -> rows cols", policies={"cols": Gather()})(contract)
    rng = np.random.default_rng(0)
    x, w = (
        hax.named(jnp.asarray(rng.normal(size=[a.size for a in axes]), jnp.float32), axes)
        for axes in ((batch, rows, inner), (cols, inner))
    )
    dy = rng.normal(size=(8, 3, 8))
    for types in (AxisType.Auto, AxisType.Explicit):
        mesh = make_mesh(types, data=4, model=2)
        with jax.set_mesh(mesh), hax.axis_mapping({"batch": "data", "cols": ("data", "model")}):
            sx, sw = hax.shard(x), hax.shard(w)
            plan = kernel.plan(sx, sw)
            kinds = [(c.kind, c.phase, c.mesh_axes) for c in plan.collectives]
            assert kinds == [
                ("all-gather", "forward", ("data", "model")),
                ("reduce-scatter", "backward", ("data",)),
            ]

            def loss(x, w, dy=dy):
                return jnp.sum(kernel(x, w).array * jnp.asarray(dy, jnp.float32))

            value, (dx, dw) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(sx, sw)
        y64, dx64, dw64 = contract64(np.float64(x.array), np.float64(w.array), dy, ("abc", "dc", "abd"))
        np.testing.assert_allclose(value, (y64 * dy).sum(), rtol=1e-5)
        np.testing.assert_allclose(dx.array, dx64, atol=2e-5 * np.abs(dx64).max())
        np.testing.assert_allclose(dw.array, dw64, atol=2e-5 * np.abs(dw64).max())


def test_gathered_axis_with_an_output_that_lacks_it():
    """Every shard computes the same total; its cotangent must count once (field case F55: not four times)."""
    kernel = named_kernel("pos -> pos, ()", policies={"pos": Gather()})(lambda x: (jnp.cumsum(x), jnp.sum(x**2)))
    x = hax.named(jnp.arange(8.0) + 1, Axis("pos", 8))
    weights = np.arange(8.0) - 3

    def loss(x):
        sums, total = kernel(x)
        return jnp.sum(sums.array * jnp.asarray(weights, jnp.float32)) + total.scalar()

    with jax.set_mesh(make_mesh(data=2, context=4)), hax.axis_mapping({"pos": "context"}):
        sx = hax.shard(x)
        sums, total = kernel(sx)
        assert sums.array.sharding.spec == jax.sharding.PartitionSpec("context")
        np.testing.assert_allclose(sums.array, np.cumsum(np.arange(8.0) + 1))
        np.testing.assert_allclose(total.array, 204.0)
        gradient = jax.grad(loss)(sx)
    np.testing.assert_allclose(gradient.array, np.cumsum(weights[::-1])[::-1] + 2 * (np.arange(8.0) + 1))


def test_gather_alone_needs_no_collective_backward():
    """All shards do the same work and the output has no gathered axis: each takes its own slice of the gradient."""
    kernel = named_kernel("pos -> ()", policies={"pos": Gather()})(lambda x: jnp.sum(x**3))
    x = hax.named(jnp.arange(8.0), Axis("pos", 8))
    with jax.set_mesh(make_mesh(data=2, context=4)), hax.axis_mapping({"pos": "context"}):
        plan = kernel.plan(x)
        assert [(c.kind, c.phase) for c in plan.collectives] == [("all-gather", "forward")]
        gradient = jax.grad(lambda x: kernel(x).scalar())(hax.shard(x))
    np.testing.assert_allclose(gradient.array, 3 * np.arange(8.0) ** 2)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_two_axes_on_one_mesh_axis_meet_in_an_output(types):
    """Both gathered, or both on a mesh axis of one device: the output can be laid over it along one of them only."""
    a, b = (hax.random.normal(jax.random.key(i), Axis(n, 4)) for i, n in enumerate("ab"))
    gather = named_kernel("a, b -> a b", policies={"a": Gather(), "b": Gather()})(lambda x, y: jnp.sin(x)[:, None] * y)
    loops = named_kernel("(), () -> ()")(lambda x, y: jnp.sin(x) * y)
    weight = np.arange(16.0).reshape(4, 4)
    x, y = np.float64(a.array), np.float64(b.array)
    for kernel, mapping in ((gather, {"a": "data", "b": "data"}), (loops, {"a": "one", "b": "one"})):

        def loss(a, b, kernel=kernel):
            return jnp.sum(kernel(a, b).array * jnp.asarray(weight, jnp.float32))

        with jax.set_mesh(make_mesh(types, data=2, one=1)), hax.axis_mapping(mapping):
            args = hax.shard(a), hax.shard(b)
            out = kernel(*args)
            da, db = jax.jit(jax.grad(loss, argnums=(0, 1)))(*args)
        np.testing.assert_allclose(out.array, np.sin(x)[:, None] * y, rtol=1e-5)
        np.testing.assert_allclose(da.array, np.cos(x) * (weight @ y), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(db.array, np.sin(x) @ weight, rtol=1e-4, atol=1e-5)
