# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What every plan must satisfy, whatever the call: checked on plans alone, nothing runs."""

import itertools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from hypothesis import given, settings
from hypothesis import strategies as st

from haliax_kernels import Gather, Local, Parallel, Sum, named_kernel
from support import make_mesh

CORES = ("a", "b", "c")
LOOPS = ("m", "n")
POLICIES = (Local(), Parallel(), Gather(), Sum())
ENTRIES = (None, "x", "y", ("x", "y"), ("y", "x"))


@st.composite
def calls(draw):
    """A kernel of two arguments and two outputs with random policies, and a random mapping; much of it is refused."""
    inputs = [draw(st.permutations(CORES))[: draw(st.integers(0, 3))] for _ in range(2)]
    known = sorted({c for axes in inputs for c in axes})
    outputs = [draw(st.permutations(known))[: draw(st.integers(0, len(known)))] for _ in range(2)]
    policies = {}
    for core in known:
        lacking = [o for o in outputs if core not in o]
        allowed = [
            p for p in POLICIES if not ((isinstance(p, Parallel) and lacking) or (isinstance(p, Sum) and not lacking))
        ]
        policies[core] = draw(st.sampled_from(allowed))
    loops = [draw(st.permutations(LOOPS))[: draw(st.integers(0, 2))] for _ in range(2)]
    mapping = {name: draw(st.sampled_from(ENTRIES)) for name in (*CORES, *LOOPS)}
    return inputs, outputs, policies, loops, mapping, draw(st.sampled_from([{"x": 2, "y": 3}, {"x": 2, "y": 1}]))


@settings(max_examples=1000, deadline=None)
@given(calls())
def test_what_varies_is_accounted_for(call):
    """The structural check in place of check_vma: over a mesh axis along which the kernel's inputs vary, every output
    varies too, or is summed; and no mesh axis shards two axes at once."""
    inputs, outputs, policies, loops, mapping, sizes = call
    text = ", ".join(" ".join(i) or "()" for i in inputs) + " -> " + ", ".join(" ".join(o) or "()" for o in outputs)
    arrays = [
        NamedArray(jax.ShapeDtypeStruct((12,) * (len(i) + len(n)), jnp.float32), tuple(Axis(a, 12) for a in (*n, *i)))
        for i, n in zip(inputs, loops, strict=True)
    ]
    mesh = make_mesh(**sizes)
    plan = plan_only(named_kernel(text, policies=policies)(lambda x, y: None), arrays, mapping, mesh)
    if plan.refusals:
        return
    shards: dict[str, set] = {}
    for x in plan.inputs:
        entries = list(itertools.chain.from_iterable(a.mesh_axes for a in x.axes))
        assert len(entries) == len(set(entries))
        for a in x.axes:
            assert not (isinstance(a.policy, Local) and a.shards > 1)
            assert a.size % a.shards == 0
            for m in plan.several(a.kernel_mesh_axes):
                shards.setdefault(m, set()).add(a.identity)
    for m, axes in shards.items():
        assert len(axes) == 1, (m, axes)
        for out in plan.outputs:
            where = [a.name for a in out.axes if m in a.mesh_axes]
            assert len(where) + (m in out.psum) == 1, (m, out)
    for out in plan.outputs:
        entries = list(itertools.chain.from_iterable(a.mesh_axes for a in out.axes))
        assert len(entries) == len(set(entries))
    work = set(shards) | {m for out in plan.outputs for cut in out.slices for m in plan.several(cut)}
    for x in plan.inputs:
        own = {m for a in x.axes for m in a.kernel_mesh_axes}
        assert set(x.grad_sum) == {m for m in work if m not in own}


def plan_only(kernel, arrays, mapping, mesh):
    """The plan before the kernel is traced: these kernels have no body."""
    shape, _, key = kernel._read(tuple(arrays), {}, None, mapping, mesh)
    return kernel._ready(kernel._spec, shape, *key)[0]


def test_table_of_a_call_that_runs():
    kernel = named_kernel("rows inner, inner cols -> rows cols", policies={"inner": Sum(), "rows": Parallel()})(
        lambda x, w: x @ w
    )
    x, w = (
        hax.ones((Axis("batch", 4), Axis("rows", 8), Axis("inner", 16))),
        hax.ones((Axis("inner", 16), Axis("cols", 6))),
    )
    with jax.set_mesh(make_mesh(data=2, model=2, spare=2)), hax.axis_mapping({"rows": "data", "inner": "model"}):
        plan = kernel.plan(x, w)
    lines = [line.split() for line in str(plan).splitlines()]
    assert ["x", "batch", "(loop)", "4", "4", "4", "-", "-"] in lines
    origin = ["from", "the", "current", "hax.axis_mapping"]
    assert ["rows", "rows", "8", "4", "4", "data", "Parallel", *origin] in lines
    assert ["inner", "inner", "16", "8", "8", "model", "Sum", *origin] in lines
    assert ["forward", "all-reduce", "over", "model", "of", "output", "0", "384", "B"] in lines
    assert ["backward", "all-reduce", "over", "data", "of", "dw", "192", "B"] in lines
    assert "mesh: data 2 x model 2 x spare 2, from the current jax.set_mesh" in str(plan)
    assert "mesh axis 'spare' (2 devices) is idle in this call" in str(plan)
    assert plan.outputs[0].local_bytes == 384


def test_plan_lists_how_arrays_lie_otherwise():
    """An eager array under another sharding than the mapping's is resharded on entry: right, and not for free."""
    kernel = named_kernel("pos -> pos")(lambda x: x)
    x = hax.ones((Axis("batch", 8), Axis("pos", 4)))
    with jax.set_mesh(make_mesh(data=2, model=4)):
        lying = hax.shard(x, {"batch": "model"})
        plan = kernel.plan(lying, axis_mapping={"batch": "data"})
        assert plan.reshards == (
            "argument 'x': lies as (model, -), is needed as (data, -), from the axis_mapping= argument",
        )
        np.testing.assert_array_equal(kernel(lying, axis_mapping={"batch": "data"}).array, x.array)
        assert kernel.plan(lying, axis_mapping={"batch": "model"}).reshards == ()
