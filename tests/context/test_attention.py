# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention over a sharded sequence against float64 attention on the whole one: values and gradients."""

import dataclasses
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_kernels import (
    BlockSizes,
    flash_attention,
    flash_attention_plan,
    from_zigzag_layout,
    zigzag_layout,
)
from haliax_kernels.attention.dropout import keep
from haliax_kernels.attention.reference import dense_attention, dense_attention_grad
from support import BOTH_MESHES, make_mesh

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


def run(case):
    """(outputs and gradients in the oracle's order of axes, the compiled texts, the plan)."""
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
        texts = [jax.jit(forward, **options).lower(moving, whole, prng, offset).compile().as_text()]
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


def check(case, tolerance=TOLERANCE):
    o, lse, grads, texts, plan = run(case)
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


MODES = ("ring", "zigzag", "allgather", "ulysses", "auto")
FEATURES = {
    "full": {},
    "causal": {"right": 0},
    "sliding window": {"left": 9, "right": 0},
    "narrow sliding window": {"left": 2, "right": 0},
    "bidirectional window": {"left": 5, "right": 5},
    "offset": {"right": 3},
    "negative offset": {"right": -5},
    "traced offset": {"right": 0, "offset": 5, "traced": True},
    "segments": {"right": 0, "ids": True},
    "mask": {"mask": True},
    "bias": {"right": 0, "bias": True},
    "soft cap": {"right": 0, "soft_cap": 1.0},
    "sink": {"left": 3, "right": 0, "sink": True},
    "dropout": {"right": 0, "dropout": 0.3},
    "cross": {"q_len": 16, "k_len": 48},
    "causal cross": {"q_len": 48, "k_len": 16, "right": 0},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mode", MODES)
def test_every_feature(mode, feature):
    if mode == "ulysses" and feature in ("mask", "bias"):
        pytest.skip("refused: test_refusals")
    heads = 4 if mode == "ulysses" else 2
    check(Case(mode=mode, heads=heads, **FEATURES[feature]))
