# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The law of composition: parts of a sequence, each by itself, give what the whole gives."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_kernels.linear import xla
from haliax_kernels.linear.contract import LinearState
from haliax_kernels.linear.state import compose, entering, gradient_summary, identity, summary
from linear.cases import FAST, Case, check, want


def _part(x, start, stop):
    per_token = x.log_decay is not None and x.log_decay.ndim > 0
    return x._replace(
        q=x.q[:, start:stop],
        k=x.k[start:stop],
        v=x.v[start:stop],
        log_decay=x.log_decay[start:stop] if per_token else x.log_decay,
        segment_ids=None if x.segment_ids is None else x.segment_ids[start:stop],
        state=None,
    )


def _in_parts(options, x, dy, dstate, borders):
    """Forward and backward as the docstring of `state` has them, the collectives written out."""
    slices = list(itertools.pairwise(borders))
    parts = [_part(x, *s) for s in slices]
    none = identity(options, x)
    found = [summary(options, p) for p in parts]
    before = [functools.reduce(compose, found[:i], none) for i in range(len(parts))]
    entered = [
        p._replace(state=entering(b, x.state, f.segments)) for p, b, f in zip(parts, before, found, strict=True)
    ]
    results = [xla.forward(options, p, residuals=True) for p in entered]
    dys = [dy[:, start:stop] for start, stop in slices]
    found = [gradient_summary(options, p, r[2], d) for p, r, d in zip(entered, results, dys, strict=True)]
    behind = [functools.reduce(compose, found[:i:-1], none) for i in range(len(parts))]
    grads = [
        xla.backward(options, p, r[2], d, entering(b, dstate, f.segments))
        for p, r, d, b, f in zip(entered, results, dys, behind, found, strict=True)
    ]
    got = {"y": jnp.concatenate([r[0] for r in results], 1), "s": results[-1][1].s, "ds": grads[0].state.s}
    got |= {"dq": jnp.concatenate([g.q for g in grads], 1)}
    got |= {f"d{n}": jnp.concatenate([getattr(g, n) for g in grads]) for n in ("k", "v")}
    if x.log_decay is not None:
        dlog = [g.log_decay for g in grads]
        got["dlog"] = sum(dlog) if x.log_decay.ndim == 0 else jnp.concatenate(dlog)
    if options.normalize:
        got |= {"z": results[-1][1].z, "dz": grads[0].state.z}
    return got


@pytest.mark.parametrize("segments", [0, 4])
@pytest.mark.parametrize("decay", [None, "head", "token", "channel"])
def test_parts_are_the_whole(decay, segments):
    case = Case(length=60, decay=decay, segments=segments, state=True, normalize=decay != "head")
    x, options = case.operands(), case.options
    dy, dstate = case.cotangents()
    compute = jax.jit(functools.partial(_in_parts, options, borders=(0, 7, 40, 60)), compiler_options=FAST)
    check(compute(x, dy, dstate), want(options, x, dy, dstate), 2e-5)


def test_a_segment_may_start_between_parts():
    case = Case(length=40, decay="token", state=True)
    x = case.operands()._replace(segment_ids=np.repeat(np.int32([5, 2]), 20))
    dy, dstate = case.cotangents()
    compute = jax.jit(functools.partial(_in_parts, case.options, borders=(0, 20, 40)), compiler_options=FAST)
    check(compute(x, dy, dstate), want(case.options, x, dy, dstate), 2e-5)


@pytest.mark.parametrize("segments", [0, 3])
def test_compose_is_associative_and_has_an_identity(segments):
    case = Case(length=60, decay="channel", segments=segments, normalize=True)
    x, options = case.operands(), case.options
    if x.segment_ids is not None:
        x = x._replace(segment_ids=x.segment_ids + 5)  # none of them is what the identity says
    a, b, c = (summary(options, _part(x, i, i + 20)) for i in (0, 20, 40))
    none = identity(options, x)
    whole = summary(options, x._replace(state=None))
    for other in (compose(compose(a, b), c), compose(a, compose(b, c)), compose(none, whole), compose(whole, none)):
        np.testing.assert_allclose(other.state.s, whole.state.s, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.exp(other.log_decay), np.exp(whole.log_decay), rtol=1e-5)
        assert (other.segments is None) == (segments == 0) and not (segments and other.segments.empty)
        if segments:
            assert other.segments == whole.segments


def test_a_first_state_of_another_segment_is_zero():
    options, x = Case().options, Case(segments=2).operands()
    state = LinearState(jnp.ones((8, 12)))
    first = summary(options, x)
    assert (entering(identity(options, x), state, first.segments).s == 1).all()
    assert (entering(first, state, first.segments._replace(first=first.segments.last + 7)).s == 0).all()
