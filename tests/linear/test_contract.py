# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The contract: every implementation, with every option, against the float64 recurrence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haliax_kernels.linear.contract import LinearOperands, LinearOptions, LinearState
from haliax_kernels.linear.differentiable import linear_attention
from linear.cases import IMPLEMENTATIONS, Case, check, compare, error, run, want

every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
# Interpret mode takes seconds for what the options' tests have not already shown.
interpreted_is_slow = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "xla" else [pytest.mark.slow]) for n in IMPLEMENTATIONS]
)
DECAYS = (None, "head", "token", "channel")

OPTIONS = {
    "none": {},
    "head": {"decay": "head"},
    "token": {"decay": "token"},
    "channel": {"decay": "channel"},
    "normalize": {"normalize": True},
    "segments": {"segments": 4},
    "state": {"state": True},
    "scale": {"scale": 3.0},
    "group of 1": {"group": 1},
    "group of 5": {"group": 5},
    "whole chunks": {"length": 48},
    "default chunk": {"chunk_size": None, "length": 150},
    "token, normalize, state": {"decay": "token", "normalize": True, "state": True},
    "all": {"decay": "channel", "normalize": True, "segments": 3, "state": True, "group": 3},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("option", OPTIONS)
@every_implementation
def test_options(name, option, dtype):
    case = Case(dtype=dtype, **OPTIONS[option])
    got = compare(name, case)
    assert {got[n].dtype for n in ("y", "dq", "dk", "dv")} == {jnp.dtype(dtype)}
    assert {a.dtype for n, a in got.items() if n not in ("y", "dq", "dk", "dv")} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
@every_implementation
@settings(deadline=None, max_examples=40)
@given(
    case=st.builds(
        Case,
        length=st.sampled_from([1, 2, 15, 16, 33]),
        group=st.sampled_from([1, 3]),
        decay=st.sampled_from(DECAYS),
        strength=st.sampled_from([1e-3, 0.5, 20.0]),
        normalize=st.booleans(),
        segments=st.sampled_from([0, 1, 3]),
        state=st.booleans(),
        chunk_size=st.sampled_from([16, 32]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        seed=st.integers(0, 3),
    )
)
def test_combinations(name, case):
    compare(name, case)


@every_implementation
@pytest.mark.parametrize("seed", [1, 15, 22])
def test_queries_of_means(name, seed):
    """What a normalised result gives to its query all but cancels, and must not be left of rounding."""
    case = Case(length=15, group=3, normalize=True, segments=3, dtype="bfloat16", seed=seed)
    compare(name, case, tolerance=0.012)


# --- hard inputs -----------------------------------------------------------------------------------------------------


def _logs(kind, *shape):
    rng = np.random.default_rng(3)
    if kind == "decay 1":
        return np.zeros(shape, np.float32)
    if kind == "decay 0":
        return np.full(shape, -np.inf, np.float32)
    if kind == "some decay 0":
        return np.where(rng.random(shape) < 0.3, -np.inf, -0.1 * rng.exponential(size=shape)).astype(np.float32)
    if kind == "-80":
        return np.full(shape, -80, np.float32)
    # Weak decay behind strong decay: differences of cumulative sums would lose it.
    assert kind == "-80 and weak"
    return np.where(rng.random(shape) < 0.5, -80, -0.01 * rng.exponential(size=shape)).astype(np.float32)


@pytest.mark.parametrize("kind", ["decay 1", "decay 0", "some decay 0", "-80", "-80 and weak"])
@pytest.mark.parametrize("decay", ["head", "token", "channel"])
@interpreted_is_slow
def test_hard_decays(name, decay, kind):
    """Gradients by logs of -80 are 1e-35 of the others', and held to the same relative error."""
    case = Case(length=150, decay=decay, chunk_size=64, state=True)
    x = case.operands()
    x = x._replace(log_decay=_logs(kind, *x.log_decay.shape))
    if decay == "head" and "some" in kind:
        x = x._replace(log_decay=np.float32(-np.inf))
    # Float32 has no normal numbers below 1.2e-38; XLA takes them for 0.
    compare(name, case, x)


@pytest.mark.parametrize("decay", DECAYS)
@interpreted_is_slow
def test_equal_keys(name, decay):
    """Normalised, the results are means whatever the queries are, whose gradients are 0."""
    case = Case(length=100, decay=decay)
    x = case.operands()
    compare(name, case, x._replace(k=np.broadcast_to(x.k[:1], x.k.shape)))
    case = dataclasses.replace(case, normalize=True)
    x = case.operands()
    x = x._replace(k=np.broadcast_to(x.k[:1], x.k.shape))
    got = compare(name, case, x)
    if decay != "channel":
        assert np.abs(got["dq"]).max() < 1e-6


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 3])
@interpreted_is_slow
def test_less_than_a_chunk(name, length, decay):
    compare(name, Case(length=length, decay=decay, normalize=True, state=True, chunk_size=None))


@pytest.mark.parametrize("decay", DECAYS)
@interpreted_is_slow
def test_segments_of_one_token(name, decay):
    case = Case(length=40, decay=decay, normalize=True, state=True)
    x = case.operands()
    got = compare(name, case, x._replace(segment_ids=np.arange(40, dtype=np.int32)))
    # A token that sees itself alone has its own value, scaled.
    np.testing.assert_allclose(got["y"][:, 1:], case.scale * np.broadcast_to(x.v, got["y"].shape)[:, 1:], rtol=1e-5)


@interpreted_is_slow
def test_strong_decay_of_a_whole_chunk(name):
    """64 tokens of log decay -20, then none, as in flash-linear-attention's issue 77."""
    for dtype in ("float32", "bfloat16"):
        for decay in ("token", "channel"):
            case = Case(length=256, decay=decay, chunk_size=64, dtype=dtype, key=16, value=16)
            x = case.operands()
            log = np.zeros_like(x.log_decay)
            log[64:128] = -20
            compare(name, case, x._replace(log_decay=log))


@interpreted_is_slow
def test_small_normaliser(name):
    """Sums of 1e-7 that are all there is, and sums of exactly 0 with a gradient."""
    case = Case(length=40, normalize=True)
    x = case.operands()
    compare(name, case, x._replace(q=x.q * np.float32(3e-4), k=x.k * np.float32(3e-4)))
    k = x.k.copy()
    k[:20] = 0
    got = compare(name, case, x._replace(k=k))
    assert (got["y"][:, :20] == 0).all()
    got = run(name, case.options, x._replace(k=0 * k), *case.cotangents())
    assert all(np.isfinite(a).all() for a in got.values())


@interpreted_is_slow
def test_normaliser_of_either_sign(name):
    """Quotients of a few hundred; the error may grow as they do."""
    case = Case(length=300, epsilon=1e-3, scale=1.0)
    x, options = case.operands(), dataclasses.replace(case.options, normalize=True)
    dy, dstate = case.cotangents()
    dstate = dstate._replace(z=np.zeros(case.key, np.float32))
    got, wanted = run(name, options, x, dy, dstate), want(options, x, dy, dstate)
    check(got, wanted, 5e-3)
    with_sign = options
    flipped = run(name, with_sign, x._replace(q=-x.q), dy, dstate)
    assert error(flipped["y"], wanted["y"]) < 5e-3


@every_implementation
def test_vmap_of_a_shared_operand(name):
    """Two heads with their own decays and the batch's segments."""
    case = Case(decay="token", segments=3, normalize=True, state=True)
    xs = [dataclasses.replace(case, seed=seed).operands()._replace(segment_ids=case.operands().segment_ids)
          for seed in (0, 1)]  # fmt: skip
    both = jax.tree.map(lambda *a: np.stack(a), *(x._replace(segment_ids=None) for x in xs))
    both = both._replace(segment_ids=xs[0].segment_ids)
    dy, dstate = case.cotangents()

    def one(x):
        outputs, pullback = jax.vjp(lambda x: linear_attention(IMPLEMENTATIONS[name], case.options, x), x)
        return outputs, pullback((jnp.asarray(dy), jax.tree.map(jnp.asarray, dstate)))[0]

    axes = LinearOperands(0, 0, 0, 0, None, LinearState(0, 0))
    (y, last), grads = jax.jit(jax.vmap(one, (axes,)))(both)
    for h, x in enumerate(xs):
        wanted = want(case.options, x, dy, dstate)
        assert error(y[h], wanted["y"]) < 2e-5
        assert error(last.s[h], wanted["s"]) < 2e-5
        assert error(grads.k[h], wanted["dk"]) < 2e-5
        assert error(grads.log_decay[h], wanted["dlog"]) < 2e-5


@interpreted_is_slow
def test_decay_without_a_gradient(name):
    case = Case(decay="token")
    options = dataclasses.replace(case.options, decay_gradient=False)
    got = run(name, options, case.operands(), *case.cotangents())
    assert not got.pop("dlog").any()
    wanted = want(options, case.operands(), *case.cotangents())
    wanted.pop("dlog")
    check(got, wanted, 2e-5)


@every_implementation
def test_out_dtype(name):
    x = Case(dtype="bfloat16").operands()
    y, last, _ = jax.eval_shape(lambda x: IMPLEMENTATIONS[name].forward(LinearOptions(out_dtype=jnp.float32), x), x)
    assert y.dtype == jnp.float32 and last.z is None


@pytest.mark.parametrize("options", [{"chunk_size": 48}, {"chunk_size": 512}, {"epsilon": 0.0}])
def test_refused_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LinearOptions(**options)


@every_implementation
def test_a_state_without_its_normaliser_is_refused(name):
    x = Case(state=True).operands()
    with pytest.raises(ValueError, match=r"state\.z"):
        IMPLEMENTATIONS[name].forward(LinearOptions(normalize=True), x)
