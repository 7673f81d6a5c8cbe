# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's TPU matrix product: the contraction is summed over the mesh. It has no backward."""

import jax.numpy as jnp
from haliax import Axis
from jax.experimental.pallas.ops.tpu.matmul import matmul as library

from gallery._support import compile_for_tpu, needs_libtpu, normal, plain
from haliax_kernels import Parallel, Sum, named_kernel
from haliax_kernels.testing import check_kernel

Row, Inner, Column = Axis("row", 256), Axis("inner", 256), Axis("column", 256)


@named_kernel(
    "row inner, inner column -> row column", policies={"row": Parallel(), "inner": Sum(), "column": Parallel()}
)
def matmul(x, y):
    return library(x, y, block_shape=(128, 128), block_k=128)


@plain
def reference(x, y):
    return jnp.dot(x, y, precision="highest")


def arguments():
    return normal(0, Row, Inner) * Inner.size**-0.5, normal(1, Inner, Column)


def test_values():
    check_kernel(matmul, *arguments(), reference=reference, gradients=False, mesh={"a": 2})


@needs_libtpu
def test_compiles_for_tpu():
    compile_for_tpu(matmul, *arguments(), mapping={"row": "a", "inner": "b"}, kernels=0)
