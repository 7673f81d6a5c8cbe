# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the gallery's modules share: arguments, and the marks of their TPU tests."""

import importlib.util

import haliax as hax
import jax
import pytest

V5E = "v5e:2x2"


def needs_libtpu(test):
    """Mark a test that compiles for a TPU topology."""
    absent = importlib.util.find_spec("libtpu") is None
    skip = pytest.mark.skipif(absent, reason="needs libtpu: pip install 'haliax-kernels[tpu]'")
    return pytest.mark.tpu_compile(skip(test))


def normal(seed, *axes):
    return hax.random.normal(jax.random.key(seed), axes)
