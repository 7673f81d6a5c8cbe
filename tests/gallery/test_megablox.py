# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Megablox' grouped matrix product: experts, features and the contraction sharded."""

import haliax as hax
import jax.numpy as jnp
import pytest
from haliax import Axis
from jax.experimental.pallas.ops.tpu.megablox import gmm

from gallery._support import compile_for_tpu, needs_libtpu, normal, plain
from haliax_kernels import Parallel, Sum, named_kernel
from haliax_kernels.testing import check_kernel

Row, Embed, Mlp = Axis("row", 128), Axis("embed", 256), Axis("mlp", 256)
Expert, Group = Axis("expert", 4), Axis("group", 4)


# A shard multiplies the rows of its own experts and leaves zeros in the others: outputs add up. Its first expert is
# the first of its ids; all group sizes are needed everywhere, so they have an axis of their own.
@named_kernel(
    "row embed, expert embed mlp, group, expert -> row mlp",
    policies={"expert": Sum(), "embed": Sum(), "mlp": Parallel()},
)
def grouped_matmul(x, weights, group_sizes, expert_ids):
    return gmm(x, weights, group_sizes, x.dtype, (128, 128, 128), expert_ids[0])


SIZES = (60, 0, 41, 27)


@plain
def reference(x, weights, group_sizes, expert_ids):
    expert = jnp.repeat(jnp.arange(Expert.size), jnp.array(SIZES), total_repeat_length=Row.size)
    return jnp.einsum("re,rem->rm", x, weights[expert], precision="highest")


def arguments():
    sizes, ids = hax.named(jnp.array(SIZES, jnp.int32), Group), hax.arange(Expert, dtype=jnp.int32)
    return normal(0, Row, Embed) * Embed.size**-0.5, normal(1, Expert, Embed, Mlp), sizes, ids


@pytest.mark.slow
def test_values_and_gradients():
    check_kernel(grouped_matmul, *arguments(), reference=reference, mesh={"a": 2})


@needs_libtpu
@pytest.mark.parametrize("mapping", [{"expert": ("a", "b")}, {"embed": "a", "mlp": "b"}], ids=["experts", "features"])
def test_compiles_for_tpu(mapping):
    compile_for_tpu(grouped_matmul, *arguments(), mapping=mapping, kernels=2)
