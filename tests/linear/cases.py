# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls of linear attention for the tests: operands, and both sides of a comparison with the float64 recurrence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from haliax_kernels.linear import pallas_gpu, pallas_tpu, xla
from haliax_kernels.linear.contract import LinearOperands, LinearOptions, LinearState
from haliax_kernels.linear.differentiable import linear_attention
from haliax_kernels.linear.reference import recurrence, recurrence_grad


class InterpretedTpu:
    """The TPU kernels in Pallas' TPU interpret mode."""

    @staticmethod
    def forward(*args, **kwargs):
        with pltpu.force_tpu_interpret_mode():
            return pallas_tpu.forward(*args, **kwargs, interpret=True)

    @staticmethod
    def backward(*args):
        with pltpu.force_tpu_interpret_mode():
            return pallas_tpu.backward(*args, interpret=True)


class InterpretedGpu:
    """The GPU kernels in Pallas' interpreter."""

    forward = staticmethod(functools.partial(pallas_gpu.forward, interpret=True))
    backward = staticmethod(functools.partial(pallas_gpu.backward, interpret=True))


IMPLEMENTATIONS = {"xla": xla, "pallas_tpu": InterpretedTpu, "pallas_gpu": InterpretedGpu}

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call; `decay` is None, head, token or channel, `state` whether there is a first one."""

    length: int = 45
    group: int = 2
    key: int = 8
    value: int = 12
    decay: str | None = None
    strength: float = 0.3
    normalize: bool = False
    segments: int = 0
    state: bool = False
    scale: float = 0.5
    chunk_size: int | None = 16
    epsilon: float = 1e-12
    dtype: str = "float32"
    seed: int = 0

    @property
    def options(self):
        return LinearOptions(self.scale, self.normalize, self.epsilon, self.chunk_size)

    def operands(self):
        """In NumPy, rounded to the dtype."""
        rng = np.random.default_rng(self.seed)
        sign = 0 if self.normalize else 1  # features of either sign have sums near 0, which no quotient stands
        features = [rng.normal(size=s) for s in ((self.group, self.length, self.key), (self.length, self.key))]
        q, k = (x if sign else np.abs(x) + 0.1 for x in features)
        v = rng.normal(size=(self.length, self.value))
        q, k, v = (np.asarray(jnp.asarray(x, self.dtype)) for x in (q, k, v))
        shape = {"head": (), "token": (self.length,), "channel": (self.length, self.key)}.get(self.decay)
        log = None if shape is None else np.float32(-self.strength * rng.exponential(size=shape))
        ids = None
        if self.segments:
            # Ids come again, and are in no order.
            ids = rng.permutation(self.segments)[np.sort(rng.integers(0, 2 * self.segments, self.length)) // 2]
            ids = ids.astype(np.int32)
        state = None
        if self.state:
            z = np.float32(rng.uniform(0.1, 1, self.key)) if self.normalize else None
            state = LinearState(np.float32(rng.normal(size=(self.key, self.value))), z)
        return LinearOperands(q, k, v, log, ids, state)

    def cotangents(self):
        rng = np.random.default_rng(self.seed + 1)
        dy = np.asarray(jnp.asarray(rng.normal(size=(self.group, self.length, self.value)), self.dtype))
        dz = np.float32(rng.normal(size=self.key)) if self.normalize else None
        return dy, LinearState(np.float32(rng.normal(size=(self.key, self.value))), dz)


# Half of the time would go into LLVM's optimizations of programs that run once.
FAST = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnames=("name", "options"), compiler_options=FAST)
def _run(name, options, x, dy, dstate):
    outputs, pullback = jax.vjp(lambda x: linear_attention(IMPLEMENTATIONS[name], options, x), x)
    return outputs, pullback((dy.astype(outputs[0].dtype), dstate))[0]


def run(name, options, x, dy, dstate):
    """{result or gradient: array}"""
    (y, last), grads = _run(name, options, x, dy, dstate)
    return _named(y, last, grads.q, grads.k, grads.v, grads.log_decay, grads.state, grads.beta)


def want(options, x, dy, dstate):
    """The same by the recurrence."""
    state = x.state or LinearState(None, None)
    keywords = {
        "scale": options.scale,
        "normalize": options.normalize,
        "epsilon": options.epsilon,
        "log_decay": x.log_decay,
        "segment_ids": x.segment_ids,
        "s": state.s,
        "beta": x.beta,
        "z": state.z,
    }
    q, k, v, dy = (np.asarray(a, np.float64) for a in (x.q, x.k, x.v, dy))
    y, s, z = recurrence(q, k, v, **keywords)
    dz = np.zeros(k.shape[1]) if dstate.z is None else dstate.z
    g = recurrence_grad(q, k, v, dy, dstate.s, dz, **keywords)
    dfirst = None if x.state is None else LinearState(g.s, g.z if options.normalize else None)
    return _named(y, LinearState(s, z if options.normalize else None), g.q, g.k, g.v, g.log_decay, dfirst, g.beta)


def _named(y, last, dq, dk, dv, dlog, dfirst, dbeta):
    found = {"y": y, "s": last.s, "z": last.z, "dq": dq, "dk": dk, "dv": dv, "dlog": dlog, "dbeta": dbeta}
    if dfirst is not None:
        found |= {"ds": dfirst.s, "dz": dfirst.z}
    return {name: a for name, a in found.items() if a is not None}


def error(got, want, least=1e-30):
    """The largest difference, by the largest number, or by `least` if that is smaller."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), least)


def check(got, want, tolerance, least=1e-30, **more):
    """`more` may be a `least` of its own for a result."""
    assert got.keys() == want.keys()
    errors = {name: error(got[name], want[name], more.get(name, least)) for name in want}
    assert max(errors.values()) <= tolerance, errors


def compare(name, case, x=None, tolerance=None):
    """Check all results and gradients of a call; return them."""
    x = case.operands() if x is None else x
    got = run(name, case.options, x, *case.cotangents())
    # Gradients by what normalised results do not depend on are 0: what a lone token's query is, say.
    least = 0.3 if case.normalize else 1e-30
    more = {}
    if case.decay in ("head", "token"):
        # A sum over channels, and for a head over tokens, whose parts may cancel.
        each = x.log_decay if case.decay == "head" else x.log_decay[:, None]
        each = x._replace(log_decay=np.broadcast_to(each, (case.length, case.key)))
        parts = np.abs(want(case.options, each, *case.cotangents())["dlog"]).sum(1)
        more["dlog"] = max(parts.sum() if case.decay == "head" else parts.max(initial=0), 1e-30)
    check(got, want(case.options, x, *case.cotangents()), tolerance or TOLERANCE[case.dtype], least, **more)
    return got
