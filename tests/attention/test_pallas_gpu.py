# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The GPU attention kernels: numbers in Pallas' interpreter against float64, and lowering for CUDA.

`test_contract.py` has each option; here are their edges and what is particular to these kernels. The number of
positions is small and no multiple of the blocks, which are the smallest there are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_kernels.attention import dropout
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.pallas_gpu import PallasGpu, backward, forward
from haliax_kernels.attention.reference import dense_attention, dense_attention_grad
from haliax_kernels.errors import ArgumentError, UnsupportedOptionError
from support import cuda_text

INTERPRETED = PallasGpu(interpret=True)
BLOCKS = BlockSizes(q=16, k=16)
TRITON = "__gpu$xla.gpu.triton"


def oracle(options, x, do, dlse):
    """(o, lse, dq, dk, dv, dbias) in float64; what is hidden is zero, where the kernels may get NaN."""
    dense = {"scale": options.scale, "left": options.left, "right": options.right, "soft_cap": options.soft_cap}
    dense |= {"q_offset": int(x.q_offset), "k_offset": int(x.k_offset)}
    for name in ("q_segment_ids", "k_segment_ids", "mask", "bias"):
        array = getattr(x, name)
        dense[name] = None if array is None else np.asarray(array, np.float64 if name == "bias" else None)
    if options.dropout:
        i, j = (int(o) + np.arange(n) for o, n in ((x.q_offset, x.q.shape[1]), (x.k_offset, x.k.shape[0])))
        kept = dropout.keep(x.seed[:, None, None], i[None, :, None], j[None, None, :], options.dropout)
        dense |= {"dropout": options.dropout, "keep": np.asarray(kept)}
    q, k, v, do, dlse = (np.asarray(a, np.float64) for a in (x.q, x.k, x.v, do, dlse))
    flat = dense | {"dropout": 0.0, "keep": None, "bias": None, "soft_cap": None}
    seen = dense_attention(np.zeros_like(q), np.zeros_like(k), np.eye(len(k)), **flat)[0] > 0
    rows, columns = seen.any(-1), seen.any((0, 1))
    q, do, dlse = np.where(rows[..., None], q, 0), np.where(rows[..., None], do, 0), np.where(rows, dlse, 0)
    k, v = np.where(columns[:, None], k, 0), np.where(columns[:, None], v, 0)
    return *dense_attention(q, k, v, **dense), *dense_attention_grad(q, k, v, do, dlse, **dense)[:4]


def operands(group=2, q_len=40, k_len=56, key=16, value=16, dtype=jnp.float32, **others):
    rng = np.random.default_rng(0)
    shapes = ((group, q_len, key), (k_len, key), (k_len, value))
    return AttentionOperands(*(jnp.asarray(rng.normal(size=s), dtype) for s in shapes), **others)


def cotangents(x, seed=1):
    rng = np.random.default_rng(seed)
    shape = (*x.q.shape[:2], x.v.shape[1])
    return jnp.asarray(rng.normal(size=shape), x.q.dtype), jnp.asarray(rng.normal(size=shape[:2]), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 2))
def both(options, x, static_offsets, do, dlse):
    """(o, lse, dq, dk, dv, dbias) of the kernels."""
    if static_offsets is not None:
        x = x._replace(q_offset=static_offsets[0], k_offset=static_offsets[1])
    o, lse = INTERPRETED.forward(options, x)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1) - dlse
    return o, lse, *INTERPRETED.backward(options, x, lse, do, delta)


def check(options, x, *, traced=False, tolerance=2e-5, do=None):
    options = dataclasses.replace(options, block_sizes=BLOCKS)
    given, dlse = cotangents(x)
    do = given if do is None else do
    ours = both(options, x, None if traced else (x.q_offset, x.k_offset), do, dlse)
    theirs = oracle(options, x, do, dlse)
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv", "dbias"), ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if b is None:
            continue
        a, finite = np.asarray(a, np.float64), np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=name)
        scale = max(np.abs(b[finite]).max(initial=0), 1e-30)
        np.testing.assert_allclose(a[finite] / scale, b[finite] / scale, rtol=0, atol=tolerance, err_msg=name)
    return ours


def ids(*lengths, values=None):
    return jnp.asarray(np.repeat(np.arange(len(lengths)) if values is None else values, lengths), jnp.int32)


def random(shape, seed=3):
    return np.random.default_rng(seed).normal(size=shape)


MASK = np.array(random((1, 40, 56)) > 0.5)
MASK[0, 5] = MASK[0, :, 7] = False
BIAS = random((2, 40, 56), 4)
BIAS[0, 3] = BIAS[1, :, 20] = -np.inf
SEEDS = jnp.asarray([7, 4000000000], jnp.uint32)
SEGMENTS = {"q_segment_ids": ids(5, 20, 15), "k_segment_ids": ids(5, 30, 21, values=(0, 1, 3))}
CASES = {
    "nothing to see for some": (AttentionOptions(scale=0.3, left=9), {"q_offset": 70}),
    "beyond int32": (AttentionOptions(scale=0.3, left=-2, right=2**31 + 5), {}),
    "bias of -inf": (AttentionOptions(scale=0.3), {"bias": jnp.asarray(BIAS, jnp.float32)}),
    "bfloat16 bias": (AttentionOptions(scale=0.3, right=0), {"bias": jnp.asarray(random((1, 40, 56)), jnp.bfloat16)}),
    "all": (
        AttentionOptions(scale=0.3, left=30, right=8, soft_cap=2.0, dropout=0.2),
        {**SEGMENTS, "mask": jnp.asarray(MASK), "bias": jnp.asarray(BIAS, jnp.float32), "seed": SEEDS, "q_offset": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    options, others = CASES[case]
    check(options, operands(**others))


def test_sizes_that_fill_no_block():
    check(AttentionOptions(scale=0.3, right=0), operands(1, 19, 5, key=20, value=7))


def test_traced_offsets():
    # One program for all: what is hidden is known at run time only.
    for q_offset, k_offset in ((0, 0), (40, 0), (0, 50), (2**31 - 100, 2**31 - 110)):
        offsets = {"q_offset": jnp.int32(q_offset), "k_offset": jnp.int32(k_offset)}
        check(AttentionOptions(scale=0.3, left=25, right=0), operands(**offsets), traced=True)


def test_what_is_hidden_may_be_nan():
    x = operands(q_offset=0)
    nan = jnp.nan
    # Causal: no query sees keys from 40 on.
    check(AttentionOptions(scale=0.3, right=0), x._replace(k=x.k.at[40:].set(nan), v=x.v.at[40:].set(jnp.inf)))
    # Segment 2 of the queries sees nothing, segment 3 of the keys is seen by nothing; nor what the mask hides.
    x = operands(**SEGMENTS, mask=jnp.asarray(MASK))
    q = x.q.at[:, 25:].set(nan).at[:, 5].set(jnp.inf)
    k, v = (a.at[35:].set(nan).at[7].set(nan) for a in (x.k, x.v))
    do = cotangents(x)[0].at[:, 25:].set(nan)
    ours = check(AttentionOptions(scale=0.3), x._replace(q=q, k=k, v=v), do=do)
    assert not np.asarray(ours[2])[:, 25:].any() and not np.asarray(ours[3])[35:].any()


def test_rows_that_see_nothing_by_the_window_or_by_a_bias():
    options = AttentionOptions(scale=0.3, right=0)
    x = operands(k_offset=10, bias=jnp.asarray(BIAS, jnp.float32))
    do = cotangents(x)[0].at[:, :10].set(jnp.nan)
    o, lse, dq, *_ = check(options, x, do=do)
    assert (np.asarray(lse)[:, :10] == -np.inf).all() and not np.asarray(o)[:, :10].any()
    assert not np.asarray(dq)[:, :10].any()
    do = cotangents(x)[0].at[0, 3].set(jnp.nan)  # its bias is -inf everywhere
    _, _, dq, dk, dv, _ = both(dataclasses.replace(options, block_sizes=BLOCKS), x, (0, 10), do, cotangents(x)[1])
    assert not np.asarray(dq)[0, 3].any() and np.isfinite(dk).all() and np.isfinite(dv).all()


@pytest.mark.parametrize("least", [-1e9, -1e30, float(np.finfo(np.float32).min)])
def test_a_bias_that_serves_as_mask(least):
    """Also where it is all that a query sees, whose keys are then alike."""
    bias = np.where(MASK, 0, least).astype(np.float32)
    x = operands(bias=jnp.asarray(bias))
    x = x._replace(q=x.q.at[:, 5].set(0))  # no logits that float64 would add to the bias and float32 could not
    o, lse, dq, *_ = both(AttentionOptions(scale=0.3, block_sizes=BLOCKS), x, (0, 0), *cotangents(x))
    want = oracle(AttentionOptions(scale=0.3), x, *cotangents(x))
    alive = MASK[0].any(-1)
    np.testing.assert_allclose(o, want[0], atol=2e-5)
    np.testing.assert_allclose(lse, want[1], atol=2e-5, rtol=1e-6)
    np.testing.assert_allclose(dq[:, alive], want[2][:, alive], atol=5e-5)
    assert np.isfinite(dq).all()


def test_float16():
    check(AttentionOptions(scale=0.3, right=0), operands(dtype=jnp.float16), tolerance=2e-3)


def test_empty():
    options = AttentionOptions(scale=0.3)
    x = operands(k_len=0)
    o, lse, dq, *_ = both(options, x, (0, 0), *cotangents(x))
    assert not o.any() and (lse == -jnp.inf).all() and dq.shape == x.q.shape and not dq.any()
    x = operands(q_len=0)
    o, _, _, dk, *_ = both(options, x, (0, 0), *cotangents(x))
    assert o.shape == (2, 0, 16) and dk.shape == x.k.shape and not dk.any()


def test_vmap():
    # As the package does it: over batch and heads, with some operands shared.
    x = operands(1, 16, 16)
    options = AttentionOptions(scale=0.3, right=0, block_sizes=BLOCKS)
    q = jnp.stack([x.q, 2 * x.q])
    k = jnp.stack([x.k, x.k + 1])
    offsets = jnp.asarray([0, 7])

    def run(q, k, offset):
        return INTERPRETED.forward(options, x._replace(q=q, k=k, q_offset=offset))

    o, lse = jax.jit(jax.vmap(jax.vmap(run, (0, None, 0)), (None, 0, None)))(q, k, offsets)
    for a in range(2):
        for b in range(2):
            y = x._replace(q=q[b], k=k[a], q_offset=int(offsets[b]))
            expected = oracle(options, y, *cotangents(y))
            np.testing.assert_allclose(o[a, b], expected[0], atol=2e-5)
            np.testing.assert_allclose(lse[a, b], expected[1], atol=2e-5)


REFUSED = {
    "q is int8": (AttentionOptions(scale=1.0), operands(dtype=jnp.int8)),
    "v is bfloat16": (AttentionOptions(scale=1.0), operands()._replace(v=jnp.zeros((56, 16), jnp.bfloat16))),
    "head size of q and k is 300": (AttentionOptions(scale=1.0), operands(key=300)),
    "head size of v is 257": (AttentionOptions(scale=1.0), operands(value=257)),
    "block_sizes": (AttentionOptions(scale=1.0, block_sizes=BlockSizes(q=48, k=16)), operands()),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_refusals_name_the_argument(argument):
    options, x = REFUSED[argument]
    with pytest.raises(UnsupportedOptionError, match=argument):
        forward(options, x)
    with pytest.raises(UnsupportedOptionError, match=argument):
        backward(options, x, jnp.zeros((2, 40)), jnp.zeros((2, 40, 16)), jnp.zeros((2, 40)))


def test_a_mask_whose_addresses_overflow_is_refused():
    """Its size is known only with the dimensions that `jax.vmap` adds."""

    def run(length):
        def one(q, mask):
            return forward(AttentionOptions(scale=1.0), AttentionOperands(q[None], q, q, mask=mask))

        q = jax.ShapeDtypeStruct((3, 11, length, 16), jnp.float32)
        mask = jax.ShapeDtypeStruct((3, 11, 1, length, length), bool)
        return jax.eval_shape(jax.vmap(jax.vmap(one)), q, mask)

    run(8000)
    with pytest.raises(UnsupportedOptionError, match="mask has 2214592512 elements"):
        run(8192)


def test_missing_arguments_are_named():
    with pytest.raises(ArgumentError, match="seed"):
        forward(AttentionOptions(scale=1.0, dropout=0.1), operands())
    with pytest.raises(ArgumentError, match="k_segment_ids"):
        forward(AttentionOptions(scale=1.0), operands(q_segment_ids=ids(40)))


def lowered(options, head_size, dtype, length=1000, batch=2, kv_heads=2, group=4, **others):
    """The program for an H200, forward and backward, on a machine without one: as text."""

    def run(q, k, v, do, others):
        x = AttentionOperands(q, k, v, **others)
        o, lse = forward(options, x)
        return o, backward(options, x, lse, do, jnp.sum(do * o, -1).astype(jnp.float32))

    q, k = ((batch, kv_heads, *s, length, head_size) for s in ((group,), ()))
    q, k = (jax.ShapeDtypeStruct(s, dtype) for s in (q, k))
    axes = (0, 0, 0, 0, None)
    return cuda_text(jax.vmap(jax.vmap(run, axes), axes), q, k, k, q, others)


# name: (options, shapes and dtypes of the operands)
IDS = dict.fromkeys(("q_segment_ids", "k_segment_ids"), ((1000,), jnp.int32))
OFFSETS = dict.fromkeys(("q_offset", "k_offset"), ((), jnp.int32))
LOWERED = {
    "none": ({}, {}),
    "causal": ({"right": 0}, {}),
    "window, traced offsets": ({"left": 100, "right": 0}, OFFSETS),
    "segments": ({"right": 0}, IDS),
    "mask": ({}, {"mask": ((4, 1000, 1000), jnp.bool_)}),
    "shared bias": ({}, {"bias": ((1, 1000, 1000), jnp.float32)}),
    "soft cap": ({"soft_cap": 5.0}, {}),
    "dropout": ({"dropout": 0.1}, {"seed": ((4,), jnp.uint32)}),
    "all": (
        {"left": 100, "right": 0, "soft_cap": 5.0, "dropout": 0.1},
        {
            **OFFSETS,
            **IDS,
            "mask": ((1, 1000, 1000), jnp.bool_),
            "bias": ((4, 1000, 1000), jnp.bfloat16),
            "seed": ((4,), jnp.uint32),
        },
    ),
}


def check_lowers(case, head_size, dtype):
    static, shapes = LOWERED[case]
    others = {name: jax.ShapeDtypeStruct(*s) for name, s in shapes.items()}
    options = AttentionOptions(scale=0.1, **static)
    assert lowered(options, head_size, dtype, **others).count(TRITON) == (4 if "bias" in others else 3)


@pytest.mark.parametrize("head_size", [80, 128])
@pytest.mark.parametrize("case", ["causal", "all"])
def test_lowers_for_cuda(case, head_size):
    check_lowers(case, head_size, jnp.bfloat16)


def test_lowers_for_cuda_without_padding():
    assert lowered(AttentionOptions(scale=0.1), 64, jnp.bfloat16, length=1024).count(TRITON) == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("case", LOWERED)
def test_lowers_for_cuda_always(case, head_size, dtype):
    check_lowers(case, head_size, dtype)
