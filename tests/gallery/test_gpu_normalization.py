# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's Pallas kernels for GPUs: layer norm, RMS norm, softmax. Numbers in the interpreter; lowered for CUDA."""

import jax
import jax.numpy as jnp
import pytest
from haliax import Axis, NamedArray
from jax.experimental.pallas.ops.gpu import layer_norm as library_layer_norm
from jax.experimental.pallas.ops.gpu import rms_norm as library_rms_norm
from jax.experimental.pallas.ops.gpu import softmax as library_softmax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from gallery._support import normal, plain
from haliax_kernels import Parallel, named_kernel
from haliax_kernels.testing import check_kernel

Batch, Pos, Embed = Axis("batch", 4), Axis("pos", 4), Axis("embed", 128)
NORM = "batch pos embed, embed, embed -> batch pos embed"
TRITON = "__gpu$xla.gpu.triton"
ROWS = {"batch": Parallel(), "pos": Parallel()}


@named_kernel(NORM, policies=ROWS)
def layer_norm(x, weight, bias, *, interpret=False):
    return library_layer_norm.layer_norm(x, weight, bias, interpret=interpret)


@named_kernel(NORM, policies=ROWS)
def rms_norm(x, weight, bias, *, interpret=False):
    return library_rms_norm.rms_norm(x, weight, bias, interpret=interpret)


@named_kernel("*batch row -> *batch row")
def softmax(x, *, interpret=False):
    return library_softmax.softmax(x, interpret=interpret)


def arguments():
    return normal(0, Batch, Pos, Embed), normal(1, Embed), normal(2, Embed)


@plain
def layer_norm_reference(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


@plain
def rms_norm_reference(x, weight, bias):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


NORMS = [(layer_norm, layer_norm_reference), (rms_norm, rms_norm_reference)]


@pytest.mark.parametrize(("kernel", "reference"), NORMS)
def test_norm_values_and_gradients(kernel, reference):
    check_kernel(kernel, *arguments(), reference=reference, mesh={"a": 2}, interpret=True)


def test_softmax_values():
    x = arguments()[0].rename({"embed": "row"})
    check_kernel(softmax, x, reference=plain(jax.nn.softmax), gradients=False, interpret=True)


def lowered(kernel, args, gradient):
    """The program for four H200s, on a machine without any: as text."""
    gpu = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,), abstract_device=gpu)

    def abstract(x):
        spec = PartitionSpec(*("x" if a.name == "batch" else None for a in x.axes))
        sharding = NamedSharding(mesh, spec)
        return NamedArray(jax.ShapeDtypeStruct(x.array.shape, x.array.dtype, sharding=sharding), x.axes)

    def function(*args):
        return kernel(*args, axis_mapping={"batch": "x"}).array

    if gradient:
        function = jax.grad(lambda *args: kernel(*args, axis_mapping={"batch": "x"}).array.sum(), (0, 1, 2))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*map(abstract, args))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kernel", [layer_norm, rms_norm])
def test_norm_lowers_for_cuda(kernel):
    forward, gradient = (lowered(kernel, arguments(), which) for which in (False, True))
    assert forward.count(TRITON) == 1 and "all_reduce" not in forward
    # The rows stay where they are; the gradients of weight and bias are summed over the devices.
    assert gradient.count(TRITON) == 3 and gradient.count("stablehlo.all_reduce") == 2


def test_softmax_lowers_for_cuda():
    text = lowered(softmax, [arguments()[0].rename({"embed": "row"})], False)
    assert text.count(TRITON) == 1 and "all_reduce" not in text
