# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Blockwise XLA attention against the float64 oracle."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from haliax_kernels.attention import differentiable, xla
from haliax_kernels.attention.block_sizes import BlockSizes, default_block_sizes, even_block
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.reference import dense_attention, dense_attention_grad
from haliax_kernels.attention.xla import attention

KEY, VALUE = 8, 12
SCALE = KEY**-0.5
FLOAT32_TOLERANCE = 2e-5


def _inputs(q_len, k_len, group=1, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (group, q_len, KEY),
        "k": (k_len, KEY),
        "v": (k_len, VALUE),
        "do": (group, q_len, VALUE),
        "dlse": (group, q_len),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def _ids(q_len, k_len, seed=0):
    """Packed segments; some queries' ids (0 and 4) no key has."""
    rng = np.random.default_rng(seed)
    return (
        np.sort(rng.integers(0, 5, q_len)).astype(np.int32),
        np.sort(rng.integers(1, 4, k_len)).astype(np.int32),
    )


@functools.partial(jax.jit, static_argnames=("causal", "block_sizes"))
def _run(q, k, v, do, dlse, q_ids=None, k_ids=None, *, causal, block_sizes):
    def f(q, k, v):
        return attention(q, k, v, q_ids, k_ids, causal=causal, scale=SCALE, block_sizes=block_sizes)

    outputs, pullback = jax.vjp(f, q, k, v)
    return *outputs, *pullback((do, dlse))


def _oracle(q, k, v, do, dlse, q_ids=None, k_ids=None, *, causal):
    options = {"scale": SCALE, "causal": causal, "q_segment_ids": q_ids, "k_segment_ids": k_ids}
    return *dense_attention(q, k, v, **options), *dense_attention_grad(q, k, v, do, dlse, **options)[:3]


def _relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want)
    np.testing.assert_array_equal(got == -np.inf, want == -np.inf)
    got, want = (np.where(want == -np.inf, 0, x) for x in (got, want))
    return np.abs(got - want).max() / max(np.abs(want).max(), 1e-3)


def _check(got, want, tolerance=FLOAT32_TOLERANCE):
    for name, g, w in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert g.shape == w.shape, name
        assert _relative_error(g, w) <= tolerance, name


@pytest.mark.parametrize(
    ("q_len", "k_len", "group", "blocks", "causal", "segmented"),
    [
        (1, 1, 1, None, True, False),
        (1, 1, 1, None, False, True),
        (100, 100, 3, None, True, True),
        (100, 100, 1, BlockSizes(q=32, k=16), True, False),
        (100, 100, 1, BlockSizes(q=32, k=16), False, False),
        (40, 40, 2, BlockSizes(q=7, k=9), True, False),  # blocks that end one off the diagonal
        (192, 192, 3, BlockSizes(q=64, k=128), True, False),
        (192, 192, 3, BlockSizes(q=64, k=128), False, True),
        (64, 150, 3, BlockSizes(q=16, k=32), True, False),
        (64, 150, 3, BlockSizes(q=16, k=32), True, True),
        (64, 150, 3, BlockSizes(q=16, k=32), False, False),
        (150, 64, 1, BlockSizes(q=48, k=32), True, False),
        (150, 64, 1, BlockSizes(q=48, k=24), True, True),
        (150, 64, 1, BlockSizes(q=48, k=24), False, False),
    ],
)
def test_values_and_gradients(q_len, k_len, group, blocks, causal, segmented):
    inputs = _inputs(q_len, k_len, group)
    ids = _ids(q_len, k_len) if segmented else ()
    got = _run(*inputs.values(), *ids, causal=causal, block_sizes=blocks)
    assert [x.dtype for x in got] == [jnp.float32] * 5
    _check(got, _oracle(*inputs.values(), *ids, causal=causal))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    causal=st.booleans(),
    q_ids=st.lists(st.integers(-1, 2), min_size=20, max_size=20),
    k_ids=st.lists(st.integers(-1, 2), min_size=26, max_size=26),
    magnitude=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_any_segment_ids(seed, causal, q_ids, k_ids, magnitude):
    inputs = _inputs(20, 26, 2, seed)
    inputs["q"] *= np.float32(magnitude)
    ids = np.array(q_ids, np.int32), np.array(k_ids, np.int32)
    got = _run(*inputs.values(), *ids, causal=causal, block_sizes=BlockSizes(q=8, k=4))
    _check(got, _oracle(*inputs.values(), *ids, causal=causal), tolerance=FLOAT32_TOLERANCE * max(1.0, magnitude))


@settings(max_examples=4, deadline=None)
@given(
    q_len=st.integers(1, 9),
    k_len=st.integers(1, 9),
    group=st.integers(1, 3),
    causal=st.booleans(),
    q_block=st.integers(1, 10),
    k_block=st.integers(1, 10),
)
def test_any_shape(q_len, k_len, group, causal, q_block, k_block):
    inputs = _inputs(q_len, k_len, group)
    with jax.disable_jit():
        got = _run(*inputs.values(), causal=causal, block_sizes=BlockSizes(q=q_block, k=k_block))
    _check(got, _oracle(*inputs.values(), causal=causal))


@pytest.mark.parametrize(("q_len", "k_len"), [(3, 0), (0, 3)])
def test_empty_lengths(q_len, k_len):
    o, lse, dq, dk, dv = _run(*_inputs(q_len, k_len).values(), causal=False, block_sizes=None)
    assert o.shape == (1, q_len, VALUE) and (o == 0).all() and (lse == -jnp.inf).all()
    assert all((grad == 0).all() for grad in (dq, dk, dv))


def test_rows_that_see_nothing_are_zero_and_send_nothing():
    # F10: queries 200 to 255 carry an id that no key has.
    inputs = _inputs(256, 256)
    inputs["v"] += 1
    q_ids, k_ids = np.zeros(256, np.int32), np.zeros(256, np.int32)
    q_ids[200:] = 7
    inputs["do"][:, :200] = 0
    inputs["dlse"][:] = 0
    inputs["dlse"][:, 200:] = np.nan  # the derivative of whatever a loss does with -inf
    o, lse, *grads = _run(*inputs.values(), q_ids, k_ids, causal=True, block_sizes=BlockSizes(q=64, k=64))
    assert (o[:, 200:] == 0).all() and (lse[:, 200:] == -jnp.inf).all()
    assert jnp.isfinite(o).all() and jnp.isfinite(lse[:, :200]).all()
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("causal", [False, True])
def test_poisoned_padding_does_not_leak(causal):
    inputs = _inputs(90, 90, 2)
    ids = np.repeat(np.int32([1, 2, 3]), 30)
    q_ids, k_ids = np.where(ids == 3, -1, ids).astype(np.int32), np.where(ids == 3, -2, ids).astype(np.int32)
    clean = _oracle(*inputs.values(), q_ids, k_ids, causal=causal)
    for name, axis in (("q", 1), ("k", 0), ("v", 0), ("do", 1), ("dlse", 1)):
        inputs[name] = np.moveaxis(np.moveaxis(inputs[name], axis, 0).copy(), 0, axis)
        np.moveaxis(inputs[name], axis, 0)[60:] = np.nan
    # 60 is inside a block of either size, so poisoned and clean positions share one.
    got = _run(*inputs.values(), q_ids, k_ids, causal=causal, block_sizes=BlockSizes(q=16, k=32))
    _check(got, clean)


def test_causal_keys_past_the_last_query_are_not_read():
    inputs = _inputs(20, 50)
    clean = _oracle(*inputs.values(), causal=True)
    inputs["k"][20:], inputs["v"][20:] = np.nan, np.nan
    _check(_run(*inputs.values(), causal=True, block_sizes=BlockSizes(q=16, k=16)), clean)


def _dense_bfloat16(q, k, v, mask):
    logits = jnp.einsum("gqd,kd->gqk", q, k, preferred_element_type=jnp.float32) * SCALE
    p = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf)).astype(q.dtype)
    return jnp.einsum("gqk,kd->gqd", p, v)


def test_bfloat16_is_as_good_as_dense():
    inputs = {name: jnp.asarray(x, jnp.bfloat16) for name, x in _inputs(192, 192, 3).items()}
    inputs["dlse"] = jnp.zeros((3, 192), jnp.float32)
    got = _run(*inputs.values(), causal=True, block_sizes=BlockSizes(q=64, k=32))
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 3]
    want = _oracle(*(np.asarray(x, np.float64) for x in inputs.values()), causal=True)
    q, k, v, do, _ = inputs.values()
    o, pullback = jax.vjp(lambda *a: _dense_bfloat16(*a, jnp.tril(jnp.ones((192, 192), bool))), q, k, v)
    names, places = ("o", "dq", "dk", "dv"), (0, 2, 3, 4)
    for name, place, dense in zip(names, places, (o, *pullback(do)), strict=True):
        ours, theirs = (np.std(np.asarray(x, np.float64) - want[place]) for x in (got[place], dense))
        assert ours <= 2 * theirs, name
    assert _relative_error(got[1], want[1]) <= FLOAT32_TOLERANCE


def test_float16_runs():
    inputs = {name: jnp.asarray(x, jnp.float16) for name, x in _inputs(40, 40).items()}
    inputs["dlse"] = inputs["dlse"].astype(jnp.float32)
    got = _run(*inputs.values(), causal=True, block_sizes=None)
    _check(got, _oracle(*(np.asarray(x, np.float64) for x in inputs.values()), causal=True), tolerance=2e-3)


def test_logsumexp_alone_has_its_gradient():
    inputs = _inputs(40, 40, 2)
    inputs["do"][:] = 0
    _check(
        _run(*inputs.values(), causal=True, block_sizes=BlockSizes(q=16, k=16)), _oracle(*inputs.values(), causal=True)
    )


@pytest.mark.parametrize("segmented", [False, True])
def test_nested_vmap(segmented):
    batch, heads, group, length = 2, 3, 2, 40
    every = [[_inputs(length, length, group, seed=10 * b + h) for h in range(heads)] for b in range(batch)]
    stacked = [np.stack([np.stack([one[name] for one in row]) for row in every]) for name in every[0][0]]
    ids = (
        [np.stack(x) for x in zip(*(_ids(length, length, b) for b in range(batch)), strict=True)] if segmented else []
    )
    run = functools.partial(_run, causal=True, block_sizes=BlockSizes(q=16, k=16))
    over_heads = jax.vmap(run, (0,) * 5 + (None,) * len(ids))
    got = jax.jit(jax.vmap(over_heads))(*stacked, *ids)
    for b in range(batch):
        for h in range(heads):
            want = _oracle(*every[b][h].values(), *(x[b] for x in ids), causal=True)
            _check([x[b, h] for x in got], want)


def test_under_shard_map():
    inputs = _inputs(40, 40, 2)
    run = functools.partial(_run, causal=True, block_sizes=BlockSizes(q=16, k=16))
    spec = PartitionSpec()
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 5, out_specs=(spec,) * 5, check_vma=False)
    _check(jax.jit(sharded)(*inputs.values()), _oracle(*inputs.values(), causal=True))


def _loss(q, k, v, causal=True, block_sizes=None):
    o, lse = attention(q, k, v, causal=causal, scale=SCALE, block_sizes=block_sizes)
    return jnp.sum(o) + jnp.sum(lse)


def _loop_conditions(jaxpr):
    """The shapes of the conditions of all while loops, nested ones too."""
    shapes = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            shapes.append(equation.params["cond_jaxpr"].out_avals[0].shape)
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                shapes += _loop_conditions(inner)
    return shapes


def test_remat_with_the_named_outputs_does_not_repeat_the_forward():
    q, k, v, *_ = _inputs(40, 40).values()
    loss = functools.partial(_loss, block_sizes=BlockSizes(q=8, k=8))
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names("flash_attention_out", "flash_attention_lse")
    plain, saved, repeated = (
        jax.value_and_grad(f, (0, 1, 2))
        for f in (
            loss,
            jax.checkpoint(loss, policy=named),
            jax.checkpoint(loss, policy=policies.nothing_saveable),
        )
    )

    def loops(f):
        # In the lowered text: some compilers find the repetition themselves.
        return jax.jit(f).lower(q, k, v).as_text().count("stablehlo.while")

    assert loops(saved) == loops(plain) < loops(repeated)
    for got, want in zip(saved(q, k, v)[1], plain(q, k, v)[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_memory_grows_with_the_length_not_its_square():
    def temp_bytes(length):
        q, k, v, *_ = _inputs(length, length, 2).values()
        grad = jax.grad(functools.partial(_loss, block_sizes=BlockSizes(q=64, k=64)), (0, 1, 2))
        return jax.jit(grad).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes

    short, long = temp_bytes(1024), temp_bytes(2048)
    assert 0 < short < long < 2.2 * short
    assert long < 2048 * 2048  # a quarter of one float32 score matrix of one head


def test_causal_blocks_are_skipped_forward():
    # NaN in hidden keys would reach every query that multiplies them, if only by 0.
    q, k, v, *_ = _inputs(128, 128).values()
    k[64:], v[64:] = np.nan, np.nan
    o, lse = attention(q, k, v, causal=True, scale=SCALE, block_sizes=BlockSizes(q=32, k=32))
    assert jnp.isfinite(o[:, :64]).all() and jnp.isfinite(lse[:, :64]).all()
    assert jnp.isnan(o[:, 64:]).all()


def test_causal_blocks_are_skipped_backward():
    # Queries below 64 do not see keys from 64 on: NaN in those queries must not reach these keys' gradients.
    inputs = _inputs(128, 128)
    inputs["q"][:, :64], inputs["do"][:, :64] = np.nan, np.nan
    *_, dk, dv = _run(*inputs.values(), causal=True, block_sizes=BlockSizes(q=32, k=32))
    assert jnp.isfinite(dk[64:]).all() and jnp.isfinite(dv[64:]).all()
    assert jnp.isnan(dk[:64]).all() and jnp.isnan(dv[:64]).all()


def test_vmap_keeps_the_loop_bounds_unbatched():
    # A loop with a batched condition runs as long as its longest element, and selects: nothing would be skipped.
    q, k, v, *_ = (np.stack([x, x]) for x in _inputs(64, 64).values())
    grad = jax.vmap(jax.grad(functools.partial(_loss, block_sizes=BlockSizes(q=16, k=16)), (0, 1, 2)))
    conditions = _loop_conditions(jax.make_jaxpr(grad)(q, k, v).jaxpr)
    assert len(conditions) >= 4 and set(conditions) == {()}


def test_vmap_keeps_the_loop_bounds_unbatched_at_traced_offsets():
    q, k, v, *_ = (np.stack([x, x]) for x in _inputs(64, 64).values())
    options = AttentionOptions(SCALE, left=40, right=0, block_sizes=BlockSizes(q=16, k=16))

    def loss(q, k, v, q_offset, k_offset):
        o, lse = differentiable.attention(xla, options, AttentionOperands(q, k, v, q_offset, k_offset))
        return jnp.sum(o) + jnp.sum(lse)

    def grad(q_offset, k_offset):
        return jax.vmap(jax.grad(loss, (0, 1, 2)), (0, 0, 0, None, None))(q, k, v, q_offset, k_offset)

    conditions = _loop_conditions(jax.make_jaxpr(grad)(np.int32(3), np.int32(7)).jaxpr)
    assert len(conditions) >= 4 and set(conditions) == {()}


def test_blocks_before_the_window_are_skipped():
    # Queries from 64 on see from key 48 on, and none of the blocks before.
    inputs = _inputs(128, 128)
    x = AttentionOperands(inputs["q"], inputs["k"], inputs["v"])
    x.k[:32], x.v[:32] = np.nan, np.nan
    options = AttentionOptions(SCALE, left=16, right=0, block_sizes=BlockSizes(q=32, k=32))
    o, lse = xla.forward(options, x)
    assert jnp.isfinite(o[:, 64:]).all() and jnp.isfinite(lse[:, 64:]).all() and jnp.isnan(o[:, :32]).all()
    dq, dk, dv, _ = xla.backward(options, x, lse, inputs["do"], inputs["dlse"])
    assert all(jnp.isfinite(g).all() for g in (dq[:, 64:], dk[64:], dv[64:]))


def test_integer_operands_have_no_gradient():
    x = AttentionOperands(*(_inputs(8, 8)[name] for name in "qkv"), np.int32(1), 0, mask=np.ones((1, 8, 8), bool))
    _, pullback = jax.vjp(lambda x: differentiable.attention(xla, AttentionOptions(SCALE), x), x)
    (grads,) = pullback((jnp.ones((1, 8, VALUE)), jnp.ones((1, 8))))
    assert grads.q.dtype == jnp.float32 and grads.q_offset.dtype == grads.mask.dtype == jax.dtypes.float0


def test_gradients_are_summed_over_the_group_inside():
    # No array of the gradient has a group axis and a key axis of full length.
    q, k, v, *_ = _inputs(64, 80, 5).values()
    grad = jax.grad(functools.partial(_loss, causal=False, block_sizes=BlockSizes(q=16, k=16)), (0, 1, 2))
    assert not re.search(r"f32\[5,80,", str(jax.make_jaxpr(grad)(q, k, v)))


def test_one_sided_segment_ids_are_refused():
    q, k, v, *_ = _inputs(4, 4).values()
    with pytest.raises(ValueError, match="q_segment_ids and k_segment_ids"):
        attention(q, k, v, jnp.zeros(4, jnp.int32), causal=False, scale=1.0)


def test_dropout_without_a_seed_is_refused():
    q, k, v, *_ = _inputs(4, 4).values()
    with pytest.raises(ValueError, match="seed"):
        xla.forward(AttentionOptions(1.0, dropout=0.1), AttentionOperands(q, k, v))


@given(length=st.integers(0, 5000), multiple=st.sampled_from([1, 8, 128]), factor=st.integers(1, 5))
def test_even_blocks(length, multiple, factor):
    largest = multiple * factor
    size = even_block(length, largest, multiple)
    assert size % multiple == 0 and 0 < size <= largest
    assert -(-length // size) <= -(-length // largest)


def test_block_sizes():
    assert default_block_sizes(4096, 4096, "cpu") == BlockSizes(q=256, k=256)
    assert default_block_sizes(1025, 1, "tpu") == BlockSizes(q=344, k=8)
    with pytest.raises(ValueError, match=r"block_sizes\.k"):
        BlockSizes(q=8, k=0)
