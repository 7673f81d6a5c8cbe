# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The gated delta rule: the recurrence against finite differences, chunks and steps against the recurrence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.linear import pallas_tpu, xla
from haliax_kernels.linear.contract import LinearOptions
from haliax_kernels.linear.delta import unit_lower_inverse
from haliax_kernels.linear.reference import recurrence, recurrence_grad
from haliax_kernels.linear.state import summary
from haliax_kernels.linear.step import step
from linear.cases import Case, check, error, run, want

DECAYS = (None, "head", "token", "channel")


def _operands(case, beta=None):
    """Keys of length 1."""
    x = case.operands()
    k = np.asarray(x.k, np.float32)
    k = np.asarray(jnp.asarray(k / np.linalg.norm(k, axis=-1, keepdims=True), x.k.dtype))
    rng = np.random.default_rng(9)
    beta = rng.uniform(0, 1, case.length) if beta is None else np.full(case.length, beta)
    return x._replace(k=k, beta=np.float32(beta))


def _compare(case, x, tolerance=None):
    got, wanted = (f(case.options, x, *case.cotangents()) for f in (lambda *a: run("xla", *a), want))
    check(got, wanted, tolerance or {"float32": 2e-5, "bfloat16": 2e-2}[case.dtype])


def test_gradients_of_the_recurrence_are_finite_differences():
    case = Case(length=5, key=3, value=2, decay="channel", state=True, segments=2)
    x, (dy, dstate) = _operands(case), case.cotangents()
    arrays = {"q": x.q, "k": x.k, "v": x.v, "log_decay": x.log_decay, "s": x.state.s, "beta": x.beta}
    arrays = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    more = {"segment_ids": x.segment_ids, "scale": 0.7}

    def loss(**arrays):
        y, s, _ = recurrence(**arrays, **more)
        return (y * dy).sum() + (s * dstate.s).sum()

    others = {name: a for name, a in arrays.items() if name not in "qkv"}
    grads = recurrence_grad(*(arrays[n] for n in "qkv"), dy, dstate.s, np.zeros(3), **others, **more)._asdict()
    for name, a in arrays.items():
        for place in np.ndindex(a.shape):
            shift = np.zeros(a.shape)
            shift[place] = 1e-6
            both = [loss(**(arrays | {name: a + sign * shift})) for sign in (1, -1)]
            np.testing.assert_allclose(grads[name][place], (both[0] - both[1]) / 2e-6, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decay", DECAYS)
def test_values_and_gradients(decay, dtype):
    for case in (
        Case(length=75, decay=decay, state=True, segments=3, dtype=dtype),
        Case(length=1, decay=decay, dtype=dtype, group=1, chunk_size=None),
    ):
        _compare(case, _operands(case))


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_equal_keys(beta):
    """Of which the series of powers has terms of 1e18; beta 1 writes each value over the last one, 2 reflects."""
    case = Case(length=200, chunk_size=64, state=True)
    x = _operands(case, beta)
    x = x._replace(k=np.broadcast_to(x.k[:1], x.k.shape))
    # Reflections keep every rounding error that was made on the way.
    _compare(case, x, 2e-4 if beta == 2 else None)
    if beta == 1:
        y = run("xla", case.options, x, *case.cotangents())["y"]
        rest = np.eye(case.key) - np.outer(x.k[0], x.k[0])
        now = x.state.s.T @ rest
        written = case.scale * (x.q @ now.T + (x.q @ x.k[0])[..., None] * x.v)
        np.testing.assert_allclose(y, written, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_long_sequences():
    case = Case(length=16384, decay="token", strength=1e-3, group=1, key=8, value=4, chunk_size=None)
    _compare(case, _operands(case))


def test_the_inverse():
    m = jnp.asarray(np.tril(np.random.default_rng(0).normal(size=(2, 32, 32)), -1) / 4, jnp.float32)
    found = unit_lower_inverse(m, jnp.einsum)
    np.testing.assert_allclose(found @ (jnp.eye(32) + m), np.broadcast_to(np.eye(32), m.shape), atol=1e-5)


@pytest.mark.parametrize("decay", [None, "token", "channel"])
def test_steps_are_the_parallel_form(decay):
    case = Case(length=40, decay=decay, state=True)
    x, options = _operands(case), case.options
    y, last, _ = xla.forward(options, x)
    log = x.log_decay

    def body(state, token):
        q, k, v, beta, log = token
        return step(options, state, q, k, v, log, beta)[::-1]

    state, ys = jax.lax.scan(body, x.state, (x.q.swapaxes(0, 1), x.k, x.v, x.beta, log))
    assert error(ys.swapaxes(0, 1), y) < 2e-5 and error(state.s, last.s) < 2e-5


def test_refusals():
    case = Case()
    x = _operands(case)
    with pytest.raises(UnsupportedOptionError, match="normalize"):
        xla.forward(dataclasses.replace(case.options, normalize=True), x)
    with pytest.raises(UnsupportedOptionError, match="beta"):
        pallas_tpu.forward(LinearOptions(), x)
    with pytest.raises(UnsupportedOptionError, match="beta"):
        summary(case.options, x)
