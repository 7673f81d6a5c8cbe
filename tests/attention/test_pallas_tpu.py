# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The Pallas kernels for TPUs in interpret mode against dense attention in NumPy, and compiled for TPUs."""

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels.attention import dropout, pallas_tpu
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.pallas_tpu.schedule import Tiles
from haliax_kernels.attention.pallas_tpu.sizes import choose
from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.testing import topology_mesh
from haliax_kernels.testing.interpret import race_detection

F32_TOLERANCE = 2e-5
NAMES = ("o", "lse", "dq", "dk", "dv", "dbias")
SMALL = BlockSizes(128, 128)


@dataclasses.dataclass
class Case:
    """A call; `ids`, `mask`, `bias` are filled in by `arrays`, `change` may alter the arrays."""

    q_len: int = 200
    k_len: int = 200
    group: int = 1
    key: int = 32
    value: int = 32
    left: int | None = None
    right: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    block_sizes: BlockSizes | None = SMALL
    q_offset: int = 0
    k_offset: int = 0
    traced: bool = False
    ids: bool = False
    mask_heads: int = 0
    bias_heads: int = 0
    scale: float | None = None
    change: Any = None
    seed: int = 0

    @property
    def options(self):
        return AttentionOptions(
            scale=self.key**-0.5 if self.scale is None else self.scale,
            left=self.left,
            right=self.right,
            soft_cap=self.soft_cap,
            dropout=self.dropout,
            block_sizes=self.block_sizes,
        )

    def shapes(self):
        """Shapes and dtypes of `arrays`."""
        g, q, k = self.group, self.q_len, self.k_len
        found = {"q": (g, q, self.key), "k": (k, self.key), "v": (k, self.value), "do": (g, q, self.value)}
        found = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in found.items()}
        if self.ids:
            found["q_segment_ids"] = jax.ShapeDtypeStruct((q,), jnp.int32)
            found["k_segment_ids"] = jax.ShapeDtypeStruct((k,), jnp.int32)
        if self.mask_heads:
            found["mask"] = jax.ShapeDtypeStruct((self.mask_heads, q, k), jnp.bool_)
        if self.bias_heads:
            found["bias"] = jax.ShapeDtypeStruct((self.bias_heads, q, k), jnp.float32)
        if self.dropout:
            found["seed"] = jax.ShapeDtypeStruct((g,), jnp.uint32)
        return found

    def arrays(self):
        rng = np.random.default_rng(self.seed)
        g, q, k = self.group, self.q_len, self.k_len
        shapes = {"q": (g, q, self.key), "k": (k, self.key), "v": (k, self.value), "do": (g, q, self.value)}
        found = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
        found["dlse"] = rng.normal(size=(g, q)).astype(np.float32)
        if self.ids:
            # The queries' last id is no key's: they see nothing.
            found["q_segment_ids"] = np.sort(rng.choice([0, 1, 2, 7], q)).astype(np.int32)
            found["k_segment_ids"] = np.sort(rng.choice([0, 1, 2, 5], k)).astype(np.int32)
        if self.mask_heads:
            found["mask"] = rng.random((self.mask_heads, q, k)) < 0.5
            found["mask"][:, 3] = False
        if self.bias_heads:
            found["bias"] = rng.normal(size=(self.bias_heads, q, k)).astype(np.float32)
        if self.dropout:
            found["seed"] = rng.integers(0, 2**32, g, dtype=np.uint32)
        if self.change is not None:
            self.change(found)
        return found


def dense(case, a):
    """Everything in float64: the outputs, and the gradients of sum(o * do) + sum(lse * dlse) by formula."""
    q, k, v, do, dlse = (np.asarray(a[n], np.float64) for n in ("q", "k", "v", "do", "dlse"))
    o = case.options
    i = case.q_offset + np.arange(q.shape[1])[:, None]
    j = case.k_offset + np.arange(k.shape[0])[None, :]
    seen = np.ones((1, q.shape[1], k.shape[0]), bool)
    if o.left is not None:
        seen &= j >= i - o.left
    if o.right is not None:
        seen &= j <= i + o.right
    if "q_segment_ids" in a:
        seen &= a["q_segment_ids"][:, None] == a["k_segment_ids"][None, :]
    if "mask" in a:
        seen = seen & a["mask"]
    hidden = ~seen.any((0, 1))
    k, v = np.where(hidden[:, None], 0, k), np.where(hidden[:, None], 0, v)
    logits = o.scale * q @ k.T + (np.asarray(a["bias"], np.float64) if "bias" in a else 0)
    slope = 1.0
    if o.soft_cap is not None:
        tanh = np.tanh(logits / o.soft_cap)
        logits, slope = o.soft_cap * tanh, 1 - tanh**2
    logits = np.where(seen, logits, -np.inf)
    largest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(largest == -np.inf, 0, largest))
    total = weights.sum(-1, keepdims=True)
    dead = total == 0
    p = weights / np.where(dead, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.where(dead, -np.inf, largest + np.log(total))[..., 0]
    factor = np.ones_like(p)
    if o.dropout:
        kept = dropout.keep(jnp.asarray(a["seed"])[:, None, None], jnp.asarray(i), jnp.asarray(j), o.dropout)
        factor = np.asarray(kept) / (1 - o.dropout)
    out = (p * factor) @ v
    dp = (do @ v.T) * factor
    ds = p * (dp - (do * out).sum(-1, keepdims=True) + np.where(dead, 0, dlse[..., None])) * slope
    found = [out, lse, o.scale * ds @ k, o.scale * np.einsum("gqk,gqd->kd", ds, q)]
    found.append(np.einsum("gqk,gqd->kd", p * factor, do))
    if "bias" in a:
        found.append(ds if a["bias"].shape[0] == ds.shape[0] else ds.sum(0, keepdims=True))
    return found


def run(case, a, dtype=jnp.float32, interpret=True):
    """The same by the kernels."""
    names = [n for n in a if n in AttentionOperands._fields]

    @jax.jit
    def compute(arrays, do, dlse, offsets):
        x = AttentionOperands(**arrays, q_offset=case.q_offset, k_offset=case.k_offset)
        if case.traced:
            x = x._replace(q_offset=offsets[0], k_offset=offsets[1])
        o, lse = pallas_tpu.forward(case.options, x, interpret=interpret)
        delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1) - dlse
        gradients = pallas_tpu.backward(case.options, x, lse, do, delta, interpret=interpret)
        return o, lse, *(g for g in gradients if g is not None)

    arrays = {n: jnp.asarray(a[n]) for n in names}
    arrays = {n: x.astype(dtype) if x.dtype == jnp.float32 else x for n, x in arrays.items()}
    offsets = (jnp.int32(case.q_offset), jnp.int32(case.k_offset))
    with pltpu.force_tpu_interpret_mode():
        return compute(arrays, jnp.asarray(a["do"], dtype), jnp.asarray(a["dlse"]), offsets)


def compare(got, want, tolerance=F32_TOLERANCE, dead=True):
    assert len(got) == len(want)
    for name, g, w in zip(NAMES, got, want, strict=False):
        g = np.asarray(g, np.float64)
        assert g.shape == w.shape, name
        assert (np.isneginf(g) == np.isneginf(w)).all(), name
        if dead:
            assert (g[want[1] == -np.inf] == 0).all() if name in ("o", "dq") else True, name
        finite = ~np.isneginf(w)
        if finite.any():
            g, w = g[finite], w[finite]
            worst = np.abs(g - w).max()
            assert worst <= tolerance * max(np.abs(w).max(), 1e-30), f"{name}: {worst / np.abs(w).max()}"


def hide_with_nan(a):
    """NaN in the keys that no query's id meets, and in the queries that see none."""
    hidden = ~np.isin(a["k_segment_ids"], a["q_segment_ids"])
    assert hidden.any()
    a["k"][hidden], a["v"][hidden] = np.nan, np.inf


def nan_beyond(a):
    a["k"][a["q"].shape[1] :], a["v"][a["q"].shape[1] :] = np.nan, np.nan


def large_logits(a):
    a["q"] *= 1e4 / np.abs(a["q"] @ a["k"].T).max()


def equal_keys(a):
    a["k"][:] = a["k"][:1]


FAST = {
    "causal": Case(right=0),
    "everything seen": Case(q_len=140, k_len=300, value=64),
    "window and segments": Case(group=2, left=70, right=0, ids=True),
    "bias and soft cap": Case(q_len=130, k_len=140, group=2, bias_heads=2, soft_cap=1.5, right=0),
    "dropout": Case(q_len=130, group=2, dropout=0.3),
    "traced offsets": Case(q_len=130, k_len=300, right=0, q_offset=75, k_offset=20, traced=True),
    "length 1": Case(q_len=1, k_len=1, right=0, key=16, value=16),
    "all hidden": Case(q_len=130, k_len=130, right=0, k_offset=500, traced=True),
    "NaN is hidden": Case(right=60, ids=True, change=hide_with_nan),
}
SLOW = {
    "mask": Case(q_len=130, k_len=130, group=2, mask_heads=1),
    "bias of the group": Case(q_len=20, k_len=140, group=3, bias_heads=1, right=0),
    "window 1": Case(left=0, right=0),
    "both windows": Case(left=40, right=30, q_len=300),
    "left alone": Case(left=50, q_len=300),
    "group 71": Case(q_len=5, k_len=300, group=71, key=64, value=64, right=0, q_offset=295),
    "group 71, long": Case(q_len=140, k_len=140, group=71, key=16, value=16, right=0),
    "segments": Case(group=3, ids=True),
    "segments, short blocks": Case(q_len=40, k_len=300, group=3, ids=True),
    "mask of each head": Case(group=3, mask_heads=3, right=0),
    "mask, short blocks": Case(q_len=30, group=3, mask_heads=1),
    "bias": Case(group=2, bias_heads=1),
    "bias of each head, short": Case(q_len=30, group=3, bias_heads=3),
    "soft cap": Case(soft_cap=2.0, right=0, group=2),
    "dropout, causal, short": Case(q_len=50, k_len=300, group=3, dropout=0.5, right=0, q_offset=250),
    "dropout and bias": Case(dropout=0.2, bias_heads=2, group=2, soft_cap=2.0),
    "everything": Case(
        q_len=150, k_len=270, group=2, left=100, right=20, ids=True, mask_heads=1, bias_heads=1, soft_cap=3.0,
        dropout=0.1, q_offset=110, k_offset=13, traced=True,
    ),
    "static offsets": Case(q_len=130, k_len=300, right=0, q_offset=75, k_offset=20),
    "traced, no offset, window": Case(q_len=300, k_len=300, right=0, left=150, traced=True),
    "traced, later queries": Case(q_len=130, k_len=130, right=0, left=400, q_offset=260, traced=True),
    "keys past the queries": Case(q_len=100, k_len=300, right=0, change=nan_beyond),
    "keys past the queries, traced": Case(q_len=100, k_len=300, right=0, change=nan_beyond, traced=True),
    "negative offset": Case(right=0, q_offset=-50),
    "equal keys": Case(change=equal_keys, right=0),
    "unlike blocks": Case(q_len=400, k_len=500, right=0, left=300, block_sizes=BlockSizes(128, 256)),
    "default blocks": Case(q_len=600, k_len=600, right=0, block_sizes=None),
    "head sizes 80, 96": Case(key=80, value=96, right=0),
    "head size 256": Case(key=256, value=256, q_len=130, k_len=130, right=0),
    "NaN is hidden, soft cap": Case(right=60, ids=True, soft_cap=2.0, change=hide_with_nan),
    "NaN is hidden, short": Case(q_len=30, group=3, right=60, ids=True, change=hide_with_nan),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n) for n, c in FAST.items()]
    + [pytest.param(c, id=n, marks=pytest.mark.slow) for n, c in SLOW.items()],
)
def test_values_and_gradients(case):
    a = case.arrays()
    compare(run(case, a), dense(case, a))


@pytest.mark.slow
def test_large_logits():
    case = Case(q_len=130, k_len=130, right=0, change=large_logits)
    a = case.arrays()
    # A logit of 1e4 is known to 1e-3 in float32, and so are the probabilities.
    compare(run(case, a), dense(case, a), 2e-3)


@pytest.mark.slow
def test_keys_in_several_kernels(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "choose", lambda *a, **k: dataclasses.replace(choose(*a, **k), keys=256))
    for case in (
        Case(q_len=300, k_len=600, group=2, right=0, left=200, ids=True, q_offset=100),
        Case(q_len=130, k_len=600, group=2, bias_heads=2, mask_heads=1, dropout=0.1, right=0, traced=True),
    ):
        a = case.arrays()
        compare(run(case, a), dense(case, a))


def test_bfloat16_within_twice_the_error_of_dense_attention():
    case = Case(q_len=200, k_len=200, group=2, right=0)
    a = case.arrays()
    a |= {n: np.asarray(jnp.asarray(a[n], jnp.bfloat16), np.float32) for n in ("q", "k", "v", "do")}
    want = dense(case, a)

    def plain(q, k, v):
        logits = jnp.einsum("gqd,kd->gqk", q, k, preferred_element_type=jnp.float32) * case.options.scale
        logits = jnp.where(np.tri(200, 200, dtype=bool), logits, -jnp.inf)
        p = jax.nn.softmax(logits).astype(jnp.bfloat16)
        return jnp.einsum("gqk,kd->gqd", p, v), jax.nn.logsumexp(logits, -1)

    b = {n: jnp.asarray(x, jnp.bfloat16 if n != "dlse" else jnp.float32) for n, x in a.items()}
    (o, lse), pullback = jax.vjp(plain, b["q"], b["k"], b["v"])
    theirs = (o, lse, *pullback((b["do"], b["dlse"])))
    for name, got, dense_bf16, w in zip(NAMES, run(case, a, jnp.bfloat16), theirs, want, strict=False):
        error, allowed = (np.abs(np.asarray(x, np.float64) - w).max() for x in (got, dense_bf16))
        assert error <= 2 * allowed + 1e-6, name


def test_vmap_over_batch_and_heads():
    """Two levels; segment ids of the batch alone, a bias of the heads alone, a mask that all share."""
    case = Case(q_len=130, k_len=130, group=2, right=0)
    rng = np.random.default_rng(1)
    arrays = {
        "q": rng.normal(size=(2, 2, 2, 130, 32)),
        "k": rng.normal(size=(2, 2, 130, 32)),
        "v": rng.normal(size=(2, 2, 130, 32)),
        "bias": rng.normal(size=(2, 1, 130, 130)),
        "mask": rng.random((1, 130, 130)) < 0.7,
        "q_segment_ids": np.sort(rng.integers(0, 3, (2, 130)), -1).astype(np.int32),
    }
    arrays = {n: a.astype(np.float32) if a.dtype == float else a for n, a in arrays.items()}
    arrays["k_segment_ids"] = arrays["q_segment_ids"]
    do = rng.normal(size=(2, 2, 2, 130, 32)).astype(np.float32)
    shared_by_batch, shared_by_heads = {"bias", "mask"}, {"mask", "q_segment_ids", "k_segment_ids"}

    def pair(a, do):
        x = AttentionOperands(**a)
        o, lse = pallas_tpu.forward(case.options, x, interpret=True)
        gradients = pallas_tpu.backward(case.options, x, lse, do, (do * o).sum(-1), interpret=True)
        return o, lse, *gradients

    per_head = jax.vmap(pair, ({n: None if n in shared_by_heads else 0 for n in arrays}, 0))
    per_batch = jax.vmap(per_head, ({n: None if n in shared_by_batch else 0 for n in arrays}, 0))
    with pltpu.force_tpu_interpret_mode():
        got = jax.jit(per_batch)(arrays, do)
    for b in range(2):
        for h in range(2):
            one = {n: a if n in shared_by_batch else a[b] for n, a in arrays.items()}
            one = {n: a if n in shared_by_heads else a[h] for n, a in one.items()}
            one |= {"do": do[b, h], "dlse": np.zeros((2, 130))}
            compare([g[b, h] for g in got], dense(case, one))


def words(steps):
    return steps.pairs, steps.flags


def test_steps_are_the_same_for_traced_offsets():
    """A static list is the beginning of the traced one; the rest of that repeats the last pair and does nothing."""
    shapes = [(256, 256, 0, None), (200, 700, 400, 128), (600, 300, -77, 300), (256, 256, -5000, None)]
    for q_len, k_len, offset, left in shapes:
        static = Tiles(q_len, k_len, 128, 128, left, 0, offset)
        traced = dataclasses.replace(static, offset=None)
        want = static.steps(offset)
        pairs, flags = (np.asarray(x) for x in jax.jit(lambda o, t=traced: words(t.steps(o)))(offset))
        assert (pairs[: len(want)] == want.pairs).all() and (pairs[len(want) :] == want.pairs[-1]).all()
        assert (flags[len(want) :] & 0xFF == 0).all()
        # Which body runs may differ, the other flags not.
        assert (flags[: len(want)] >> 4 == want.flags >> 4).all()
        assert set(want.pairs & 0xFFFF) == set(range(static.q_count))
        assert set(want.pairs >> 16) == set(range(static.k_count))


def test_hidden_blocks_are_not_in_the_list():
    count = {left: len(Tiles(16384, 16384, 1024, 1024, left, 0, 0).steps(0)) for left in (None, 1023)}
    assert count == {None: 16 * 17 // 2, 1023: 31}


def test_dropout_keeps_the_wanted_fraction_independently():
    i, j = jnp.arange(512)[:, None], jnp.arange(512)[None, :]
    masks = [np.asarray(dropout.keep(jnp.uint32(seed), i, j, 0.25)) for seed in (0, 1, 2**31)]
    for mask in masks:
        assert abs(mask.mean() - 0.75) < 0.005
        assert np.abs(mask.mean(0) - 0.75).max() < 0.1 and np.abs(mask.mean(1) - 0.75).max() < 0.1
        assert abs((mask[1:] == mask[:-1]).mean() - (0.75**2 + 0.25**2)) < 0.005
        assert abs((mask[:, 1:] == mask[:, :-1]).mean() - (0.75**2 + 0.25**2)) < 0.005
    assert abs((masks[0] == masks[1]).mean() - (0.75**2 + 0.25**2)) < 0.005


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", {"q": jnp.zeros((1, 16, 16), jnp.float16)}),
        ("k", {"k": jnp.zeros((16, 16), jnp.bfloat16)}),
        ("q_segment_ids", {"q_segment_ids": jnp.zeros(16, jnp.int32)}),
    ],
)
def test_refusals_name_the_argument(name, change):
    x = AttentionOperands(jnp.zeros((1, 16, 16)), jnp.zeros((16, 16)), jnp.zeros((16, 16)))._replace(**change)
    with pytest.raises(UnsupportedOptionError, match=name):
        pallas_tpu.forward(AttentionOptions(scale=1.0), x)


def test_lengths_of_0():
    x = AttentionOperands(jnp.ones((2, 3, 16)), jnp.ones((0, 16)), jnp.ones((0, 8)))
    o, lse = pallas_tpu.forward(AttentionOptions(scale=1.0), x)
    assert o.shape == (2, 3, 8) and (o == 0).all() and (lse == -jnp.inf).all()
    gradients = pallas_tpu.backward(AttentionOptions(scale=1.0), x, lse, o, lse)
    assert (gradients.q == 0).all() and gradients.k.shape == (0, 16)


def test_dtypes_of_the_results():
    options = AttentionOptions(scale=1.0, out_dtype=jnp.float32, grad_dtype=jnp.float32)
    x = AttentionOperands(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 16, 16), (16, 16), (16, 16))))
    o, lse = jax.eval_shape(functools.partial(pallas_tpu.forward, options), x)
    gradients = jax.eval_shape(functools.partial(pallas_tpu.backward, options), x, lse, o, lse)
    assert {a.dtype for a in (o, *gradients[:3])} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
def test_no_races():
    case = Case(q_len=256, k_len=256, group=2, right=0, key=16, value=16)
    a = case.arrays()
    with race_detection() as races:
        x = AttentionOperands(*(jnp.asarray(a[n]) for n in ("q", "k", "v")))
        _, lse = pallas_tpu.forward(case.options, x, interpret=True)
        pallas_tpu.backward(case.options, x, lse, jnp.asarray(a["do"]), lse, interpret=True)
    assert races.watched and races.first is None


# --- compiled for TPUs ----------------------------------------------------------------------------------------------

COMPILED = {
    "causal": Case(q_len=2048, k_len=2048, key=128, value=128, right=0, block_sizes=None),
    "everything": Case(
        q_len=1000, k_len=1500, group=4, key=80, value=96, left=700, right=50, ids=True, mask_heads=4, bias_heads=1,
        soft_cap=20.0, dropout=0.1, traced=True, block_sizes=None,
    ),
    "decoding": Case(q_len=1, k_len=2048, group=71, key=64, value=64, ids=True, block_sizes=None),
    "head size 256": Case(q_len=1024, k_len=1024, key=256, value=256, right=0, block_sizes=None),
}  # fmt: skip
LONG = {
    f"{s} positions, head size {d}": Case(q_len=s, k_len=s, key=d, value=d, right=0, block_sizes=None)
    for s, d in ((128, 64), (4096, 96), (32768, 128))
}


def compile_for(topology, case, dtype):
    """The compiled text of forward and backward under two levels of vmap."""
    mesh = topology_mesh(topology, {"x": 1})
    sharding = NamedSharding(mesh, PartitionSpec())
    per_head = {"q", "k", "v", "bias", "seed", "do"}
    per_batch = per_head | {"q_segment_ids", "k_segment_ids"}
    args = {}
    for n, a in case.shapes().items():
        shape = (2, *a.shape) if n in per_head else a.shape
        shape = (1, *shape) if n in per_batch else shape
        args[n] = jax.ShapeDtypeStruct(shape, dtype if a.dtype == jnp.float32 else a.dtype, sharding=sharding)
    offset = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)

    def both(args, offset):
        def one(a):
            x = AttentionOperands(**{n: a[n] for n in a if n in AttentionOperands._fields})
            x = x._replace(q_offset=offset) if case.traced else x
            o, lse = pallas_tpu.forward(case.options, x)
            return o, lse, pallas_tpu.backward(case.options, x, lse, a["do"], lse)

        heads = jax.vmap(one, ({n: 0 if n in per_head else None for n in args},))
        return jax.vmap(heads, ({n: 0 if n in per_batch else None for n in args},))(args)

    return jax.jit(both).trace(args, offset).lower().compile().as_text()


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1", "v4:2x2x1"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(c, jnp.bfloat16, id=n) for n, c in COMPILED.items()]
    + [pytest.param(c, d, id=f"{n}, {d.__name__}", marks=pytest.mark.slow) for n, c in LONG.items()
       for d in (jnp.bfloat16, jnp.float32)]
    + [pytest.param(COMPILED["everything"], jnp.float32, id="everything, float32", marks=pytest.mark.slow)],
)  # fmt: skip
def test_compiles_for_tpus(topology, case, dtype):
    assert compile_for(topology, case, dtype).count('custom_call_target="tpu_custom_call"') >= 2
