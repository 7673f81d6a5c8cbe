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
from hypothesis import given, settings
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
    scale = max(np.abs(expected).max(), 1e-6)
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
    close(state.s.rearrange(out_axes[1]).array * (factor if np.ndim(factor) == 0 else factor[..., None]), s, tolerance, "s")
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
    "a function": Case(feature_map=jax.nn.softplus, normalize=False) if False else Case(feature_map="relu"),
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
    check(Case(mapping=(("batch", "data"),), normalize=False, feature_map="identity", beta=True, gate="token", state=True))
