# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokamax: attention, layer norm and ragged dot. Skipped where it is not installed."""

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from gallery._support import compile_for_tpu, needs_libtpu, normal, plain
from haliax_kernels import Parallel, Sum, named_kernel
from haliax_kernels.testing import check_kernel

tokamax = pytest.importorskip("tokamax", reason="needs tokamax: pip install tokamax (Python 3.12)")
flags = pytest.importorskip("absl.flags")


Batch, Heads, Head = Axis("batch", 2), Axis("heads", 2), Axis("d", 128)
Pos, KPos = Axis("pos", 128), Axis("k_pos", 128)
Embed, Mlp, Row = Axis("embed", 256), Axis("mlp", 256), Axis("row", 128)
Expert, Group = Axis("expert", 4), Axis("group", 4)


@named_kernel(
    "batch pos heads d, batch k_pos heads d, batch k_pos heads d -> batch pos heads d",
    policies={"batch": Parallel(), "heads": Parallel()},
)
def attention(q, k, v, *, implementation):
    return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


@named_kernel("pos embed, embed, embed -> pos embed", policies={"pos": Parallel()})
def layer_norm(x, scale, offset, *, implementation):
    return tokamax.layer_norm(x, scale, offset, implementation=implementation)


@named_kernel(
    "row embed, expert embed mlp, expert -> row mlp",
    policies={"embed": Sum(), "mlp": Parallel()},
    multiple_of={"embed": 128, "mlp": 128},
)
def ragged_dot(x, weights, group_sizes, *, implementation):
    return tokamax.ragged_dot(x, weights, group_sizes, implementation=implementation)


# As in test_megablox.py: a shard does the rows of its own experts, from the first of its ids on.
@named_kernel(
    "row embed, expert embed mlp, group, expert -> row mlp",
    policies={"expert": Sum(), "embed": Sum(), "mlp": Parallel()},
)
def expert_ragged_dot(x, weights, group_sizes, expert_ids):
    return tokamax.ragged_dot(
        x,
        weights,
        group_sizes,
        group_offset=expert_ids[:1],
        zero_initialize=True,
        implementation="mosaic_tpu_v2",
    )


@pytest.fixture(autouse=True)
def cross_compile():
    """Let tokamax compile for what it is not running on."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # else it cannot be read outside of absl's own main
    with tokamax.config.cross_compile(True):
        yield


def attention_arguments():
    return [normal(i, Batch, axis, Heads, Head) for i, axis in enumerate((Pos, KPos, KPos))]


@plain
def attention_reference(q, k, v, **_):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * Head.size**-0.5
    visible = jnp.arange(Pos.size)[:, None] >= jnp.arange(KPos.size)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible, logits, -1e30), -1), v, precision="highest")


def test_attention_values_and_gradients():
    """By its XLA code: the Pallas kernels are for TPUs and GPUs, and have no interpreter."""
    check_kernel(attention, *attention_arguments(), reference=attention_reference, mesh={"a": 2}, implementation="xla")


@needs_libtpu
def test_attention_compiles_for_tpu():
    mapping = {"batch": "a", "heads": "b"}
    compile_for_tpu(attention, *attention_arguments(), mapping=mapping, implementation="mosaic_tpu", kernels=2)


def norm_arguments():
    return normal(0, Batch, Pos, Embed), normal(1, Embed), normal(2, Embed)


@plain
def norm_reference(x, scale, offset):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + offset


def test_layer_norm_values_and_gradients():
    check_kernel(layer_norm, *norm_arguments(), reference=norm_reference, mesh={"a": 2}, implementation="xla")


SIZES = (60, 0, 41, 27)


def dot_arguments():
    sizes = hax.named(jnp.array(SIZES, jnp.int32), Expert)
    return normal(0, Row, Embed) * Embed.size**-0.5, normal(1, Expert, Embed, Mlp), sizes


@plain
def dot_reference(x, weights, group_sizes):
    expert = jnp.repeat(jnp.arange(Expert.size), jnp.array(SIZES), total_repeat_length=Row.size)
    return jnp.einsum("re,rem->rm", x, weights[expert], precision="highest")


def test_ragged_dot_values_and_gradients():
    check_kernel(ragged_dot, *dot_arguments(), reference=dot_reference, mesh={"a": 2}, implementation="xla")


@needs_libtpu
def test_ragged_dot_compiles_for_tpu():
    mapping = {"embed": "a", "mlp": "b"}
    compile_for_tpu(ragged_dot, *dot_arguments(), mapping=mapping, implementation="mosaic_tpu", kernels=2)


@needs_libtpu
def test_ragged_dot_compiles_for_tpu_with_experts_sharded():
    x, weights, sizes = dot_arguments()
    arguments = x, weights, sizes.rename({"expert": "group"}), hax.arange(Expert, dtype=jnp.int32)
    compile_for_tpu(expert_ragged_dot, *arguments, mapping={"expert": ("a", "b")}, kernels=0)
