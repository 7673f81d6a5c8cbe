# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Plans of the calls that a program makes: collected, and in the log."""

import logging

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from jax.sharding import AxisType

from haliax_kernels import ShardedAxisError, named_kernel
from haliax_kernels.recording import recorded_calls

X, Batch = Axis("x", 8), Axis("batch", 4)


@named_kernel("x -> x")
def double(a):
    return 2 * a


def call(mapping):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        return jax.eval_shape(lambda a: double(hax.named(a, (Batch, X))).array, jnp.zeros((4, 8)))


def test_nothing_runs_and_everything_is_there():
    with recorded_calls() as calls:
        call({"batch": "data"})
    (plan,) = (call.plan for call in calls)
    assert plan.kernel == "double"
    assert [(a.name, a.local_size) for a in plan.outputs[0].axes] == [("batch", 2), ("x", 8)]
    call({"batch": "data"})
    assert len(calls) == 1


def test_a_refused_call_is_there_too():
    with recorded_calls() as calls, pytest.raises(ShardedAxisError):
        call({"x": "data"})
    assert [type(e) for e in calls[0].plan.refusals] == [ShardedAxisError]


def test_the_log_has_each_plan_once(caplog):
    with caplog.at_level(logging.INFO, "haliax_kernels.plans"):
        for _ in range(3):
            call({"batch": "data"})
            call({})
    texts = [r.getMessage() for r in caplog.records if r.name == "haliax_kernels.plans"]
    assert len(texts) == 2 and all("kernel 'double'" in t for t in texts)
