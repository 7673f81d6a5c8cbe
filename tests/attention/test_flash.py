# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`flash_attention` on NamedArrays: values and gradients against float64, on meshes, and its refusals."""

import dataclasses
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_kernels import AttentionMask, BlockSizes, flash_attention, implementations
from haliax_kernels.attention import backends
from haliax_kernels.attention.backends import IMPLEMENTATIONS, Request
from haliax_kernels.attention.reference import dense_attention, dense_attention_grad
from haliax_kernels.errors import (
    ArgumentError,
    BindingError,
    NoImplementationError,
    ShardedAxisError,
    UnsupportedOptionError,
)
from support import BOTH_MESHES, collectives, make_mesh

B, H, G = Axis("batch", 4), Axis("kv_head", 2), Axis("q_heads_per_group", 2)
Pos, KPos, D, Dv = Axis("position", 24), Axis("key_position", 24), Axis("head_size", 8), Axis("value_size", 12)
MESHES = [
    ({"data": 2, "model": 2, "replica": 2}, {"batch": ("replica", "data"), "kv_head": "model"}),
    ({"data": 4, "model": 2}, {"batch": "data", "q_heads_per_group": "model"}),
    ({"data": 4, "idle": 2}, {"batch": "data"}),
]


def choose(request, forced):
    return implementations.choose("flash_attention", backends.IMPLEMENTATIONS, request, forced)


def arrays(value=Dv, kpos=KPos, dtype=jnp.float32):
    shapes = ((B, Pos, H, G, D), (B, kpos, H, D), (value, H, B, kpos))
    keys = jax.random.split(jax.random.key(0), 3)
    return [hax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)]


def ids(*axes):
    per_row = jnp.array([[0] * 7 + [1] * 11 + [2] * 6, [0] * 24, [3] * 20 + [4] * 4, [5] + [6] * 23])
    return hax.named(per_row, (B, Pos)).rearrange(axes or (B, Pos))


def reference(q, k, v, do, *, causal, segments, scale, dlse=None):
    """(o, lse, dq, dk, dv) in the axis order batch, kv_head, group, position, size (k and v: without group)."""
    q, do = (x.rearrange(("batch", "kv_head", "q_heads_per_group", "position", ...)).array for x in (q, do))
    k, v = (x.rearrange(("batch", "kv_head", "key_position", ...)).array for x in (k, v))
    outs = []
    for b in range(4):
        for h in range(2):
            seg = {} if segments is None else {"q_segment_ids": segments[b], "k_segment_ids": segments[b]}
            args = [np.float64(x[b, h]) for x in (q, k, v)]
            o, lse = dense_attention(*args, scale=scale, causal=causal, **seg)
            grads = dense_attention_grad(
                *args,
                np.float64(do[b, h]),
                dlse=dlse if dlse is None else dlse[b, h],
                scale=scale,
                causal=causal,
                **seg,
            )
            outs.append((o, lse, *grads[:3]))
    return [np.stack(x).reshape(4, 2, *x[0].shape) for x in zip(*outs, strict=True)]


ORDERS = (
    ("batch", "kv_head", "q_heads_per_group", "position", "head_size"),
    ("batch", "kv_head", "key_position", "head_size"),
    ("batch", "kv_head", "key_position", "value_size"),
)


@pytest.mark.parametrize("types", BOTH_MESHES)
@pytest.mark.parametrize(("sizes", "mapping"), MESHES)
@pytest.mark.parametrize("masked", ["full", "causal", "segments"])
def test_values_and_gradients_on_meshes(sizes, mapping, masked, types):
    q, k, v = arrays()
    do = hax.random.normal(jax.random.key(9), (B, H, G, Pos, Dv))
    dlse = jax.random.normal(jax.random.key(8), (4, 2, 2, 24))
    segments = ids() if masked == "segments" else None

    @jax.jit
    def run(q, k, v, segments):
        mask = None if masked == "full" else AttentionMask.causal(segments)

        def f(q, k, v):
            return flash_attention(Pos, KPos, D, q, k, v, mask, return_lse=True, block_sizes=BlockSizes(8, 8))

        (o, lse), pullback = jax.vjp(f, q, k, v)
        given = [hax.named(jnp.asarray(x), y.axes) for x, y in ((do.array, o), (dlse, lse))]
        if types.name == "Explicit":
            given = [
                hax.named(jax.sharding.reshard(x.array, jax.typeof(y.array).sharding), y.axes)
                for x, y in zip(given, (o, lse), strict=True)
            ]
        return o, lse, *pullback(tuple(given))

    with jax.set_mesh(make_mesh(types, **sizes)), hax.axis_mapping(mapping):
        args = [hax.shard(x) for x in (q, k, v)]
        o, lse, *grads = run(*args, None if segments is None else hax.shard(segments))
    want = reference(
        q,
        k,
        v,
        do,
        causal=masked != "full",
        segments=None if segments is None else np.asarray(segments.array),
        scale=8**-0.5,
        dlse=np.float64(dlse),
    )
    got = [o.array, lse.array, *(g.rearrange(order).array for g, order in zip(grads, ORDERS, strict=True))]
    for what, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert np.abs(np.float64(a) - b).max() <= 2e-5 * max(1.0, np.abs(b).max()), what


def test_axes_dtypes_and_names():
    q, k, v = arrays(value=D, dtype=jnp.bfloat16)
    o, lse = flash_attention("position", ("key_position",), "head_size", q, k.astype(jnp.float32), v, return_lse=True)
    assert o.axes == (B, H, G, Pos, D) and o.dtype == jnp.bfloat16
    assert lse.axes == (B, H, G, Pos) and lse.dtype == jnp.float32


def test_unequal_lengths_and_missing_loop_axes():
    """Cross attention; keys shared along the batch; causal counts from the start of both."""
    KPos2 = Axis("key_position", 10)
    q, k, v = arrays(kpos=KPos2)
    k, v = k["batch", 0], v["batch", 0]
    for causal in (False, True):
        o = flash_attention(Pos, KPos2, D, q, k, v, AttentionMask(is_causal=causal))
        o = o.rearrange((B, H, G, Pos, Dv))
        for b in range(4):
            for h in range(2):
                want, _ = dense_attention(
                    np.float64(q["batch", b, "kv_head", h].rearrange((G, Pos, D)).array),
                    np.float64(k["kv_head", h].rearrange((KPos2, D)).array),
                    np.float64(v["kv_head", h].rearrange((KPos2, Dv)).array),
                    scale=8**-0.5,
                    causal=causal,
                )
                np.testing.assert_allclose(o.array[b, h], want, rtol=1e-4, atol=2e-5)


def test_rows_that_see_nothing():
    """Field case F10: zeros, -inf, and no gradient, where others return the mean of the values."""
    q, k, v = arrays()
    q_ids = hax.named(jnp.where(jnp.arange(24) < 20, 0, 7), Pos)
    k_ids = hax.named(jnp.zeros(24, jnp.int32), KPos)
    mask = AttentionMask(is_causal=True, segment_ids=(q_ids, k_ids))
    o, lse = flash_attention(Pos, KPos, D, q, k, v, mask, return_lse=True)
    assert np.all(np.asarray(o["position", 20:24].array) == 0)
    assert np.all(np.isneginf(np.asarray(lse["position", 20:24].array)))
    dead = jax.grad(
        lambda q, k, v: jnp.sum(flash_attention(Pos, KPos, D, q, k, v, mask)["position", 20:24].array), (0, 1, 2)
    )
    for g in dead(q, k, v):
        assert np.all(np.asarray(g.array) == 0)


@pytest.mark.parametrize("axis", ["position", "key_position", "head_size", "value_size"])
def test_sharded_axes_that_must_be_whole(axis):
    q, k, v = arrays()
    with jax.set_mesh(make_mesh(context=4)), hax.axis_mapping({axis: "context"}), pytest.raises(ShardedAxisError) as e:
        flash_attention(Pos, KPos, D, q, k, v, context_parallel="error")
    for text in ("flash_attention", repr(axis), "'context' (4 devices)", "hax.axis_mapping", f'"{axis}": None'):
        assert text in str(e.value)


def test_no_collective_with_batch_and_heads_sharded():
    q, k, v = arrays()
    sizes, mapping = MESHES[0]
    with jax.set_mesh(make_mesh(**sizes)), hax.axis_mapping(mapping):
        args = [hax.shard(x) for x in (q, k, v)]

        def gradient(q, k, v):
            o, pullback = jax.vjp(lambda *a: flash_attention(Pos, KPos, D, *a, AttentionMask.causal()), q, k, v)
            return pullback(o)

        assert collectives(jax.jit(gradient).lower(*args).compile().as_text()) == {}


class Foreign:
    """An object with the fields of Levanter's mask."""

    is_causal, causal_offset, explicit_mask, segment_ids, sliding_window = True, None, None, None, None

    def __init__(self, **fields):
        self.__dict__.update(fields)


OPTIONS = {
    "bias": {"bias": hax.zeros((Pos, KPos))},
    "dropout": {"dropout": 0.1, "prng": jax.random.key(0)},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "attn_sink": {"attn_sink": hax.zeros(H)},
    "sliding_window": {"mask": Foreign(sliding_window=4)},
    "causal_offset": {"mask": Foreign(causal_offset=hax.named(3, ()))},
    "explicit mask": {"mask": hax.ones((Pos, KPos), dtype=bool)},
    "return_lse": {"return_lse": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_the_forced_implementation_lacks_is_named(option):
    with pytest.raises(UnsupportedOptionError, match=f"'splash'.*{option}") as e:
        flash_attention(Pos, KPos, D, *arrays(), **OPTIONS[option], implementation="splash")
    assert isinstance(e.value, NotImplementedError)


def test_no_implementation_says_why_each_cannot(monkeypatch):
    refusing = tuple(dataclasses.replace(i, honours=frozenset()) for i in IMPLEMENTATIONS)
    monkeypatch.setattr(backends, "IMPLEMENTATIONS", refusing)
    with pytest.raises(NoImplementationError, match="attn_sink") as e:
        choose(Request("tpu", ("attn_sink",), jnp.float32), None)
    assert len(e.value.exceptions) == len(IMPLEMENTATIONS)


def test_dropout_needs_a_key_and_a_fraction():
    with pytest.raises(ArgumentError, match="needs a key"):
        flash_attention(Pos, KPos, D, *arrays(), dropout=0.1)
    with pytest.raises(ArgumentError, match="no fraction"):
        flash_attention(Pos, KPos, D, *arrays(), dropout=1.0, prng=jax.random.key(0))


def test_windows_that_show_nothing_are_refused():
    with pytest.raises(ArgumentError, match="sliding_window=0"):
        flash_attention(Pos, KPos, D, *arrays(), AttentionMask(sliding_window=0))


@pytest.mark.parametrize("window", [None, 4])
def test_a_traced_offset_is_as_a_static_one(window):
    q, k, v = arrays()

    def run(offset):
        return flash_attention(Pos, KPos, D, q, k, v, AttentionMask.causal(offset=offset, sliding_window=window)).array

    for offset in (-3, 0, 5):
        np.testing.assert_allclose(jax.jit(run)(offset), run(offset), rtol=1e-5, atol=1e-6)


def test_an_offset_without_causality_is_no_option():
    q, k, v = arrays()
    mask = Foreign(is_causal=False, causal_offset=hax.named(3, ()))
    np.testing.assert_array_equal(
        flash_attention(Pos, KPos, D, q, k, v, mask).array, flash_attention(Pos, KPos, D, q, k, v).array
    )


def test_choice_of_implementation(caplog):
    with pytest.raises(ArgumentError, match="'pallas_tpu', 'splash', 'pallas_gpu', 'xla'"):
        flash_attention(Pos, KPos, D, *arrays(), implementation="nope")
    with pytest.raises(UnsupportedOptionError, match="needs a tpu, and this call runs on cpu"):
        flash_attention(Pos, KPos, D, *arrays(), implementation="splash")
    assert choose(Request("tpu", (), jnp.float32), None).name == "pallas_tpu"
    assert choose(Request("tpu", (), jnp.bfloat16, BlockSizes(256, 128)), "splash").name == "splash"
    with pytest.raises(UnsupportedOptionError, match="multiples of 128, but are q 64"):
        choose(Request("tpu", (), jnp.float32, BlockSizes(64, 128)), "splash")
    assert choose(Request("gpu", ("bias", "dropout"), jnp.float16, BlockSizes(64, 32), 256), None).name == "pallas_gpu"
    with pytest.raises(UnsupportedOptionError, match="powers of two of at least 16, but are q 48"):
        choose(Request("gpu", (), jnp.float32, BlockSizes(48, 32)), "pallas_gpu")
    with caplog.at_level("WARNING"):
        assert choose(Request("cpu", (), jnp.float16), None).name == "xla"
    assert not caplog.text


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request("tpu", (), jnp.float16), "'pallas_tpu' cannot.*not float16"),
        (Request("gpu", (), jnp.float64), "'pallas_gpu' cannot.*not float64"),
        (Request("gpu", (), jnp.bfloat16, head_size=320), "'pallas_gpu' cannot.*at most 256, but is 320"),
    ],
)
def test_falling_back_to_xla_is_logged(request_, why, caplog):
    implementations._log_once.cache_clear()
    with caplog.at_level("WARNING"):
        assert choose(request_, None).name == "xla"
    assert re.search(why, caplog.text)


def test_same_position_names():
    q, _, _ = arrays()
    with pytest.raises(BindingError, match="'position'"):
        flash_attention(Pos, Pos, D, q, q, q)


def test_heads_under_two_names_are_refused():
    """A flat axis of query heads and the keys' own: each query head would see each key head."""
    q, k, v = arrays()
    flat = q.flatten_axes((H, G), "heads")
    with pytest.raises(BindingError) as error:
        flash_attention(Pos, KPos, D, flat, k, v)
    assert "'heads' (4)" in str(error.value) and "'kv_head' (2)" in str(error.value)
    # Each way out does what it says.
    assert "unflatten_axis('heads', (Axis('kv_head', 2), Axis('q_heads_per_group', 2)))" in str(error.value)
    for query, heads in (
        (flat.unflatten_axis("heads", (H, G)), {"kv_head", "q_heads_per_group"}),
        (flat.rename({"heads": "rows"}), {"kv_head", "rows"}),
    ):
        out = jax.eval_shape(lambda q: flash_attention(Pos, KPos, D, q, k, v), query)
        assert {a.name for a in out.axes} == {"batch", "position", "value_size", *heads}
    same = {"kv_head": "heads"}
    out = jax.eval_shape(lambda q: flash_attention(Pos, KPos, D, q, k.rename(same), v.rename(same)), flat["heads", :2])
    assert {a.name for a in out.axes} == {"batch", "position", "value_size", "heads"}
