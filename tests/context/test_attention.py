# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention over a sharded sequence against float64 attention on the whole one: values and gradients."""

import dataclasses
import importlib.util
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
    AttentionMask,
    BlockSizes,
    ShardedAxisError,
    UnevenShardingError,
    UnsupportedOptionError,
    flash_attention,
    flash_attention_plan,
    from_zigzag_layout,
    zigzag_layout,
)
from haliax_kernels.attention.dropout import keep
from haliax_kernels.attention.reference import dense_attention, dense_attention_grad
from haliax_kernels.context.merge import merge
from support import BOTH_MESHES, collectives, instructions, load_benchmark, make_mesh, planned

TOLERANCE = 2e-5
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call on `mesh`; lengths, mask and options as the oracle takes them."""

    mode: Any = "ring"
    mesh: tuple[tuple[str, int], ...] = (("context", 4),)
    mapping: tuple[tuple[str, Any], ...] = (("position", "context"),)
    q_len: int = 32
    k_len: int = 32
    batch: int = 1
    heads: int = 2
    group: int = 2
    left: int | None = None
    right: int | None = None
    offset: int = 0
    traced: bool = False
    ids: bool = False
    mask: bool = False
    bias: bool = False
    soft_cap: float | None = None
    sink: bool = False
    dropout: float = 0.0
    layout: str = "contiguous"
    explicit: bool = False
    dtype: Any = jnp.float32
    seed: int = 0

    @property
    def axes(self):
        return (
            Axis("batch", self.batch),
            Axis("kv_head", self.heads),
            Axis("group", self.group),
            Axis("position", self.q_len),
            Axis("key_position", self.k_len),
            Axis("head_size", 8),
            Axis("value_size", 6),
        )


class Window:
    """An object with the fields of Levanter's mask, and a window on both sides."""

    explicit_mask = segment_ids = sliding_window = bidirectional_window = causal_offset = None
    is_causal = False

    def __init__(self, **fields):
        self.__dict__.update(fields)


def arrays(case):
    B, H, G, Q, K, D, V = case.axes
    rng = np.random.default_rng(case.seed)

    def normal(*axes):
        return hax.named(jnp.asarray(rng.normal(size=[a.size for a in axes]), jnp.float32), axes)

    found = {"q": normal(B, Q, H, G, D), "k": normal(B, K, H, D), "v": normal(H, B, K, V)}
    found = {n: x.astype(case.dtype) for n, x in found.items()}
    if case.bias:
        found["bias"] = normal(H, G, Q, K)
    if case.sink:
        found["sink"] = normal(H, G)
    whole = {}
    if case.ids:
        for name, axis in (("q_ids", Q), ("k_ids", K)):
            ids = np.sort(rng.integers(0, 3, (B.size, axis.size)))
            whole[name] = hax.named(jnp.asarray(ids, jnp.int32), (B, axis))
    if case.mask:
        whole["mask"] = hax.named(jnp.asarray(rng.random((B.size, Q.size, K.size)) < 0.7), (B, Q, K))
    do, dlse = normal(B, H, G, Q, V), normal(B, H, G, Q)
    return found, whole, do, dlse


def call(case, moving, whole, prng, offset, f=flash_attention):
    _, _, _, Q, K, D, _ = case.axes
    ids = (whole["q_ids"], whole["k_ids"]) if case.ids else None
    fields: dict[str, Any] = {"explicit_mask": whole.get("mask"), "segment_ids": ids}
    if case.traced:
        assert case.right == 0
        fields |= {"is_causal": True, "causal_offset": hax.named(offset, ())}
    elif case.right is not None and case.left is None:
        fields |= {"is_causal": True, "causal_offset": case.right}
    elif case.left is not None and case.right == 0:
        fields |= {"sliding_window": case.left + 1}
    elif case.left is not None:
        assert case.left == case.right
        fields |= {"bidirectional_window": case.left}
    return f(
        Q, K, D, moving["q"], moving["k"], moving["v"], Window(**fields), bias=moving.get("bias"),
        attn_sink=moving.get("sink"), logits_soft_cap=case.soft_cap, dropout=case.dropout,
        prng=prng if case.dropout else None, return_lse=True, block_sizes=BlockSizes(8, 8),
        context_parallel=case.mode, sequence_layout=case.layout,
    )  # fmt: skip


def shards_of(case):
    sizes, entry = dict(case.mesh), dict(case.mapping).get("position", ())
    return int(np.prod([sizes[m] for m in ([entry] if isinstance(entry, str) else entry)]))


def laid_out(case, x, back=False):
    """`x` in the order that the case's arrays lie in."""
    if case.layout == "contiguous":
        return x
    for axis in ("position", "key_position"):
        if axis in [a.name for a in x.axes]:
            x = (from_zigzag_layout if back else zigzag_layout)(x, axis, shards_of(case))
    return x


def run(case, forward_alone=False):
    """(o, lse, gradients, the compiled texts, the plan)."""
    moving, whole, do, dlse = jax.tree.map(
        lambda x: laid_out(case, x), arrays(case), is_leaf=lambda x: isinstance(x, hax.NamedArray)
    )
    prng, offset = jax.random.key(3), jnp.int32(case.offset)

    def forward(moving, whole, prng, offset):
        return call(case, moving, whole, prng, offset)

    def both(moving, whole, prng, offset, do, dlse):
        (o, lse), pullback = jax.vjp(lambda m: forward(m, whole, prng, offset), moving)
        cts = (hax.named(do.rearrange(o.axes).array.astype(o.dtype), o.axes), dlse.rearrange(lse.axes))
        if case.explicit:
            cts = [
                hax.named(jax.sharding.reshard(c.array, jax.typeof(y.array).sharding), y.axes)
                for c, y in zip(cts, (o, lse), strict=True)
            ]
        return o, lse, pullback(tuple(cts))[0]

    mesh = make_mesh(BOTH_MESHES[case.explicit], **dict(case.mesh))
    mapping = dict(case.mapping)
    if case.explicit:
        mapping.setdefault("key_position", mapping.get("position"))
    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        # The columns of a bias lie whole; only rows are sharded.
        put = {**mapping, "key_position": None}
        shard = {n: hax.shard(x, put if n in ("bias", "mask") else mapping) for n, x in (moving | whole).items()}
        moving, whole = ({n: shard[n] for n in d} for d in (moving, whole))
        plan = call(case, moving, whole, prng, offset, flash_attention_plan)
        options = {"compiler_options": FAST_COMPILE}
        texts = []
        if forward_alone:
            texts.append(jax.jit(forward, **options).lower(moving, whole, prng, offset).compile().as_text())
        compiled = jax.jit(both, **options).lower(moving, whole, prng, offset, do, dlse).compile()
        o, lse, grads = compiled(moving, whole, prng, offset, do, dlse)
        texts.append(compiled.as_text())
    return o, lse, grads, texts, plan


def oracle(case):
    moving, whole, do, dlse = arrays(case)
    B, H, G, Q, K, D, V = case.axes
    q = np.float64(moving["q"].rearrange((B, H, G, Q, D)).array)
    k, v = (np.float64(moving[n].rearrange((B, H, K, e)).array) for n, e in (("k", D), ("v", V)))
    bits = np.asarray(jax.random.bits(jax.random.key(3), [B.size, H.size, G.size], jnp.uint32))
    outs = {n: [] for n in ("o", "lse", "q", "k", "v", "bias", "sink")}
    for b in range(B.size):
        for h in range(H.size):
            kept = None
            if case.dropout:
                # flash_attention draws the seeds in the query's order of axes, here batch, kv_head, group.
                rows, columns = np.arange(Q.size) + case.offset, np.arange(K.size)
                kept = keep(bits[b, h][:, None, None], rows[None, :, None], columns[None, None], case.dropout)
            dense = {
                "scale": D.size**-0.5,
                "left": case.left,
                "right": case.right,
                "soft_cap": case.soft_cap,
                "dropout": case.dropout,
                "keep": None if kept is None else np.asarray(kept),
                "q_offset": case.offset if case.traced else 0,
                "q_segment_ids": np.asarray(whole["q_ids"].array[b]) if case.ids else None,
                "k_segment_ids": np.asarray(whole["k_ids"].array[b]) if case.ids else None,
                "mask": np.asarray(whole["mask"].array[b])[None] if case.mask else None,
                "bias": np.float64(moving["bias"].array[h]) if case.bias else None,
                "sink": np.float64(moving["sink"].array[h]) if case.sink else None,
            }
            o, lse = dense_attention(q[b, h], k[b, h], v[b, h], **dense)
            grads = dense_attention_grad(
                q[b, h], k[b, h], v[b, h], np.float64(do.array[b, h]), np.float64(dlse.array[b, h]), **dense
            )
            for n, x in zip(outs, (o, lse, *grads), strict=True):
                outs[n].append(x)

    def stacked(n):
        return np.stack(outs[n]).reshape(B.size, H.size, *outs[n][0].shape)

    found = {n: stacked(n) for n in ("o", "lse", "q", "k", "v")}
    return found | {n: stacked(n).sum(0) for n in ("bias", "sink") if getattr(case, n)}


def check(case, tolerance=TOLERANCE, forward_alone=False):
    o, lse, grads, texts, plan = run(case, forward_alone)
    B, H, G, Q, K, D, V = case.axes
    order = {
        "o": (B, H, G, Q, V), "lse": (B, H, G, Q), "q": (B, H, G, Q, D), "k": (B, H, K, D), "v": (B, H, K, V),
        "bias": (H, G, Q, K), "sink": (H, G),
    }  # fmt: skip
    want = oracle(case)
    for name, x in {"o": o, "lse": lse, **grads}.items():
        got, w = np.float64(laid_out(case, x, back=True).rearrange(order[name]).array), want[name]
        np.testing.assert_array_equal(got == -np.inf, w == -np.inf, err_msg=name)
        error = np.abs(np.where(w == -np.inf, 0, got) - np.where(w == -np.inf, 0, w)).max()
        assert error <= tolerance * max(1.0, np.abs(w, where=w != -np.inf, out=np.zeros_like(w)).max()), name
    return texts, plan


CAUSAL = {"right": 0}
FEATURES = {
    "full": {},
    "causal": CAUSAL,
    "sliding window": {"left": 9, "right": 0},
    "narrow sliding window": {"left": 2, "right": 0},
    "bidirectional window": {"left": 5, "right": 5},
    "negative offset": {"right": -5},
    "traced offset": {**CAUSAL, "offset": 5, "traced": True},
    "segments": {**CAUSAL, "ids": True},
    "mask": {"mask": True},
    "bias": {**CAUSAL, "bias": True},
    "soft cap and sink": {**CAUSAL, "soft_cap": 1.0, "sink": True},
    "dropout": {**CAUSAL, "dropout": 0.3},
    "cross": {"q_len": 16, "k_len": 48},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mode", ["ring", "allgather", "ulysses"])
def test_every_feature(mode, feature):
    if mode == "ulysses" and feature in ("mask", "bias"):
        return  # refused: test_refusals
    check(Case(mode=mode, heads=4 if mode == "ulysses" else 2, **FEATURES[feature]))


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_in_zigzag(feature):
    shards = 4 if feature in ("causal", "segments", "dropout") else 2
    check(Case(mode="zigzag", mesh=(("context", shards),), **FEATURES[feature]))


def counted(*texts):
    """{kind: (instructions, bytes of their results)} of compiled programs."""
    found: dict[str, tuple[int, int]] = {}
    for text in texts:
        for kind, (_, size) in collectives(text).items():
            count, total = found.get(kind, (0, 0))
            found[kind] = count + instructions(text, kind), total + size
    return found


@pytest.mark.parametrize("mode", ["ring", "zigzag", "ulysses", "allgather"])
def test_the_plan_has_the_collectives_of_the_program(mode):
    """Forward and backward apart, as they are in a model of several layers; together XLA may share some."""
    case = Case(mode=mode, heads=4, right=0, ids=True)
    moving, whole, do, dlse = arrays(case)
    with jax.set_mesh(make_mesh(context=4)), hax.axis_mapping({"position": "context"}):
        plan = call(case, moving, whole, None, None, flash_attention_plan)
        forward = jax.jit(
            lambda m, w: jax.vjp(lambda m: call(case, m, w, None, None), m), compiler_options=FAST_COMPILE
        )
        lowered = forward.lower(*({n: hax.shard(x) for n, x in d.items()} for d in (moving, whole)))
        texts = [lowered.compile().as_text()]
        assert counted(*texts) == planned(plan, "forward")
        (o, lse), pullback = jax.eval_shape(forward, moving, whole)
        cts = hax.shard(do.rearrange(o.axes)), hax.shard(dlse.rearrange(lse.axes))
        # The residuals as they come out of the forward.
        _, pullback = forward(moving, whole)
        backward = jax.jit(lambda pullback, cts: pullback(cts), compiler_options=FAST_COMPILE)
        texts.append(backward.lower(pullback, cts).compile().as_text())
    assert counted(*texts) == planned(plan, "forward", "backward")


def permutes(plan, phase):
    """{bytes: how often} of the plan's collective-permutes."""
    found: dict[int, int] = {}
    for c in plan.collectives:
        if c.kind == "collective-permute" and c.phase == phase:
            found[c.bytes_per_device] = found.get(c.bytes_per_device, 0) + c.steps
    return found


def test_a_ring_moves_keys_values_and_their_gradients_once():
    _, plan = check(Case(mesh=(("context", 8),), q_len=64, k_len=64, right=0))
    kv = 2 * 8 * (8 + 6) * 4
    assert permutes(plan, "forward") == {kv: 7}
    # Backward keys and values once more, and their gradients, which also go home.
    assert permutes(plan, "backward") == {kv: 7 + 8}


def big_plan(mask=None, length=65536, heads=8, mapping=None, **options):
    """Of abstract arrays, on eight devices."""
    Q, K = Axis("position", length), Axis("key_position", length)
    H, G, D = Axis("kv_head", heads), Axis("group", 4), Axis("head_size", 128)

    def abstract(*axes):
        return hax.NamedArray(jax.ShapeDtypeStruct([a.size for a in axes], jnp.bfloat16), axes)

    with jax.set_mesh(make_mesh(context=8)), hax.axis_mapping(mapping or {"position": "context"}):
        args = Q, K, D, abstract(H, G, Q, D), abstract(H, K, D), abstract(H, K, D), mask
        return flash_attention_plan(*args, **options)


@pytest.mark.parametrize(
    ("mask", "length", "heads", "says"),
    [
        (AttentionMask.causal(), 65536, 8, "zigzag over context; the mask is causal"),
        (None, 65536, 8, "ring over context; every query sees all keys"),
        (AttentionMask.causal(), 8 * 1023, 3, "ring over context; 1023 rows on a device cannot be halved"),
        (AttentionMask.causal(sliding_window=8193), 65536, 8, "ring over context; the mask lets a query see no"),
        (AttentionMask.causal(), 4096, 8, "ulysses over context; moves"),
        (AttentionMask.causal(), 4096, 4, "zigzag over context; the mask is causal"),
        (AttentionMask.causal(), 128, 4, "allgather over context; all keys and values of a device's heads are 262"),
    ],
)  # fmt: skip
def test_what_auto_chooses_and_why(mask, length, heads, says):
    plan = big_plan(mask, length, heads)
    assert f"context_parallel='auto': {says}" in plan.notes[0], plan.notes
    assert "key_position  k_pos" in str(plan) and not plan.refusals


@pytest.mark.parametrize(("left", "right", "steps"), [(7, 0, 1), (8, 0, 1), (9, 0, 2), (3, 3, 2), (None, 0, 7)])
def test_a_window_stops_the_ring(left, right, steps):
    """Of eight shards of eight rows: those that a query sees; on both sides, one step each way."""
    case = Case(mesh=(("context", 8),), q_len=64, k_len=64, left=left, right=right)
    moving, whole, *_ = arrays(case)
    with jax.set_mesh(make_mesh(context=8)), hax.axis_mapping({"position": "context"}):
        plan = call(case, moving, whole, None, None, flash_attention_plan)
    assert permutes(plan, "forward") == {2 * 8 * (8 + 6) * 4: steps}


MESHES = [
    ((("context", 2),), (("position", "context"),)),
    ((("data", 2), ("context", 4)), (("batch", "data"), ("position", "context"))),
    ((("node", 2), ("model", 2), ("chip", 2)), (("position", ("node", "chip")), ("kv_head", "model"))),
    ((("chip", 2), ("node", 2), ("idle", 2)), (("position", ("node", "chip")),)),
    ((("context", 4), ("model", 2)), (("position", "context"), ("group", "model"))),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "mode", "explicit"),
    [
        *((which, "ring", which % 2 == 0) for which in range(5)),
        *((which, "allgather", which % 2 == 1) for which in range(5)),
        *((which, "ulysses", explicit) for which, explicit in ((1, False), (2, True), (3, False), (4, True))),
        *((which, "zigzag", explicit) for which, explicit in ((2, False), (3, True))),
    ],
)
def test_meshes(which, mode, explicit):
    mesh, mapping = MESHES[which]
    heads = 8 if mode == "ulysses" else 2
    case = Case(
        mode=mode, mesh=mesh, mapping=mapping, batch=2, heads=heads, explicit=explicit, ids=True, sink=True, right=0
    )
    check(case)


@pytest.mark.parametrize("other", ["ring", "zigzag", "allgather"])
def test_heads_within_a_node_and_another_mode_across(other):
    mesh, mapping = (("node", 2), ("chip", 2)), (("position", ("node", "chip")),)
    mode = {"node": other, "chip": "ulysses"}
    _, plan = check(Case(mode=mode, mesh=mesh, mapping=mapping, ids=True, sink=True, dropout=0.2, right=0))
    assert f"{other} over node and ulysses over chip" in plan.notes[0]


@pytest.mark.parametrize("mode", ["ring", "allgather", "ulysses"])
def test_a_sequence_that_lies_in_zigzag_order(mode):
    features = {"bias": True} if mode != "ulysses" else {}
    check(Case(mode=mode, layout="zigzag", heads=4, right=0, ids=True, **features))


def test_only_the_queries_are_sharded():
    case = Case(mode="auto", mapping=(("position", "context"), ("key_position", None)), right=0, ids=True, bias=True)
    texts, plan = check(case, forward_alone=True)
    assert "each device its own queries" in plan.notes[0] and collectives(texts[0]) == {}


def test_only_the_keys_are_sharded():
    """Also where the query is one position, as in decoding."""
    case = Case(mode="auto", mapping=(("key_position", "context"),), q_len=1, bias=True, sink=True, ids=True)
    _, plan = check(case)
    assert "each device its own keys" in plan.notes[0]


def test_keys_that_the_mesh_axis_does_not_divide_stay_whole():
    _, plan = check(Case(mode="auto", k_len=30))
    assert "is whole on every device" in plan.notes[0]


def test_rows_that_see_nothing_on_any_shard():
    o, lse, grads, _, _ = run(Case(right=-30))
    assert np.isneginf(lse["position", 0:29].array).all() and (o["position", 0:29].array == 0).all()
    assert (grads["q"]["position", 0:29].array == 0).all() and np.isfinite(grads["k"].array).all()


def test_bfloat16_is_as_near_as_the_whole_sequence():
    """Partial results and gradients travel in float32: sharding adds one rounding at most."""
    case = Case(mode="ring", right=0, dtype=jnp.bfloat16)
    check(case, tolerance=2e-2)
    moving, whole, *_ = arrays(case)
    sharded, *_ = run(case)
    plain = call(case, moving, whole, None, None)[0]
    error = np.abs(np.float64(sharded.rearrange(plain.axes).array) - np.float64(plain.array)).max()
    assert error <= 2**-8 * np.abs(np.float64(plain.array)).max()


def test_remat_that_saves_the_outputs_by_name_has_one_ring_forward():
    case = Case(right=0)
    moving, whole, *_ = arrays(case)
    names = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")

    def permutes_with(policy):
        def loss(m):
            return jnp.sum(jax.checkpoint(lambda m: call(case, m, whole, None, None)[0].array, policy=policy)(m))

        with jax.set_mesh(make_mesh(context=4)), hax.axis_mapping({"position": "context"}):
            return str(jax.make_jaxpr(jax.grad(loss))(moving)).count("ppermute[")

    # Forward the first transfer and those of the loop; backward these, and three of the gradients.
    assert permutes_with(names) == 2 + 5
    assert permutes_with(None) == 2 + 2 + 5


class TestRefusals:
    def refuses(self, case, error, *texts):
        moving, whole, *_ = arrays(case)
        mesh = make_mesh(**dict(case.mesh))
        with jax.set_mesh(mesh), hax.axis_mapping(dict(case.mapping)), pytest.raises(error) as e:
            call(case, moving, whole, None, None)
        for text in texts:
            assert text in str(e.value), str(e.value)

    def test_ulysses(self):
        self.refuses(
            Case(mode="ulysses"), UnsupportedOptionError, "2 heads of 'kv_head'", "4 does not divide", "'ring'"
        )
        self.refuses(Case(mode="ulysses", heads=4, bias=True), UnsupportedOptionError, "bias", "'ring'")
        self.refuses(Case(mode="ulysses", heads=4, mask=True), UnsupportedOptionError, "explicit mask")

    def test_zigzag_needs_halves(self):
        case = Case(mode="zigzag", q_len=36, k_len=36)
        self.refuses(case, UnsupportedOptionError, "9 rows of 'position'", "multiple of 8", "40")

    def test_uneven(self):
        self.refuses(Case(q_len=30, k_len=30), UnevenShardingError, "'position'", "30", "32")

    def test_modes(self):
        self.refuses(Case(mode="circle"), ArgumentError, "'circle'", "'zigzag'")
        self.refuses(Case(mode="error"), ShardedAxisError, "'position'", "context_parallel=")
        self.refuses(Case(mode={"node": "ring"}), ArgumentError, "'context'")
        self.refuses(Case(mode={"context": "square"}), ArgumentError, "'square'")
        mesh, mapping = (("node", 2), ("chip", 2)), (("position", ("node", "chip")),)
        swapped = Case(mode={"node": "ulysses", "chip": "ring"}, mesh=mesh, mapping=mapping)
        self.refuses(swapped, UnsupportedOptionError, "minor")

    def test_different_mesh_axes(self):
        mesh, mapping = (("a", 2), ("b", 2)), (("position", "a"), ("key_position", "b"))
        self.refuses(Case(mesh=mesh, mapping=mapping), UnsupportedOptionError, "'a' (2", "'b' (2", "key_position")

    def test_layout(self):
        self.refuses(Case(layout="striped"), ArgumentError, "'striped'")
        x = hax.zeros(Axis("position", 12))
        with pytest.raises(ArgumentError, match=r"no multiple of 8.*Pad it to 16"):
            zigzag_layout(x, "position", 4)

    def test_head_size(self):
        case = Case(mapping=(("position", "context"), ("head_size", "model")), mesh=(("context", 2), ("model", 2)))
        self.refuses(case, ShardedAxisError, "'head_size'")


@pytest.mark.slow
def test_combinations():
    """Any mode, mesh, mask and grouping; few examples, since each is compiled."""

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(
        mode=st.sampled_from(["ring", "zigzag", "allgather", "ulysses", "auto"]),
        mesh=st.sampled_from([*MESHES, ((("context", 8),), (("position", "context"),))]),
        rows=st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 10])),
        window=st.sampled_from([(None, None), (None, 0), (None, 7), (6, 0), (11, 11), (0, 0)]),
        flags=st.fixed_dictionaries({n: st.booleans() for n in ("ids", "sink", "bias", "mask", "explicit")}),
        numbers=st.fixed_dictionaries(
            {
                "soft_cap": st.sampled_from([None, 1.5]),
                "dropout": st.sampled_from([0.0, 0.25]),
                "seed": st.integers(0, 99),
            }
        ),
        group=st.sampled_from([2, 4]),
    )
    def run(mode, mesh, rows, window, flags, numbers, group):
        sizes, mapping = mesh
        n = int(np.prod([n for m, n in sizes if m in str(dict(mapping)["position"])]))
        if mode == "ulysses":
            flags |= {"bias": False, "mask": False}
        q_len, k_len = (n * r for r in rows)
        left, right = window
        check(
            Case(
                mode=mode, mesh=sizes, mapping=mapping, batch=2, heads=16 if mode == "ulysses" else 2, group=group,
                q_len=q_len, k_len=k_len, left=left, right=right, **flags, **numbers,
            )
        )  # fmt: skip

    run()


@pytest.mark.parametrize(("layout", "needed", "path"), [("contiguous", 36, 8), ("zigzag", 34, 4.25)])
def test_every_pair_of_blocks_is_computed_once(layout, needed, path):
    """Counted while eight devices run, causal: in both directions what the mask leaves, in half blocks for zigzag."""
    ring = load_benchmark("ring")
    for phase in ("forward", "backward"):
        found = ring.count_pairs(8, layout, phase)
        assert sum(found.values()) == needed
    assert ring.critical_path(8, layout == "zigzag") == path
    if layout == "zigzag":
        assert set(found.values()) == {4.25}  # all devices do the same


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("mode", ["ring", pytest.param("zigzag", marks=pytest.mark.slow)])
def test_compiled_for_tpus_transfers_run_beside_blocks(mode):
    """Sixteen TPUs; every transfer but those that nothing is left to hide is under way while a block is computed."""
    ring = load_benchmark("ring")
    few, many = (ring.tpu_program("v5e:4x4", mode, n, 512 * n) for n in (4, 16))
    assert many["transfers"] == few["transfers"] and many["program_bytes"] < 1.05 * few["program_bytes"]
    exchanges = 12 if mode == "zigzag" else 0  # on entry and exit, forward and backward
    home = 1
    assert many["around_a_block"] == many["transfers"] - exchanges - home


def test_labels_positions_and_ids_move_together():
    """Field case F34: what is shifted before the reordering stays right."""
    Pos = Axis("position", 16)
    tokens = hax.arange(Pos)
    labels = hax.roll(tokens, -1, Pos)
    laid, shifted = (zigzag_layout(x, Pos, 2) for x in (tokens, labels))
    np.testing.assert_array_equal(laid.array, [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11])
    np.testing.assert_array_equal(shifted.array, (laid.array + 1) % 16)
    np.testing.assert_array_equal(from_zigzag_layout(laid, Pos, 2).array, tokens.array)


@pytest.mark.parametrize(
    ("pair", "want"), [((0, 10), 2), ((0, 100), 2), ((-np.inf, 3), 2), ((3, -np.inf), 1), ((-np.inf, -np.inf), 0)]
)
def test_merging_far_apart(pair, want):
    """Field case F20."""
    ones = jnp.ones((1, 1, 1))
    o, lse = merge(ones, jnp.full((1, 1), pair[0]), 2 * ones, jnp.full((1, 1), pair[1]))
    expected = (1 + 2 * np.exp(10.0)) / (1 + np.exp(10.0)) if pair == (0, 10) else want
    np.testing.assert_allclose(o[0, 0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.logaddexp(*pair), rtol=1e-6)
