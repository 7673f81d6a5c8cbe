# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`linear_attention` on NamedArrays, whole and sharded, against the float64 recurrence: values and gradients."""

import dataclasses
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from haliax_kernels import (
    ArgumentError,
    LinearAttentionState,
    ShardedAxisError,
    UnevenShardingError,
    UnsupportedOptionError,
    linear_attention,
    linear_attention_plan,
    linear_attention_step,
)
from haliax_kernels.linear.reference import recurrence, recurrence_grad
from support import BOTH_MESHES, collectives, make_mesh, planned

TOLERANCE = 2e-5
FAST_COMPILE = {"xla_backend_optimization_level": 0}
WRT = ("query", "key", "value", "decay", "gate", "beta", "s", "z")
WHOLE = ("data", 2), ("model", 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call on `mesh`: `decay` is None, float, head; `gate` None, token, channel."""

    mesh: tuple[tuple[str, int], ...] = WHOLE
    mapping: tuple[tuple[str, Any], ...] = ()
    length: int = 24
    batch: int = 2
    heads: int = 2
    group: int = 2
    key: int = 4
    value: int = 6
    feature_map: Any = "elu+1"
    normalize: bool = True
    decay: str | None = None
    gate: str | None = None
    beta: bool = False
    ids: bool = False
    state: bool = False
    explicit: bool = False
    chunk_size: int | None = None
    order: int = 0
    dtype: Any = "float32"
    seed: int = 0

    @property
    def axes(self):
        """batch, kv_head, group, position, head_size, value_size."""
        sizes = (self.batch, self.heads, self.group, self.length, self.key, self.value)
        names = ("batch", "kv_head", "group", "position", "head_size", "value_size")
        return tuple(map(Axis, names, sizes))

    def arrays(self):
        """{name: NamedArray}, axes in a canonical order, in NumPy."""
        rng = np.random.default_rng(self.seed)
        B, H, G, P, D, E = self.axes
        F = Axis("head_size_feature", D.size)
        shapes = {"query": (B, H, G, P, D), "key": (B, H, P, D), "value": (B, H, P, E)}
        drawn = {name: rng.normal(size=[a.size for a in axes]) for name, axes in shapes.items()}
        if self.feature_map in ("relu", "identity") and self.normalize:
            drawn |= {name: np.abs(drawn[name]) + 0.1 for name in ("query", "key")}
        drawn = {n: np.asarray(jnp.asarray(v, self.dtype)) for n, v in drawn.items()}
        if self.decay == "head":
            shapes["decay"], drawn["decay"] = (H,), np.float32(rng.uniform(0.5, 1, H.size))
        if self.gate:
            shapes["gate"] = (B, H, P) if self.gate == "token" else (B, H, P, D)
            drawn["gate"] = np.float32(-0.3 * rng.exponential(size=[a.size for a in shapes["gate"]]))
        if self.beta:
            shapes["beta"], drawn["beta"] = (B, H, P), np.float32(rng.uniform(0.1, 0.9, (B.size, H.size, P.size)))
            drawn["key"] = drawn["key"] / np.linalg.norm(drawn["key"], axis=-1, keepdims=True)
        if self.state:
            shapes["s"], drawn["s"] = (B, H, F, E), np.float32(rng.normal(size=(B.size, H.size, D.size, E.size)))
            if self.normalize:
                shapes["z"], drawn["z"] = (B, H, F), np.float32(rng.uniform(0.1, 1, (B.size, H.size, D.size)))
        if self.ids:
            shapes["ids"], drawn["ids"] = (B, P), np.int32(np.sort(rng.integers(0, 5, (B.size, P.size)), 1) % 3)
        return {name: hax.named(drawn[name], shapes[name]) for name in shapes}

    def reordered(self, arrays):
        """The arrays with their axes in another order."""
        rng = np.random.default_rng(self.order)
        if not self.order:
            return arrays
        return {n: x.rearrange([x.axes[i] for i in rng.permutation(x.ndim)]) for n, x in arrays.items()}

    def call(self, arrays, **more):
        state = None
        if self.state:
            shift = None
            if self.feature_map == "exp":
                shift = hax.named(jnp.full((self.batch, self.heads), 0.5), self.axes[:2])
            state = LinearAttentionState(arrays["s"], arrays.get("z"), shift)
        return linear_attention(
            "position",
            "head_size",
            arrays["query"],
            arrays["key"],
            arrays["value"],
            feature_map=self.feature_map,
            normalize=self.normalize,
            decay=0.9 if self.decay == "float" else arrays.get("decay"),
            gate=arrays.get("gate"),
            beta=arrays.get("beta"),
            initial_state=state,
            segment_ids=arrays.get("ids"),
            chunk_size=self.chunk_size,
            scaling_factor=0.5,
            return_state=True,
            **more,
        )

    @property
    def context(self):
        mesh = make_mesh(BOTH_MESHES[self.explicit], **dict(self.mesh))
        return mesh, hax.axis_mapping(dict(self.mapping))


def features(name, x):
    """(value, derivative) of a feature map in float64."""
    if name == "elu+1":
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), np.where(x > 0, 1, np.exp(np.minimum(x, 0)))
    if callable(name):
        return x**3, 3 * x**2
    if name == "relu":
        return np.maximum(x, 0), (x > 0) * 1.0
    return (np.exp(x), np.exp(x)) if name == "exp" else (x, np.ones_like(x))


def oracle(case, arrays, cotangents):
    """The results, the last state, and all gradients; of features `exp` nothing is subtracted."""
    a = {n: np.asarray(x.array, np.float64) for n, x in arrays.items() if n != "ids"}
    dy, ds, dz = cotangents
    unshift = np.exp(0.5) if case.feature_map == "exp" else 1.0
    found: dict[str, Any] = {n: np.zeros_like(v) for n, v in a.items()}
    y, s, z = np.zeros(dy.shape), np.zeros(ds.shape), np.zeros(dz.shape)
    for b in range(case.batch):
        for h in range(case.heads):
            (q, dq), (k, dk) = (features(case.feature_map, a[n][b, h]) for n in ("query", "key"))
            constant = np.log(0.9) if case.decay == "float" else np.log(a["decay"][h]) if case.decay else None
            log = a["gate"][b, h] if case.gate else constant
            log = log + constant if case.gate and case.decay else log
            options = {
                "scale": 0.5,
                "normalize": case.normalize,
                "log_decay": log,
                "segment_ids": np.asarray(arrays["ids"].array)[b] if case.ids else None,
                "s": a["s"][b, h] * unshift if case.state else None,
                "z": a["z"][b, h] * unshift if case.state and case.normalize else None,
                "beta": a["beta"][b, h] if case.beta else None,
            }
            v = a["value"][b, h]
            y[b, h], s[b, h], z[b, h] = recurrence(q, k, v, **options)
            g = recurrence_grad(q, k, v, dy[b, h], ds[b, h], dz[b, h], **options)
            found["query"][b, h], found["key"][b, h], found["value"][b, h] = g.q * dq, g.k * dk, g.v
            if case.gate:
                found["gate"][b, h] = g.log_decay
            if case.decay == "head":
                found["decay"][h] += g.log_decay.sum() / a["decay"][h]
            for name, value in (("s", g.s * unshift), ("z", g.z * unshift), ("beta", g.beta)):
                if name in found:
                    found[name][b, h] = value
    return (y, s, z), found


def close(found, expected, tolerance, what):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    # Some gradients are 0, such as that by the query of a lone normalised token.
    scale = max(np.abs(expected).max(), 1.0)
    error = np.abs(found - expected).max() / scale
    assert error < tolerance, f"{what}: {error:.2e}"


def check(case, tolerance=TOLERANCE, fast=True):
    """Values and gradients of a loss in the results and the last state."""
    rng = np.random.default_rng(case.seed + 1)
    arrays = case.arrays()
    B, H, G, P, D, E = case.axes
    F = Axis("head_size_feature", D.size)
    out_axes = (B, H, G, P, E), (B, H, F, E), (B, H, F)
    cotangents = [rng.normal(size=[a.size for a in axes]) for axes in out_axes]
    if not case.normalize:
        cotangents[2][:] = 0
    if case.feature_map == "exp":  # the state is that of shifted keys
        cotangents[1][:], cotangents[2][:] = 0, 0
    (y, s, z), expected = oracle(case, arrays, cotangents)
    diff = {n: jax.tree.map(jnp.asarray, x) for n, x in case.reordered(arrays).items() if n != "ids"}
    rest = {n: jax.tree.map(jnp.asarray, x) for n, x in case.reordered(arrays).items() if n == "ids"}

    def run(diff, rest):
        y, state = case.call({**diff, **rest})
        outs = (y, state.s, state.z)
        loss = sum(
            jnp.sum(o.rearrange(axes).array.astype(jnp.float32) * c)
            for o, axes, c in zip(outs, out_axes, cotangents, strict=True)
            if o is not None
        )
        return loss, (y, state)

    mesh, mapping = case.context
    with mapping, jax.set_mesh(mesh):
        if case.explicit:
            diff, rest = (hax.shard(x, dict(case.mapping)) for x in (diff, rest))
        program = jax.jit(jax.value_and_grad(run, has_aux=True))
        program = program.lower(diff, rest).compile(FAST_COMPILE) if fast else program
        (_, (found_y, state)), grads = program(diff, rest)
    close(found_y.rearrange(out_axes[0]).array, y, tolerance, "y")
    assert found_y.dtype == jnp.dtype(case.dtype)
    shift = 1.0 if state.shift is None else np.exp(np.asarray(state.shift.rearrange((B, H)).array, np.float64))
    factor = shift if np.ndim(shift) == 0 else shift[:, :, None]
    close(
        state.s.rearrange(out_axes[1]).array * (factor if np.ndim(factor) == 0 else factor[..., None]),
        s,
        tolerance,
        "s",
    )
    if case.normalize:
        close(state.z.rearrange(out_axes[2]).array * factor, z, tolerance, "z")
    for name in WRT:
        if name in expected:
            close(grads[name].rearrange(arrays[name].axes).array, expected[name], tolerance, f"gradient by {name}")


SEQUENCE = (("position", "context"),)
WAYS = {
    "no decay": Case(),
    "not normalised": Case(normalize=False, feature_map="identity"),
    "constant": Case(decay="float", state=True),
    "constant of heads": Case(decay="head", normalize=False, state=True),
    "of tokens": Case(gate="token", ids=True),
    "of channels": Case(gate="channel", normalize=False, feature_map="relu", state=True, ids=True),
    "constant and of tokens": Case(gate="token", decay="head", state=True),
    "exp": Case(feature_map="exp", state=True, ids=True, gate="token"),
    "relu": Case(feature_map="relu", chunk_size=8),
    "a function": Case(feature_map=lambda x: x**3, normalize=False, decay="float"),
    "bfloat16": Case(dtype="bfloat16", gate="token", state=True),
}


@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS.keys())
def test_batch_heads_and_groups_sharded(case):
    mapping = (("batch", "data"), ("kv_head", "model"))
    check(dataclasses.replace(case, mapping=mapping, order=3), 2e-2 if case.dtype == "bfloat16" else TOLERANCE)


@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS.keys())
def test_sequence_sharded(case):
    case = dataclasses.replace(case, mesh=(("context", 4),), mapping=SEQUENCE, length=32)
    check(case, 2e-2 if case.dtype == "bfloat16" else TOLERANCE)


@pytest.mark.parametrize("mesh", [(("context", 2),), (("context", 8),), (("a", 2), ("b", 4)), (("a", 3),)])
@pytest.mark.parametrize("explicit", [False, True])
def test_shards_of_any_number(mesh, explicit):
    mapping = (("position", tuple(reversed([m for m, _ in mesh]))),)
    check(Case(mesh, mapping, length=48, state=True, ids=True, gate="token", decay="head", explicit=explicit))


def test_delta_rule():
    check(
        Case(
            mapping=(("batch", "data"),), normalize=False, feature_map="identity", beta=True, gate="token", state=True
        )
    )


@settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_anything_together(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    mesh, mapping, multiple = draw(
        ((("context", 2), ("data", 2)), (("position", "context"), ("batch", "data")), 2),
        ((("context", 2), ("data", 2)), (("position", ("data", "context")),), 4),
        ((("context", 3), ("model", 2)), (("position", "context"), ("kv_head", "model")), 3),
        ((("context", 2), ("model", 2)), (("position", "context"), ("group", "model")), 2),
        ((("data", 2), ("model", 2)), (("batch", "data"), ("group", "model")), 1),
    )
    feature_map = draw("elu+1", "relu", "identity", "exp")
    case = Case(
        mesh=mesh,
        mapping=mapping,
        length=multiple * draw(1, 2, 5, 9, 40),
        key=draw(1, 3, 8),
        value=draw(1, 5),
        feature_map=feature_map,
        normalize=feature_map == "exp" or draw(True, False),
        decay=draw(None, "float", "head"),
        gate=draw(None, "token", "channel"),
        ids=draw(False, True),
        state=draw(False, True),
        explicit=draw(False, True),
        chunk_size=draw(None, 4, 16),
        order=draw(0, 1, 2),
        seed=draw(0, 1, 2, 3),
    )
    check(case)


def arrays_of(*axes, seed=0):
    rng = np.random.default_rng(seed)
    return hax.named(jnp.asarray(rng.normal(size=[a.size for a in axes]), jnp.float32), axes)


def qkv(length=32, key=8, value=8, heads=2):
    H, P, D, E = Axis("head", heads), Axis("position", length), Axis("head_size", key), Axis("value_size", value)
    return arrays_of(H, P, D), arrays_of(H, P, D, seed=1), arrays_of(H, P, E, seed=2)


@pytest.mark.parametrize("return_state", [False, True])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_what_moves_does_not_depend_on_the_length(shards, return_state):
    """The plan has the compiled program's collectives: for each head a state of 8 x 8 and 8 float32."""
    mesh = make_mesh(context=shards)
    moved = []
    for length in (64, 256):
        q, k, v = qkv(length)

        def run(q, k, v):
            out = linear_attention("position", "head_size", q, k, v, return_state=return_state)
            return out if return_state else (out,)

        with hax.axis_mapping(dict(SEQUENCE)), jax.set_mesh(mesh):
            q, k, v = (hax.shard(x) for x in (q, k, v))
            plan = linear_attention_plan("position", "head_size", q, k, v, return_state=return_state)
            hlo = jax.jit(run).lower(q, k, v).compile().as_text()
        assert planned(plan, "forward") == collectives(hlo)
        moved.append(planned(plan, "forward"))
    assert moved[0] == moved[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": 0.8, "normalize": False, "feature_map": "identity"},
        {"gate": "token", "scaling_factor": 0.25},
        {"gate": "channel", "feature_map": "relu"},
        {"gate": "token", "feature_map": "exp"},
        {"gate": "token", "beta": True, "normalize": False, "feature_map": "identity"},
    ],
    ids=str,
)
def test_step_by_step(options):
    """A decoder gets the results and the state of the parallel form, from the first token or from the middle."""
    q, k, v = qkv(20)
    H, P, D = k.axes
    if "gate" in options:
        axes = (H, P) if options["gate"] == "token" else (H, P, D)
        options = options | {"gate": -hax.abs(arrays_of(*axes, seed=3))}
    if "beta" in options:
        k = k / hax.sqrt(hax.sum(k * k, D))
        options = options | {"beta": hax.nn.sigmoid(arrays_of(H, P, seed=4))}
    of_tokens = {n: o for n, o in options.items() if n in ("gate", "beta")}
    rest = {n: o for n, o in options.items() if n not in of_tokens}
    y, last = linear_attention(P, D, q, k, v, return_state=True, **options)
    half = {n: o[P, :7] for n, o in of_tokens.items()}
    _, middle = linear_attention("position", D, *(x[P, :7] for x in (q, k, v)), return_state=True, **rest, **half)
    for start, state in ((0, None), (7, middle)):
        for t in range(start, P.size):
            token = {n: o[P, t] for n, o in of_tokens.items()}
            out, state = linear_attention_step(D, *(x[P, t] for x in (q, k, v)), state, **rest, **token)
            np.testing.assert_allclose(out.array, y[P, t].rearrange(out.axes).array, rtol=1e-4, atol=2e-5)
        factor = 1.0 if state.shift is None else hax.exp(state.shift - last.shift)
        np.testing.assert_allclose((state.s * factor).array, last.s.array, rtol=1e-4, atol=2e-5)


def test_steps_of_sharded_heads():
    q, k, v = (x["position", 0] for x in qkv())
    want, _ = linear_attention_step("head_size", q, k, v)
    with hax.axis_mapping({"head": "model"}), jax.set_mesh(make_mesh(model=2)):
        found, state = jax.jit(lambda q, k, v: linear_attention_step("head_size", q, k, v))(q, k, v)
        found, _ = linear_attention_step("head_size", q, k, 2 * v, state)
    assert found.axes == want.axes and state.s.axes == (*q.axes[:1], Axis("head_size_feature", 8), *v.axes[1:])
    assert state.z is not None and state.shift is None
    np.testing.assert_allclose(found.array, 1.5 * want.array, rtol=1e-5)


REFUSED = {
    "exp": ({"feature_map": "exp", "normalize": False}, ArgumentError, "only the normaliser takes back"),
    "beta": ({"beta": "token"}, ArgumentError, "no normaliser; pass normalize=False"),
    "name": ({"feature_map": "elu"}, ArgumentError, "'elu' is none of 'elu\\+1'"),
    "decay": ({"decay": 1.5}, ArgumentError, "decay=1.5 is not from 0 to 1"),
    "decay of tokens": ({"decay": "token"}, ArgumentError, r"gate=haliax.log\(decay\)"),
    "gate of heads": ({"gate": "head"}, ArgumentError, r"decay=haliax.exp\(gate\)"),
    "implementation": ({"implementation": "pallas_tpu"}, UnsupportedOptionError, "it needs a tpu"),
    "unknown": ({"implementation": "cuda"}, ArgumentError, "none of 'pallas_tpu'"),
    "chunk": ({"chunk_size": 48}, ValueError, "power of 2"),
}


@pytest.mark.parametrize(("options", "error", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(options, error, match):
    q, k, v = qkv()
    H, P, _ = k.axes
    axes = {"token": (H, P), "head": (H,)}
    options = {n: -hax.abs(arrays_of(*axes[o])) if o in axes else o for n, o in options.items()}
    with pytest.raises(error, match=match):
        linear_attention("position", "head_size", q, k, v, **options)


def test_a_state_of_other_options_is_refused():
    q, k, v = qkv()
    _, state = linear_attention("position", "head_size", q, k, v, return_state=True)
    with pytest.raises(ArgumentError, match=r"the state has 'z'.*normalize=True only"):
        linear_attention("position", "head_size", q, k, v, normalize=False, initial_state=state)
    with pytest.raises(ArgumentError, match=r"the state lacks 'shift'.*'exp' only"):
        linear_attention("position", "head_size", q, k, v, feature_map="exp", initial_state=state)
    wider = hax.concatenate("head_size", [k, k])
    with pytest.raises(ArgumentError, match="is for 8 features, but the feature map makes 16"):
        query = hax.concatenate("head_size", [q, q])
        linear_attention("position", "head_size", query, wider, v, initial_state=state)


@pytest.mark.parametrize(
    ("mapping", "length", "options", "error", "match"),
    [
        ({"head_size": "context"}, 32, {}, ShardedAxisError, "'head_size'.*'context'"),
        ({"position": "context"}, 30, {}, UnevenShardingError, "'position'"),
        (
            {"position": "context"},
            32,
            {"beta": True, "normalize": False},
            UnsupportedOptionError,
            "the delta rule, needs the whole sequence.*'position' is sharded over mesh axis 'context'",
        ),
    ],
)
def test_shardings_refused(mapping, length, options, error, match):
    q, k, v = qkv(length)
    if "beta" in options:
        options = options | {"beta": hax.nn.sigmoid(arrays_of(*k.axes[:2]))}
    with hax.axis_mapping(mapping), jax.set_mesh(make_mesh(context=4)), pytest.raises(error, match=match):
        jax.jit(lambda *a: linear_attention("position", "head_size", *a, **options))(q, k, v)


def test_a_map_that_makes_more_features():
    q, k, v = qkv()

    def squares(x):
        return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], -1)

    y, state = linear_attention("position", "head_size", q, k, v, feature_map=squares, return_state=True)
    assert state.s.resolve_axis("head_size_feature").size == 16
    fq, fk = squares(np.asarray(q.array)), squares(np.asarray(k.array))
    for h in range(2):
        want, s, _ = recurrence(fq[h][None], fk[h], np.asarray(v.array)[h], normalize=True)
        close(y.array[h], want[0], TOLERANCE, "y")
        close(state.s.array[h], s, TOLERANCE, "s")
