# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Token by token against the parallel form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_kernels.linear import xla
from haliax_kernels.linear.contract import LinearOptions, LinearState
from haliax_kernels.linear.step import step
from linear.cases import Case, error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", [None, "head", "token", "channel"])
def test_steps_are_the_parallel_form(decay, normalize, dtype):
    """From a prefix' state on, all tokens of a scan of steps."""
    case = Case(length=70, decay=decay, normalize=normalize, state=True, dtype=dtype)
    x, options, prefix = case.operands(), case.options, 30
    y, last, _ = xla.forward(options, x)
    log = x.log_decay

    def parts(start, stop):
        here = log[start:stop] if log is not None and log.ndim else log
        return x.q[:, start:stop], x.k[start:stop], x.v[start:stop], here

    first = xla.forward(options, x._replace(**dict(zip(("q", "k", "v", "log_decay"), parts(0, prefix), strict=True))))
    q, k, v, log = parts(prefix, case.length)
    log = jnp.broadcast_to(log, 40) if decay == "head" else log
    body = jax.jit(lambda state, token: step(options, state, *token)[::-1])
    state, ys = jax.lax.scan(body, first[1], (q.swapaxes(0, 1), k, v, log))
    assert ys.dtype == dtype
    tolerance = 2e-5 if dtype == "float32" else 1e-2
    assert error(ys.swapaxes(0, 1), y[:, prefix:]) < tolerance
    assert error(state.s, last.s) < 2e-5
    assert not normalize or error(state.z, last.z) < 2e-5


def test_a_normaliser_is_needed():
    with pytest.raises(ValueError, match=r"state\.z"):
        step(LinearOptions(normalize=True), LinearState(jnp.zeros((2, 2))), jnp.ones((1, 2)), np.ones(2), np.ones(2))
