# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The contract: every implementation, with every option, against the float64 oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from haliax_kernels.attention import pallas_tpu, xla
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.differentiable import attention
from haliax_kernels.attention.dropout import keep
from haliax_kernels.attention.pallas_gpu import PallasGpu
from haliax_kernels.attention.reference import dense_attention, dense_attention_grad


class InterpretedTpu:
    """The TPU kernels in Pallas' TPU interpret mode."""

    @staticmethod
    def forward(*args):
        with pltpu.force_tpu_interpret_mode():
            return pallas_tpu.forward(*args, interpret=True)

    @staticmethod
    def backward(*args):
        with pltpu.force_tpu_interpret_mode():
            return pallas_tpu.backward(*args, interpret=True)


IMPLEMENTATIONS = {"xla": xla, "pallas_tpu": InterpretedTpu, "pallas_gpu": PallasGpu(interpret=True)}
# Small, so that few positions make several blocks.
BLOCKS = {"xla": BlockSizes(q=16, k=16), "pallas_tpu": BlockSizes(q=16, k=128), "pallas_gpu": BlockSizes(q=16, k=16)}

GROUP, Q_LEN, K_LEN, KEY, VALUE = 2, 40, 56, 8, 12
SCALE = 0.4
TOLERANCE = 2e-5
NAMES = ("o", "lse", "dq", "dk", "dv", "dbias", "dsink")

every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _operands(draw=0, group=GROUP, q_len=Q_LEN, k_len=K_LEN, **more):
    arrays = (
        _normal((draw, place), *s) for place, s in enumerate(((group, q_len, KEY), (k_len, KEY), (k_len, VALUE)))
    )
    return AttentionOperands(*arrays, **more)


def _ids(length, ids, seed):
    return np.sort(np.random.default_rng(seed).choice(ids, length)).astype(np.int32)


def _mask(density, *shape):
    return np.random.default_rng(5).random(shape) < density


def _seed(group=GROUP):
    return np.arange(7, 7 + group, dtype=np.uint32)


# Half of the suite's time would go into LLVM's optimizations of programs that run once.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnames=("name", "options", "offsets"), compiler_options=FAST_COMPILE)
def _run(name, options, x, sink, do, dlse, offsets=None):
    """(o, lse, dq, dk, dv, dbias, dsink); `offsets` are static ones."""
    if offsets is not None:
        x = x._replace(q_offset=offsets[0], k_offset=offsets[1])

    def f(moving, sink):
        return attention(IMPLEMENTATIONS[name], options, x._replace(**moving), sink)

    moving = {field: getattr(x, field) for field in ("q", "k", "v", "bias")}
    outputs, pullback = jax.vjp(f, moving, sink)
    grads, dsink = pullback((do.astype(outputs[0].dtype), dlse))
    return *outputs, *(grads[field] for field in moving), dsink


def _dense_options(options, x, sink, offsets=None):
    q_offset, k_offset = (int(a) for a in offsets or (x.q_offset, x.k_offset))
    kept = None
    if options.dropout:
        rows, columns = q_offset + np.arange(x.q.shape[1]), k_offset + np.arange(x.k.shape[0])
        kept = np.asarray(keep(x.seed[:, None, None], rows[None, :, None], columns[None, None, :], options.dropout))
    return {
        "scale": options.scale,
        "left": options.left,
        "right": options.right,
        "soft_cap": options.soft_cap,
        "dropout": options.dropout,
        "keep": kept,
        "q_offset": q_offset,
        "k_offset": k_offset,
        "q_segment_ids": x.q_segment_ids,
        "k_segment_ids": x.k_segment_ids,
        "mask": x.mask,
        "bias": x.bias,
        "sink": sink,
    }


def _oracle(options, x, sink, do, dlse, offsets=None):
    dense = _dense_options(options, x, sink, offsets)
    q, k, v, do = (np.asarray(a, np.float64) for a in (x.q, x.k, x.v, do))
    return *dense_attention(q, k, v, **dense), *dense_attention_grad(q, k, v, do, dlse, **dense)


def _check(got, want, tolerance=TOLERANCE, names=NAMES):
    for name, g, w in zip(names, got, want, strict=True):
        assert (g is None) == (w is None), name
        if w is None:
            continue
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert g.shape == w.shape, name
        np.testing.assert_array_equal(g == -np.inf, w == -np.inf, err_msg=name)
        error = np.abs(np.where(w == -np.inf, 0, g) - np.where(w == -np.inf, 0, w)).max(initial=0)
        assert error <= tolerance * max(np.abs(w, where=w != -np.inf, out=np.zeros_like(w)).max(initial=0), 1e-3), name


def _compare(name, options, x, sink=None, *, offsets=None, tolerance=TOLERANCE, grad_tolerance=None):
    options = dataclasses.replace(options, block_sizes=BLOCKS[name])
    do, dlse = _normal(8, *x.q.shape[:2], x.v.shape[1]), _normal(9, *x.q.shape[:2])
    got = _run(name, options, x, sink, do, dlse, offsets)
    want = _oracle(options, x, sink, do, dlse, offsets)
    _check(got[:2], want[:2], tolerance, NAMES[:2])
    _check(got[2:], want[2:], grad_tolerance or tolerance, NAMES[2:])
    return got


# name: (options, operands, sink), each but the first of its kind alone, or with what it needs to mean something.
OPTIONS = {
    "none": ({}, {}, None),
    "causal": ({"right": 0}, {}, None),
    "left": ({"left": 5}, {}, None),
    "right": ({"right": 3}, {}, None),
    "narrow window": ({"left": 7, "right": 4}, {}, None),
    "wide window": ({"left": 33, "right": 30}, {}, None),
    "causal window": ({"left": 20, "right": 0}, {}, None),
    "window of one": ({"left": 0, "right": 0}, {}, None),
    "window longer than all": ({"left": 2**31 - 1, "right": 1000}, {}, None),
    "offsets": ({"left": 20, "right": 0}, {"q_offset": np.int32(21), "k_offset": np.int32(4)}, None),
    "segments": ({}, {"q_segment_ids": _ids(Q_LEN, range(5), 0), "k_segment_ids": _ids(K_LEN, range(1, 4), 1)}, None),
    "mask": ({}, {"mask": _mask(0.1, GROUP, Q_LEN, K_LEN)}, None),
    "shared mask": ({}, {"mask": _mask(0.1, 1, Q_LEN, K_LEN)}, None),
    "bias": ({}, {"bias": _normal(2, GROUP, Q_LEN, K_LEN)}, None),
    "shared bias": ({"right": 0}, {"bias": _normal(2, 1, Q_LEN, K_LEN)}, None),
    "bias that hides": ({}, {"bias": np.where(_mask(0.1, 1, Q_LEN, K_LEN), 1, -np.inf).astype(np.float32)}, None),
    "soft cap": ({"soft_cap": 1.5}, {}, None),
    "dropout": ({"dropout": 0.3}, {"seed": _seed()}, None),
    "sink": ({"left": 3, "right": -2}, {}, np.float32([0.5, -1.5])),
    "all": (
        {"left": 30, "right": 5, "soft_cap": 2.0, "dropout": 0.2},
        {
            "q_offset": np.int32(10),
            "q_segment_ids": _ids(Q_LEN, range(3), 0),
            "k_segment_ids": _ids(K_LEN, range(1, 4), 1),
            "mask": _mask(0.8, GROUP, Q_LEN, K_LEN),
            "bias": _normal(2, 1, Q_LEN, K_LEN),
            "seed": _seed(),
        },
        np.float32([0.5, -1.5]),
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
@every_implementation
def test_float32(name, option):
    options, operands, sink = OPTIONS[option]
    got = _compare(name, AttentionOptions(SCALE, **options), _operands(**operands), sink)
    assert {a.dtype for a in got if a is not None} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("offsets", [(24, 0), (0, 24), (-100, 0)])
@every_implementation
def test_static_offsets(name, offsets):
    """Ahead, behind, and so far behind that nothing is seen."""
    got = _compare(name, AttentionOptions(SCALE, right=0), _operands(), offsets=offsets)
    assert offsets[0] >= 0 or (got[0] == 0).all()


def _dense_bfloat16(x, sink, dense):
    """Dense attention as usually written in bfloat16: float32 logits and softmax, 16-bit weights of the values."""
    logits = jnp.einsum("gqd,kd->gqk", x.q, x.k, preferred_element_type=jnp.float32) * dense["scale"]
    logits = logits if x.bias is None else logits + x.bias
    logits = logits if dense["soft_cap"] is None else dense["soft_cap"] * jnp.tanh(logits / dense["soft_cap"])
    # The oracle's mask: where zero logits have a probability.
    flat = {**dense, "bias": None, "sink": None, "dropout": 0.0, "keep": None, "soft_cap": None, "scale": 0.0}
    zeros = [np.zeros(a.shape) for a in (x.q, x.k)]
    visible, _ = dense_attention(*zeros, np.eye(x.k.shape[0]), **flat)
    logits = jnp.where(visible > 0, logits, -1e30)
    if sink is not None:
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink[:, None, None], (*logits.shape[:2], 1))], -1)
    alive = (visible > 0).any(-1)
    p = jnp.where(alive[..., None], jax.nn.softmax(logits), 0)[..., : x.k.shape[0]]
    if dense["keep"] is not None:
        p = jnp.where(dense["keep"], p / (1 - dense["dropout"]), 0)
    # Rows that see nothing are left to the exact comparison of their zeros.
    return jnp.einsum("gqk,kd->gqd", p.astype(x.v.dtype), x.v), jnp.where(alive, jax.nn.logsumexp(logits, -1), 0)


BFLOAT16 = ("none", "causal", "segments", "dropout", "all")


@pytest.mark.parametrize("option", BFLOAT16)
@every_implementation
def test_bfloat16_errs_at_most_twice_as_much_as_dense(name, option):
    options, operands, sink = OPTIONS[option]
    options = AttentionOptions(SCALE, **options, block_sizes=BLOCKS[name])
    x = _operands(**operands)
    x = x._replace(**{field: jnp.asarray(getattr(x, field), jnp.bfloat16) for field in "qkv"})
    do, dlse = jnp.asarray(_normal(8, GROUP, Q_LEN, VALUE), jnp.bfloat16), _normal(9, GROUP, Q_LEN)
    got = _run(name, options, x, sink, do, dlse)
    assert [a.dtype.itemsize for a in got if a is not None][:5] == [2, 4, 2, 2, 2]
    want = _oracle(options, x, sink, do, dlse)
    dense = _dense_options(options, x, sink)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def both(moving, sink):
        (o, _), pullback = jax.vjp(lambda m, s: _dense_bfloat16(x._replace(**m), s, dense), moving, sink)
        return o, pullback((do, dlse))

    moving = {field: getattr(x, field) for field in ("q", "k", "v", "bias")}
    o, (grads, dsink) = both(moving, sink)
    theirs = (o, None, *(grads[field] for field in moving), dsink)
    _check(got[1:2], want[1:2], names=NAMES[1:2])
    for what, a, b, c in zip(NAMES, got, theirs, want, strict=True):
        if b is None or c is None:
            continue
        our_error, their_error = (np.std(np.asarray(e, np.float64) - c) for e in (a, b))
        assert our_error <= 2 * their_error + TOLERANCE * np.abs(c).max() * (what == "dsink"), what


# Static options, few, so that few programs are compiled; all else is drawn.
DRAWN = (
    {},
    {"right": 0, "soft_cap": 2.0},
    {"left": 3, "right": 0, "dropout": 0.4},
    {"left": 11, "right": 9, "soft_cap": 1.0, "dropout": 0.1},
)


@pytest.mark.slow
@every_implementation
def test_combinations(name):
    # The interpreters of kernels are slow.
    @settings(max_examples=60 if name == "xla" else 15, deadline=None, derandomize=True)
    @given(
        static=st.sampled_from(DRAWN),
        seed=st.integers(0, 2**16),
        offsets=st.tuples(st.integers(-30, 30), st.integers(-30, 30)),
        q_ids=st.lists(st.integers(-1, 1), min_size=20, max_size=20),
        k_ids=st.lists(st.integers(-1, 1), min_size=26, max_size=26),
        density=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
        biased=st.sampled_from([0.0, 1.0, 10.0]),
        magnitude=st.sampled_from([0.0, 1.0, 10.0]),
        sink=st.tuples(st.floats(-9, 9, width=32), st.floats(-9, 9, width=32)),
    )
    def run(**drawn):
        _combination(name, **drawn)

    run()


def _combination(name, static, seed, offsets, q_ids, k_ids, density, biased, magnitude, sink):
    rng = np.random.default_rng(seed)
    x = _operands(
        seed,
        q_len=20,
        k_len=26,
        q_offset=np.int32(offsets[0]),
        k_offset=np.int32(offsets[1]),
        q_segment_ids=np.int32(q_ids),
        k_segment_ids=np.int32(k_ids),
        mask=rng.random((GROUP, 20, 26)) < density,
        bias=_normal(seed, 1, 20, 26) * np.float32(biased),
        seed=rng.integers(0, 2**32, GROUP, np.uint32),
    )
    x = x._replace(q=x.q * np.float32(magnitude))
    _compare(name, AttentionOptions(SCALE, **static), x, np.float32(sink), tolerance=TOLERANCE * max(1, magnitude / 2))


@every_implementation
def test_logits_of_ten_thousand(name):
    rng = np.random.default_rng(0)
    # Integers, whose logits are exact in float32, so that the softmax alone is tested.
    q, k = (rng.integers(-60, 61, shape).astype(np.float32) for shape in ((GROUP, Q_LEN, KEY), (K_LEN, KEY)))
    k[1::2] = k[::2]  # the largest is there twice
    x = _operands()._replace(q=q, k=k)
    assert np.abs(q @ k.T).max() > 1e4
    # The gradient knows the probabilities through lse, whose float32 at 1e4 is good to 5e-4.
    options = AttentionOptions(1.0, right=0)
    _, lse, *_ = _compare(name, options, x, tolerance=TOLERANCE, grad_tolerance=2e-3)
    assert np.isfinite(lse).all()


@every_implementation
def test_equal_keys(name):
    x = _operands()
    x = x._replace(k=np.broadcast_to(x.k[:1], x.k.shape))
    o, *_ = _compare(name, AttentionOptions(SCALE, right=0), x)
    np.testing.assert_allclose(o[0, 20], x.v[:21].mean(0), atol=1e-6)


@every_implementation
def test_segments_of_one_token_and_empty_ones(name):
    """Query 2 j sees key j alone; queries of odd ids see nothing."""
    ids = {"q_segment_ids": np.arange(Q_LEN, dtype=np.int32), "k_segment_ids": 2 * np.arange(K_LEN, dtype=np.int32)}
    x = _operands(**ids)
    o, *_ = _compare(name, AttentionOptions(SCALE), x)
    np.testing.assert_allclose(o[:, ::2], np.broadcast_to(x.v[: Q_LEN // 2], (GROUP, Q_LEN // 2, VALUE)), atol=1e-6)
    assert (o[:, 1::2] == 0).all()


@pytest.mark.parametrize("sink", [None, np.float32([-200.0, -np.inf])], ids=["no sink", "sink"])
@every_implementation
def test_rows_that_see_nothing(name, sink):
    """Whatever NaN stands in them, and in keys and queries that nothing sees."""
    ids = (
        np.where(np.arange(Q_LEN) < 30, 0, 7).astype(np.int32),
        np.where(np.arange(K_LEN) < 44, 0, 8).astype(np.int32),
    )
    x = _operands(q_segment_ids=ids[0], k_segment_ids=ids[1])
    do, dlse = _normal(8, GROUP, Q_LEN, VALUE), _normal(9, GROUP, Q_LEN)
    do[:, 30:], dlse[:, 30:] = 0, 0
    options = AttentionOptions(SCALE, soft_cap=3.0, block_sizes=BLOCKS[name])
    want = _oracle(options, x, None if sink is None else sink.clip(-200), do, dlse)
    for array in (x.q[:, 30:], x.k[44:], x.v[44:], do[:, 30:]):
        array[...] = np.nan
    if sink is None:
        dlse[:, 30:] = np.nan  # the derivative of what a loss does with -inf
    got = _run(name, options, x, sink, do, dlse)
    assert (got[0][:, 30:] == 0).all() and (got[2][:, 30:] == 0).all()
    assert (got[1][:, 30:] == (-np.inf if sink is None else sink[:, None])).all()
    alive = [a[:, :30] for a in got[:2]], [a[:, :30] for a in want[:2]]
    _check(*alive, names=NAMES[:2])
    _check(got[2:], want[2:], names=NAMES[2:])


@every_implementation
def test_one_position(name):
    _compare(name, AttentionOptions(SCALE, left=0, right=0), _operands(group=1, q_len=1, k_len=1))


@every_implementation
def test_a_prime_like_length(name):
    length, rows = 8191, np.arange(0, 8191, 117)
    x = _operands(group=1, q_len=length, k_len=length)
    forward = jax.jit(IMPLEMENTATIONS[name].forward, static_argnums=0)
    o, lse = forward(AttentionOptions(SCALE, left=5000, right=0), x)
    distance = np.arange(length)[None, :] - rows[:, None]
    mask = (distance <= 0) & (distance >= -5000)
    want = dense_attention(x.q[:, rows], x.k, x.v, scale=SCALE, mask=mask[None])
    _check((o[:, rows], lse[:, rows]), want, names=NAMES[:2])


@every_implementation
def test_many_query_heads_on_one_key_head(name):
    _compare(name, AttentionOptions(SCALE, right=0), _operands(group=71, q_len=20, k_len=20))


@every_implementation
def test_soft_cap_gradient_is_that_of_the_finite_difference(name):
    options = AttentionOptions(SCALE, right=0, soft_cap=0.7, block_sizes=BLOCKS[name])
    x, do = _operands(q_len=20, k_len=20), _normal(8, GROUP, 20, VALUE)
    _, _, *grads, _, _ = _run(name, options, x, None, do, np.zeros((GROUP, 20), np.float32))
    forward = jax.jit(IMPLEMENTATIONS[name].forward, static_argnums=0)
    for place, field in enumerate("qkv"):
        step = _normal((7, place), *getattr(x, field).shape)
        ahead, behind = (
            np.sum(np.float64(forward(options, x._replace(**{field: getattr(x, field) + h * step}))[0]) * do)
            for h in (np.float32(1e-2), np.float32(-1e-2))
        )
        np.testing.assert_allclose((ahead - behind) / 2e-2, np.sum(np.float64(grads[place]) * step), rtol=2e-3)


@every_implementation
def test_zero_cotangents_give_zero_gradients(name):
    options, operands, sink = OPTIONS["all"]
    options = AttentionOptions(SCALE, **options, block_sizes=BLOCKS[name])
    do, dlse = np.zeros((GROUP, Q_LEN, VALUE), np.float32), np.zeros((GROUP, Q_LEN), np.float32)
    for grad in _run(name, options, _operands(**operands), sink, do, dlse)[2:]:
        assert (grad == 0).all()


@every_implementation
def test_dropout_does_not_depend_on_block_sizes(name):
    options = AttentionOptions(SCALE, right=0, dropout=0.5, block_sizes=BLOCKS[name])
    x, do, dlse = _operands(seed=_seed()), _normal(8, GROUP, Q_LEN, VALUE), _normal(9, GROUP, Q_LEN)
    other = dataclasses.replace(options, block_sizes=None)
    want = _run(name, options, x, None, do, dlse)
    _check(_run(name, other, x, None, do, dlse), want)
    assert np.abs(want[0] - _run(name, options, x._replace(seed=_seed() + 1), None, do, dlse)[0]).max() > 0.1


@pytest.mark.parametrize("static", [{"right": 0}, {"left": 9, "right": 3, "dropout": 0.3, "soft_cap": 2.0}])
@every_implementation
def test_halves_of_the_keys_make_the_whole(name, static):
    """Merged by lse as in ring attention, at offsets that `jax.vmap` maps; the gradients from the whole's lse."""
    implementation, half, length = IMPLEMENTATIONS[name], 16, 32
    options = AttentionOptions(SCALE, **static, block_sizes=BLOCKS[name])
    grad_options = dataclasses.replace(options, grad_dtype=jnp.float32)
    x = _operands(
        q_len=length, k_len=length, bias=_normal(2, GROUP, length, length), seed=_seed(), q_offset=np.int32(5)
    )
    do, dlse = _normal(8, GROUP, length, VALUE), _normal(9, GROUP, length)
    halves = x._replace(
        k=x.k.reshape(2, half, KEY),
        v=x.v.reshape(2, half, VALUE),
        bias=x.bias.reshape(GROUP, length, 2, half).transpose(2, 0, 1, 3),
        k_offset=np.array([3, 3 + half], np.int32),
    )
    axes = AttentionOperands(*[0 if field in ("k", "v", "bias", "k_offset") else None for field in x._fields])

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(halves, do, dlse):
        outs, lses = jax.vmap(lambda h: implementation.forward(options, h), (axes,))(halves)
        lse = jnp.logaddexp(lses[0], lses[1])
        weights = jnp.where(lses == -jnp.inf, 0, jnp.exp(lses - jnp.where(lse == -jnp.inf, 0, lse)))
        o = jnp.sum(weights[..., None] * outs, 0)
        delta = jnp.sum(do * o, -1) - dlse
        grads = jax.vmap(lambda h: implementation.backward(grad_options, h, lse, do, delta), (axes,))(halves)
        dbias = grads.bias.transpose(1, 2, 0, 3).reshape(x.bias.shape)
        return o, lse, grads.q.sum(0), grads.k.reshape(x.k.shape), grads.v.reshape(x.v.shape), dbias, None

    whole = x._replace(k_offset=np.int32(3))
    _check(run(halves, do, dlse), _oracle(options, whole, None, do, dlse))


@every_implementation
def test_output_dtypes(name):
    options = AttentionOptions(SCALE, right=0, out_dtype=jnp.float32, grad_dtype=jnp.float32, block_sizes=BLOCKS[name])
    x = _operands(q_len=20, k_len=20)
    x = x._replace(**{field: jnp.asarray(getattr(x, field), jnp.bfloat16) for field in "qkv"})

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(x):
        o, lse = IMPLEMENTATIONS[name].forward(options, x)
        return o, lse, IMPLEMENTATIONS[name].backward(options, x, lse, o, lse)

    o, lse, grads = run(x)
    assert {a.dtype for a in (o, lse, *grads[:3])} == {jnp.dtype(jnp.float32)}
    do, dlse = _normal(8, GROUP, 20, VALUE), _normal(9, GROUP, 20)
    got = _run(name, options, x, None, do, dlse)
    assert [a.dtype.itemsize for a in got[:5]] == [4, 4, 2, 2, 2]
