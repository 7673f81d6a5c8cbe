# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Precision with length, beside a carry that is not float32, and that goes backward by subtraction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from linear.cases import IMPLEMENTATIONS, Case, error, run, want

LENGTHS = (512, 4096, 32768)


def subtracting(q, k, v, dy, chunk=128):
    """(y, dq): chunks with a carry in the inputs' dtype, which the backward takes down again by what each chunk added.

    What the kernel that this package began with did, in its unnormalised form.
    """
    mask = np.tri(chunk, dtype=bool)
    chunks = tuple(a.reshape(-1, chunk, a.shape[-1]) for a in (q, k, v, dy))

    def forward(state, x):
        q, k, v, _ = x
        y = jnp.where(mask, q @ k.T, 0) @ v + q @ state
        return (state + k.T @ v).astype(q.dtype), y

    def backward(state, x):
        _, k, v, dy = x
        state = (state - k.T @ v).astype(k.dtype)
        return state, jnp.where(mask, dy @ v.T, 0) @ k + dy @ state.T

    state, y = lax.scan(forward, jnp.zeros((k.shape[1], v.shape[1]), q.dtype), chunks)
    _, dq = lax.scan(backward, state, chunks, reverse=True)
    return y.reshape(v.shape), dq.reshape(q.shape)


def first_chunk(a):
    """Where going backward ends: errors of later chunks have piled up there, and the numbers are small."""
    return np.asarray(a, np.float64).reshape(-1, a.shape[-1])[:128]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_subtracting_carry_loses_what_ours_keeps(dtype):
    ours, theirs = [], []
    for length in LENGTHS:
        case = Case(length=length, group=1, value=8, dtype=dtype, normalize=False, chunk_size=None)
        x = case.operands()
        x = x._replace(k=np.abs(x.k), v=np.abs(x.v))  # sums that grow
        dy, dstate = case.cotangents()
        dy, dstate = np.abs(dy), jax.tree.map(np.zeros_like, dstate)
        wanted = first_chunk(want(case.options, x, dy, dstate)["dq"])
        ours.append(error(first_chunk(run("xla", case.options, x, dy, dstate)["dq"]), wanted))
        got = jax.jit(subtracting)(x.q[0], x.k, x.v, case.scale * dy[0])
        theirs.append(error(first_chunk(got[1]), wanted))
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    print(dtype, "ours", ours, "subtracting", theirs)
    assert max(ours) < tolerance / 2
    assert max(ours) <= 2 * ours[0]
    assert theirs[-1] > 5 * theirs[0] and theirs[-1] > 10 * ours[-1]
    assert dtype == "float32" or theirs[-1] > 5 * tolerance


@pytest.mark.slow
@pytest.mark.parametrize("decay", [None, "head", "token", "channel"])
@pytest.mark.parametrize("normalize", [False, True])
def test_long_sequences(decay, normalize):
    """Of 65,536 tokens; the error is that of 4,096, or hardly more."""
    errors = {}
    for length in (4096, 65536):
        case = Case(length=length, group=1, key=4, value=4, decay=decay, strength=1e-4, normalize=normalize,
                    state=True, chunk_size=None)  # fmt: skip
        x, cotangents = case.operands(), case.cotangents()
        got, wanted = run("xla", case.options, x, *cotangents), want(case.options, x, *cotangents)
        errors[length] = {name: error(got[name], wanted[name]) for name in wanted}
    print(decay, normalize, errors)
    assert max(errors[65536].values()) < 2e-5
    for name, found in errors[65536].items():
        assert found < max(3 * errors[4096][name], 2e-6), name


@pytest.mark.slow
def test_the_state_of_16_bit_inputs_is_float32():
    """flash-linear-attention's issue 1187: the gradients of the state hundreds of times off."""
    case = Case(length=1024, decay="token", strength=0.01, state=True, chunk_size=64, dtype="bfloat16", key=16)
    x, cotangents = case.operands(), case.cotangents()
    for name in IMPLEMENTATIONS:
        got, wanted = run(name, case.options, x, *cotangents), want(case.options, x, *cotangents)
        for n in ("s", "ds", "dq", "dk", "dv"):
            difference = np.asarray(got[n], np.float64) - wanted[n]
            assert np.sqrt((difference**2).mean() / (wanted[n] ** 2).mean()) < 1e-2, n
