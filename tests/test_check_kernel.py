# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`check_kernel` passes right kernels, and catches every planted lie, naming the axis or the argument."""

import importlib.util
import logging
import threading
import time

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from haliax_kernels import Gather, Halo, Manual, Parallel, Sum, named_kernel
from haliax_kernels.collectives import exclusive_prefix, ring
from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.testing import CheckReport, KernelCheckError, check_kernel
from haliax_kernels.testing.call import read_call
from haliax_kernels.testing.interpret import tpu_interpret_mode
from haliax_kernels.testing.shardings import find_shardings
from support import ATTENTION, attention, make_mesh

SMALL = {"a": 2}
BOTH = {"pos": Parallel(), "embed": Parallel()}


def array(*axes, seed=0, dtype=jnp.float32):
    axes = tuple(Axis(name, size) for name, size in axes)
    values = np.random.default_rng(seed).normal(size=[a.size for a in axes])
    return NamedArray(jnp.asarray(values, dtype), axes)


X = array(("batch", 2), ("pos", 8), ("embed", 2))
W = array(("taps", 3), ("embed", 2), seed=1)


def failure(kernel, *args, **options):
    options.setdefault("mesh", SMALL)
    with pytest.raises(KernelCheckError) as caught:
        check_kernel(kernel, *args, **options)
    return str(caught.value)


# Right kernels


def test_attention_with_a_reference():
    """Two axes may share a mesh axis, since one of them is gathered."""
    kernel = named_kernel(ATTENTION, policies={"q_pos": Parallel(), "k_pos": Gather()})(attention)
    q = array(("batch", 2), ("pos", 4), ("d", 2))
    k = array(("batch", 2), ("key_pos", 4), ("d", 2), seed=1)
    v = array(("batch", 2), ("key_pos", 4), ("v", 2), seed=2)

    def reference(q, k, v):
        assert q.array.dtype == jnp.float64
        weights = hax.nn.softmax(hax.dot(q, k, axis="d"), axis="key_pos")
        return hax.dot(v, weights, axis="key_pos")

    names = {"q_pos": "pos", "k_pos": "key_pos", "key": "d", "value": "v"}
    report = check_kernel(kernel, q, k, v, axes=names, mesh=SMALL, samples=2, reference=reference)
    assert isinstance(report, CheckReport) and report.gradients and not report.unchecked
    assert report.checked[:3] == ((("batch", ("a",)),), (("pos", ("a",)),), (("key_pos", ("a",)),))
    assert (("pos", ("a",)), ("key_pos", ("a",))) in report.checked
    assert {(r.axis, r.kind) for r in report.refused} == {("d", "ShardedAxisError"), ("v", "ShardedAxisError")}
    text = str(report)
    assert "values and gradients of the unsharded call agree with the reference, in float64" in text, text
    assert "agree with finite differences, in float64" in text, text


@named_kernel("pos embed, taps embed -> pos embed", policies={"pos": Halo(before=2), "embed": Parallel()})
def convolution(x, w):
    n = x.shape[0] - 2
    return sum(x[i : i + n] * w[i] for i in range(3))


@named_kernel("pos embed -> embed, ()", policies={"pos": Sum()})
def moments(x):
    return jnp.sum(x * x, axis=0), jnp.sum(x)


@pytest.mark.parametrize("kernel, args", [(convolution, (X, W)), (moments, (X,))], ids=["halo", "sum"])
def test_default_mesh(kernel, args):
    """Each axis over one mesh axis, the other, and both in either order; then some combinations."""
    report = check_kernel(kernel, *args, samples=1)
    assert report.checked[0] == (("batch", ("a",)),)
    assert (("pos", ("b", "a")),) in report.checked
    assert len(report.checked[-1]) > 1
    assert not report.unchecked


def test_the_caller_s_mesh_and_mapping_do_not_matter():
    with jax.set_mesh(make_mesh(data=8)), hax.axis_mapping({"batch": "data"}):
        assert check_kernel(moments, X, mesh=SMALL, samples=0).gradients


def test_plain_arrays():
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH)(lambda x: x * 2)
    report = check_kernel(kernel, np.ones((8, 2), np.float32), mesh=SMALL, samples=0)
    assert report.checked == ((("pos", ("a",)),), (("embed", ("a",)),))


def test_static_arguments_and_integers():
    @named_kernel("pos embed -> pos embed, pos", policies={"pos": Parallel()})
    def take(x, table, *, power, causal=False):
        assert causal is True
        return x**power * table[0], jnp.argmax(x, axis=1)

    report = check_kernel(take, X, np.arange(3), power=2, causal=True, mesh=SMALL)
    assert len(report.checked) == 2


def test_bfloat16():
    x = array(("batch", 4), ("embed", 8), dtype=jnp.bfloat16)
    kernel = named_kernel("embed -> embed")(lambda x: jax.nn.softmax(x))
    assert check_kernel(kernel, x, mesh=SMALL).gradients


def test_no_gradient():
    @jax.custom_vjp
    def bare(x):
        return x * 2

    bare.defvjp(lambda x: (bare(x), None), lambda _, ct: 1 / 0)
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH, name="bare")(bare)
    assert "gradients=False" in failure(kernel, X)
    assert not check_kernel(kernel, X, mesh=SMALL, gradients=False, samples=0).gradients
    integers = NamedArray(jnp.arange(8), (Axis("pos", 8),))
    double = named_kernel("pos -> pos", policies={"pos": Parallel()})(lambda x: x * 2)
    assert not check_kernel(double, integers, mesh=SMALL).gradients


def test_non_smooth_kernel_raises_no_alarm():
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH)(lambda x: jax.nn.relu(jnp.sign(x) * (x - 0.1)))
    assert check_kernel(kernel, X, mesh=SMALL, samples=0).gradients


# Nothing is checked in silence


def test_too_few_devices():
    with pytest.raises(RuntimeError, match=r"xla_force_host_platform_device_count=64"):
        check_kernel(moments, X, mesh={"a": 64})


def test_nothing_to_shard_is_an_error():
    local = named_kernel("pos embed -> pos embed", name="local")(lambda x: x)
    x = array(("pos", 8), ("embed", 2))
    assert "no axis of this call can be sharded" in failure(local, x)
    assert "UnevenShardingError" in failure(local.with_policies(pos=Parallel()), array(("pos", 3), ("embed", 2)))


def test_nan_is_an_error():
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH, name="root")(jnp.sqrt)
    assert "the value of output 0 is NaN" in failure(kernel, X)


def test_samples():
    """The mesh axes in all pairs of two different axes; a mesh axis cannot shard two."""
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH)(lambda x: x * 2)
    x = array(("batch", 2), ("pos", 2), ("embed", 2))
    every = find_shardings(read_call(kernel, (x,), {}, None), make_mesh(a=2, b=2), None, 0)
    assert len(every.alone) == 3 * 2 and len(set(every.together)) == 3 * 2
    some = find_shardings(read_call(kernel, (x,), {}, None), make_mesh(a=2, b=2), 4, 0)
    assert some.alone == every.alone and len(set(some.together)) == 4 and set(some.together) < set(every.together)


def test_sizes_that_do_not_divide_are_reported():
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH)(lambda x: x * 2)
    report = check_kernel(kernel, array(("pos", 3), ("embed", 2)), mesh=SMALL)
    assert report.unchecked == (("pos", "its size 3 allows no sharding (UnevenShardingError)"),)
    assert "UNCHECKED: axis 'pos'" in str(report)


# Lies about an axis


def mixes(x):
    return jnp.cumsum(x, axis=0)


def softmax(x):
    return jax.nn.softmax(x, axis=1)


def square_of_sum(x):
    return jnp.sum(x, axis=0) ** 2


def shifted(x, before, after, real):
    """Each row plus its neighbours; the rows that the halo lacks, the kernel makes up."""
    x = jnp.pad(x, ((before - real[0], after - real[1]), (0, 0)))
    n = x.shape[0] - before - after
    return sum((i + 1) * x[i : i + n] for i in range(before + after + 1))


def halo_too_small(x):
    return shifted(x, 2, 0, (1, 0))


def halo_on_the_wrong_side(x):
    return jnp.pad(x, ((1, 0), (0, 0)))[: x.shape[0] - 1] + x[:-1]


def halo_off_by_one(x):
    """Gets one row before and wants the one before that; on the whole array that is a row of padding more."""
    return jnp.pad(x, ((1, 0), (0, 0)))[: x.shape[0] - 1]


def both_neighbours(x):
    padded = jnp.pad(x, ((1, 1), (0, 0)))
    return padded[:-2] + padded[2:]


def mixes_leading(x):
    return x - jnp.mean(x, axis=0, keepdims=True)


def in_blocks_of_four(x):
    """Leaves out what is beyond the last whole block."""
    done = x.shape[0] // 4 * 4
    return jnp.concatenate([2 * x[:done], jnp.zeros_like(x[done:])])


def crashes_on_a_remainder(x):
    return 2 * x.reshape(-1, 4, x.shape[1]).reshape(x.shape)


LIES = {
    "parallel, but mixed": ("pos embed -> pos embed", BOTH, mixes, "'pos', declared Parallel()", "Gather()"),
    "parallel, but normalised": ("pos embed -> pos embed", BOTH, softmax, "'embed', declared Parallel()", "Gather()"),
    "sum, but not additive": ("pos embed -> embed", {"pos": Sum()}, square_of_sum, "'pos', declared Sum()", "add up"),
    "halo too small": (
        "pos embed -> pos embed",
        {"pos": Halo(before=1)},
        halo_too_small,
        "'pos', declared Halo(before=1",
        "first 1 of 4 rows of shard 1",
    ),
    "halo on the wrong side": (
        "pos embed -> pos embed",
        {"pos": Halo(after=1)},
        halo_on_the_wrong_side,
        "'pos', declared Halo(after=1",
        "Halo(before=..., after=0)",
    ),
    "halo off by one": (
        "pos embed -> pos embed",
        {"pos": Halo(1)},
        halo_off_by_one,
        "'pos', declared Halo(before=1",
        "first 1",
    ),
    "needs both neighbours": (
        "pos embed -> pos embed",
        BOTH,
        both_neighbours,
        "'pos', declared Parallel()",
        "only within 1 rows of the borders",
    ),
    "loop axis": ("*batch pos embed -> *batch pos embed", {}, mixes_leading, "'batch', a loop axis", "core axis"),
    "drops a remainder": (
        "pos embed -> pos embed",
        BOTH,
        in_blocks_of_four,
        "'pos', declared Parallel()",
        "multiple_of",
    ),
    "crashes on a remainder": (
        "pos embed -> pos embed",
        BOTH,
        crashes_on_a_remainder,
        "'pos', declared Parallel()",
        'multiple_of={"pos": ...}',
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lie_about_an_axis(lie):
    signature, policies, fn, axis, hint = LIES[lie]
    size = 12 if "remainder" in lie else 8
    x = array(("batch", 2), ("pos", size), ("embed", 2))
    text = failure(named_kernel(signature, policies=policies, name="liar")(fn), x)
    assert text.startswith("kernel 'liar'") and f"axis {axis}" in text and hint in text, text


def test_right_multiple_passes():
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH, multiple_of={"pos": 4})(crashes_on_a_remainder)
    assert check_kernel(kernel, X, mesh=SMALL, samples=0).checked
    report = check_kernel(kernel, array(("batch", 2), ("pos", 12), ("embed", 2)), mesh=SMALL, samples=0)
    assert report.unchecked == (("pos", "its size 12 allows no sharding (MultipleOfError)"),)


# Lies of kernels that communicate


def accumulating(offset_of_own, totals):
    """A cumulative sum times the position, and its last row; right if it uses its offset and the others' totals."""

    @named_kernel("pos embed -> pos embed, embed", policies={"pos": Manual(reduces=True)}, name="accumulating")
    def kernel(x, *, shard):
        mesh_axes = shard["pos"].mesh_axes
        own = jnp.cumsum(x, axis=0)
        own = own + exclusive_prefix(jnp.add, own[-1], 0.0, mesh_axes)
        position = jnp.arange(x.shape[0]) + (shard["pos"].offset if offset_of_own else 0)
        total = jnp.sum(x, axis=0)
        for _ in range(totals if mesh_axes else 0):
            total = lax.psum(total, mesh_axes)
        return own * position[:, None], total

    return kernel


MANUAL = {
    "right": (True, 1, None),
    "missing psum": (True, 0, "the value of output 1"),
    "double psum": (True, 2, "2 times too large"),
    "wrong offset": (False, 1, "the value of output 0"),
}


@pytest.mark.parametrize("lie", MANUAL)
def test_manual(lie):
    offset, totals, hint = MANUAL[lie]
    kernel = accumulating(offset, totals)
    if hint is None:
        assert (("pos", ("a",)),) in check_kernel(kernel, X, mesh=SMALL).checked
        return
    text = failure(kernel, X)
    assert "axis 'pos', declared Manual(" in text and hint in text, text


@pytest.mark.parametrize("right", [True, False])
def test_manual_axes_that_only_go_together(right):
    """An output has `q_pos` only, so that `k_pos` alone is refused, and both on one mesh axis are not."""

    @named_kernel("q_pos embed, k_pos embed -> q_pos embed", policies={"q_pos": Manual(), "k_pos": Manual()}, name="o")
    def others(q, k, *, shard):
        def step(carry, visiting, source):
            return carry + jnp.sum(visiting, axis=0)

        return q * (ring(step, jnp.zeros_like(k[0]), k, shard["k_pos"].mesh_axes) if right else jnp.sum(k, axis=0))

    q, k = array(("q_pos", 8), ("embed", 2)), array(("k_pos", 8), ("embed", 2), seed=1)
    if right:
        report = check_kernel(others, q, k, mesh=SMALL)
        assert (("q_pos", ("a",)), ("k_pos", ("a",))) in report.checked and not report.unchecked
    else:
        assert "'k_pos'" in failure(others, q, k)


# Lies about the gradient


def inside():
    """The first mesh axis, where there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.axis_names[0] if "a" in mesh.axis_names else None


def summing(forward_sums, backward_sums):
    """A sum of squares whose forward or backward psums by itself."""

    def psum(v, wanted):
        return lax.psum(v, inside()) if wanted and inside() else v

    def values(x):
        return psum(jnp.sum(x * x, axis=0), forward_sums)

    summed = jax.custom_vjp(values)
    summed.defvjp(lambda x: (values(x), x), lambda x, ct: (psum(2 * x * ct, backward_sums),))
    return named_kernel("pos embed -> embed", policies={"pos": Sum()}, name="summed")(summed)


def test_double_psum_forward():
    x = array(("pos", 8), ("embed", 2))
    text = failure(summing(True, False), x)
    assert "axis 'pos', declared Sum()" in text and "the value of output 0" in text and "2 times too large" in text, (
        text
    )


def test_double_psum_backward():
    # Both shards hold the same rows, as the psum of different ones has no constant factor.
    half = array(("pos", 4), ("embed", 2))
    x = hax.concatenate(Axis("pos", 8), [half, half])
    text = failure(summing(False, True), x)
    assert (
        "axis 'pos', declared Sum()" in text and "the gradient of argument 'x'" in text and "2 times too large" in text
    ), text
    assert "the gradient of argument 'x'" in failure(summing(False, True), array(("pos", 8), ("embed", 2)))


def test_dropped_residual():
    @jax.custom_vjp
    def product(x, w):
        return x * jnp.tanh(w)

    def backward(saved, ct):
        x, w = saved
        return ct * jnp.tanh(w), jnp.sum(ct * x, axis=0) * jnp.ones_like(w)  # without 1 - tanh^2

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    kernel = named_kernel("pos embed, embed -> pos embed", policies=BOTH, name="product")(product)
    text = failure(kernel, X, array(("embed", 2), seed=3))
    assert "the gradient of argument 'w' is wrong even unsharded" in text and "finite differences" in text, text


def test_forward_that_saves_differs():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2.1 * x, None), lambda _, ct: (2 * ct,))
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH, name="double")(double)
    assert "output 0 has another value when it is differentiated" in failure(kernel, X)


def test_wrong_reference():
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH, name="double")(lambda x: 2 * x)
    assert "the value of output 0 is not that of the reference" in failure(kernel, X, reference=lambda x: 2 * x + 1)
    straight = jax.custom_vjp(lambda x: jnp.round(x))
    straight.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))
    kernel = named_kernel("pos embed -> pos embed", policies=BOTH, name="straight")(straight)
    text = failure(kernel, X, reference=lambda x: hax.round(x))
    assert "the gradient of argument 'x' is not that of the reference" in text, text


# Copies that devices should hold alike


def test_copies_that_differ():
    """Shard 0, whose copy JAX would show, has the total; the others have their own part."""

    @named_kernel("pos embed -> embed", policies={"pos": Manual(reduces=True)}, name="first")
    def first(x, *, shard):
        own, mesh_axes = jnp.sum(x, axis=0), shard["pos"].mesh_axes
        return jnp.where(shard["pos"].index == 0, lax.psum(own, mesh_axes), own) if mesh_axes else own

    text = failure(first, array(("pos", 8), ("embed", 2)), gradients=False)
    assert "axis 'pos', declared Manual(reduces=True)" in text and "copy 1 of 2" in text and "lax.psum" in text, text


# Random numbers


def dropout(x, key, rate=0.5):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x, 0)


def test_dropout():
    kernel = named_kernel("pos embed -> pos embed", policies={"pos": Parallel()})(dropout)
    report = check_kernel(kernel, X, jax.random.key(0), mesh=SMALL, samples=0)
    assert "shards draw different random numbers along batch, pos" in str(report)
    assert "not compared: output 0, and gradients, under 2 shardings" in str(report)
    report = check_kernel(kernel, X, jax.random.key(0), rate=0.0, mesh=SMALL, samples=0)
    assert not any("random" in note for note in report.notes)


def test_identical_dropout():
    kernel = named_kernel("pos embed -> pos embed", policies={"pos": Parallel()}, rng="replicated", name="drop")(
        dropout
    )
    text = failure(kernel, array(("pos", 8), ("embed", 2)), jax.random.key(0))
    assert "identical across shards" in text and "axis 'pos', declared Parallel()" in text and 'rng="fold"' in text, (
        text
    )


def test_one_key_for_each_index_is_compared():
    keys = NamedArray(jax.random.split(jax.random.key(0), 2), (Axis("batch", 2),))
    kernel = named_kernel("pos embed, () -> pos embed")(dropout)
    report = check_kernel(kernel, X, keys, mesh=SMALL)
    assert not any("not compared" in note for note in report.notes), str(report)


# Pallas


def copies(race):
    """Through scratch memory, in two copies; with a race the scratch is written again while the second one reads."""

    def body(x_ref, out_ref, scratch, semaphore):
        first = pltpu.make_async_copy(x_ref, scratch, semaphore)
        first.start()
        first.wait()
        second = pltpu.make_async_copy(scratch, out_ref, semaphore)
        second.start()
        if race:
            scratch[...] = x_ref[...]
        second.wait()

    def run(x):
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        )(x)

    return named_kernel("pos embed -> pos embed", policies={"pos": Parallel()}, name="copies")(run)


def test_race_in_scratch_memory():
    """The numbers are right, and only race detection sees it. The kernel says nothing of `interpret=`."""
    x = array(("pos", 4), ("embed", 2))
    assert check_kernel(copies(race=True), x, mesh=SMALL, gradients=False).checked
    text = failure(copies(race=True), x, gradients=False, races=True)
    assert "kernel 'copies' has a race" in text and "nothing is sharded" in text and "test_check_kernel.py" in text, (
        text
    )
    report = check_kernel(copies(race=False), x, mesh=SMALL, gradients=False, races=True)
    assert "no races, unsharded and under 1 sharding" in report.notes


def test_failure_inside_a_pallas_kernel():
    """Its fourth row: a shard has two. What it says is found in the interpreter's traceback."""

    def body(x_ref, out_ref):
        out_ref[...] = x_ref[pl.ds(pl.program_id(0) + 3, 1), :]

    @named_kernel("pos embed -> one embed", policies={"pos": Gather()}, name="fourth")
    def fourth(x):
        out = jax.ShapeDtypeStruct((1, x.shape[1]), x.dtype)
        return pl.pallas_call(body, grid=(1,), out_shape=out)(x)

    x = array(("pos", 4), ("embed", 2))
    assert check_kernel(fourth, x, mesh=SMALL, gradients=False).checked

    @named_kernel("pos embed -> pos embed", policies={"pos": Parallel()}, name="fourth")
    def wrong(x):
        return x + fourth._fn(x)

    text = failure(wrong, x, gradients=False)
    assert "fails when axis 'pos', declared Parallel()" in text and "IndexError" in text, text
    jax.effects_barrier()  # the failure is not raised again


def test_the_failure_itself_rather_than_a_broken_barrier():
    """Another device may still be at the interpreter's barrier, and JAX raises what it meets first; it logs both."""

    def fail(seconds, error):
        time.sleep(seconds)
        try:
            raise error
        except Exception:
            logging.getLogger("jax._src.callback").exception("jax.io_callback failed")

    with pytest.raises(IndexError, match="row 3") as raised, tpu_interpret_mode():
        fail(0, threading.BrokenBarrierError())
        threading.Thread(target=fail, args=(0.3, IndexError("row 3"))).start()
        raise jax.errors.JaxRuntimeError("BrokenBarrierError:")
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


def doubled(interpret):
    def body(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    @jax.custom_vjp
    def run(x):
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(x)

    run.defvjp(lambda x: (run(x), None), lambda _, ct: (run(ct),))
    return named_kernel("pos embed -> pos embed", policies={"pos": Parallel()}, name="doubled")(run)


@pytest.mark.parametrize("interpret", [False, True])
def test_pallas_and_races_with_a_gradient(interpret):
    report = check_kernel(doubled(interpret), array(("pos", 4), ("embed", 2)), mesh=SMALL, races=True)
    assert "no races, unsharded and under 1 sharding" in report.notes


def test_races_without_pallas_is_an_error():
    assert "no Pallas call ran" in failure(moments, X, races=True)


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_topology():
    x = array(("batch", 2), ("pos", 16), ("embed", 128))
    options = {"mesh": SMALL, "samples": 0, "topology": "v5e:2x2"}
    report = check_kernel(doubled(False), x, **options)
    assert "forward and gradient compile for TPU v5e:2x2 under 3 shardings" in report.notes

    def body(x_ref, out_ref):
        out_ref[...] = jnp.sort(x_ref[...], axis=0)

    @named_kernel("pos embed -> pos embed", name="sorts")
    def sorts(x):
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    text = failure(sorts, x, gradients=False, **options)
    assert "kernel 'sorts': its forward does not compile for TPU v5e:2x2" in text and "sort" in text, text
    with pytest.raises(UnsupportedOptionError, match="v5e"):
        check_kernel(sorts, x, gradients=False, mesh=SMALL, topology="v99:2x2")
