# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What only the XLA form promises: memory linear in the length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_kernels.linear import xla
from haliax_kernels.linear.contract import LinearOperands, LinearOptions, LinearState
from haliax_kernels.linear.differentiable import linear_attention

DECAYS = {None: None, "token": (), "channel": (64,)}


def _inputs(heads, length, decay):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(heads, length, 64)) / 8, jnp.float32) for _ in range(4)]
    shape = DECAYS[decay]
    log = None if shape is None else jnp.asarray(-rng.exponential(size=(heads, length, *shape)), jnp.float32)
    return *arrays, log


def _ours(q, k, v, dy, log):
    def attend(q, k, v, log):
        return linear_attention(xla, LinearOptions(), LinearOperands(q[None], k, v, log))[0][0]

    y, pullback = jax.vjp(jax.vmap(attend, (0, 0, 0, None if log is None else 0)), q, k, v, log)
    return y, pullback(dy)


@pytest.mark.parametrize("decay", DECAYS)
def test_memory_is_linear_in_the_length(decay):
    """Twice the tokens take twice the memory, and less than 4 times the operands'."""
    used = []
    for length in (8192, 16384):
        shapes = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in _inputs(1, length, decay)]
        memory = jax.jit(_ours).lower(*shapes).compile().memory_analysis()
        used.append(memory.temp_size_in_bytes / memory.argument_size_in_bytes)
    assert used[1] < 1.05 * used[0] and used[0] < 4


def test_queries_cost_the_final_state_nothing():
    options, (q, k, v, _, _) = LinearOptions(), _inputs(1, 256, None)
    x = LinearOperands(q, k[0], v[0])
    compiled = jax.jit(functools.partial(xla.final_state, options)).lower(x).compile()
    np.testing.assert_allclose(compiled(x).s, xla.forward(options, x)[1].s, rtol=1e-6)
    whole = jax.jit(lambda x: xla.forward(options, x)[1:]).lower(x).compile()
    assert compiled.cost_analysis()["flops"] <= whole.cost_analysis()["flops"]


def test_lengths_of_0():
    state = LinearState(jnp.ones((16, 8)))
    x = LinearOperands(jnp.ones((2, 0, 16)), jnp.ones((0, 16)), jnp.ones((0, 8)), state=state)
    y, last, residuals = xla.forward(LinearOptions(), x, residuals=True)
    assert y.shape == (2, 0, 8) and (last.s == 1).all()
    gradients = xla.backward(LinearOptions(), x, residuals, y, state)
    assert gradients.k.shape == (0, 16) and (gradients.state.s == 1).all()
