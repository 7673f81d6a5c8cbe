# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the gallery's modules share: random arguments, and compiling for a TPU without running."""

import functools
import importlib.util

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels.testing import topology_mesh


def needs_libtpu(test):
    """Mark a test that compiles for a TPU topology."""
    absent = importlib.util.find_spec("libtpu") is None
    skip = pytest.mark.skipif(absent, reason="needs libtpu: pip install 'haliax-kernels[tpu]'")
    return pytest.mark.tpu_compile(skip(test))


def compile_for_tpu(kernel, *args, mapping, kernels, **kwargs):
    """Compile a call for TPU v5e:2x2, on a mesh of a 2 and b 2, and its gradient too unless `kernels` is 0.

    `kernels` is how many Pallas kernels the program of the gradient holds.
    """
    mesh = tpu_mesh()
    args = [abstract(x, mesh, mapping) for x in args]
    which = tuple(i for i, x in enumerate(args) if named(x) and jnp.issubdtype(x.dtype, jnp.floating))

    def forward(*args):
        outs = kernel(*args, axis_mapping=mapping, **kwargs)
        return [x.array for x in (outs if isinstance(outs, tuple) else (outs,))]

    def loss(*args):
        return sum(jnp.sum(x.astype(jnp.float32)) for x in forward(*args))

    with jax.set_mesh(mesh):
        assert pallas_calls(forward, args) == 1
        if kernels:
            assert pallas_calls(jax.grad(loss, which), args) == kernels


def pallas_calls(function, args):
    text = jax.jit(function).trace(*args).lower().compile().as_text()
    return text.count('custom_call_target="tpu_custom_call"')


@functools.cache
def tpu_mesh():
    return topology_mesh("v5e:2x2", {"a": 2, "b": 2})


def abstract(x, mesh, mapping):
    """`x` as shapes that are sharded as the mapping says."""
    if not named(x):
        return x
    spec = PartitionSpec(*(mapping.get(a.name) for a in x.axes))
    return NamedArray(jax.ShapeDtypeStruct(x.array.shape, x.dtype, sharding=NamedSharding(mesh, spec)), x.axes)


def named(x):
    return isinstance(x, NamedArray)


def normal(seed, *axes):
    return hax.random.normal(jax.random.key(seed), axes)


def plain(function):
    """A reference on plain arrays as one on the kernel's arguments."""

    @functools.wraps(function)
    def reference(*args, **kwargs):
        return function(*(x.array if named(x) else x for x in args))

    return reference
