# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the gallery's modules share: random arguments, and compiling for a TPU without running."""

import functools
import importlib.util

import haliax as hax
import jax
import pytest

from haliax_kernels.testing.call import make_mesh, random_cotangents, read_call, single_device_mesh
from haliax_kernels.testing.shardings import find_shardings
from haliax_kernels.testing.tpu import check_compiles

MESH = {"a": 2, "b": 2}


def needs_libtpu(test):
    """Mark a test that compiles for a TPU topology."""
    absent = importlib.util.find_spec("libtpu") is None
    skip = pytest.mark.skipif(absent, reason="needs libtpu: pip install 'haliax-kernels[tpu]'")
    return pytest.mark.tpu_compile(skip(test))


def compile_for_tpu(kernel, *args, gradients=True, samples=3, **kwargs):
    """Compile a call for TPU v5e:2x2, unsharded and under shardings of several axes, without running it."""
    call = read_call(kernel, args, kwargs, None)
    mesh = make_mesh(MESH)
    cotangents = random_cotangents(call.function((), single_device_mesh()), call.arrays, 0) if gradients else None
    found = find_shardings(call, mesh, samples, 0)
    # An axis by itself where the kernel has no two.
    shardings = ((), *(found.together or found.alone[:samples]))
    note = check_compiles(call, "v5e:2x2", MESH, found.axes, shardings, cotangents)
    assert "without a single Pallas kernel" not in note


def normal(seed, *axes):
    return hax.random.normal(jax.random.key(seed), axes)


def plain(function):
    """A reference on plain arrays as one on the kernel's arguments."""

    @functools.wraps(function)
    def reference(*args, **kwargs):
        return function(*(a.array if isinstance(a, hax.NamedArray) else a for a in args))

    return reference
