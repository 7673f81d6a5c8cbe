# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Levanter's kernels: the fused cross-entropy (Pallas), and its SSD and short convolution (no Pallas)."""

import inspect

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from jax.experimental.pallas import tpu as pltpu

from gallery._support import compile_for_tpu, needs_libtpu, normal, plain
from haliax_kernels import Gather, Halo, Parallel, Sum, named_kernel
from haliax_kernels.testing import check_kernel

fused = pytest.importorskip("levanter.kernels.pallas.fused_cross_entropy_loss.pallas_tpu")
# jax 0.10 has no pltpu.repeat, which marin-levanter 0.2.20 calls.
needs_repeat = pytest.mark.skipif(
    "pltpu.repeat(" in inspect.getsource(fused) and not hasattr(pltpu, "repeat"),
    reason=f"this marin-levanter's kernel calls pltpu.repeat, which jax {jax.__version__} has not",
)
pytestmark = pytest.mark.levanter

Token, Embed, Vocab = Axis("token", 256), Axis("embed", 256), Axis("vocab", 256)


# The weights are gathered from their FSDP shards, and their gradient is scattered back.
@named_kernel(
    "token embed, token, embed vocab -> token, token",
    policies={"token": Parallel(), "embed": Gather(), "vocab": Gather()},
    multiple_of={"token": 128},
)
def cross_entropy(x, labels, weights):
    """(loss, logsumexp) of each token."""
    blocks = fused.BlockSizes(b_block_size=128, h_block_size=128, v_block_size=128)
    return fused.linear_softmax_cross_entropy_loss_pallas(x, labels, weights, block_sizes=blocks)


@plain
def cross_entropy_reference(x, labels, weights):
    logits = jnp.dot(x, weights, precision="highest")
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0], lse


def cross_entropy_arguments():
    labels = hax.random.randint(jax.random.key(2), Token, 0, Vocab.size)
    return normal(0, Token, Embed), labels, normal(1, Embed, Vocab) * Embed.size**-0.5


@pytest.fixture
def off_tpu(monkeypatch):
    """Let the library run where the default backend is no TPU: it looks at that, not at what it is compiled for."""
    monkeypatch.setattr(fused, "_validate_inputs", lambda *args, **kwargs: None)


def test_cross_entropy_is_refused_off_tpu():
    with pytest.raises(NotImplementedError, match="requires TPU backend"):
        cross_entropy(*cross_entropy_arguments())


@needs_repeat
@pytest.mark.slow
def test_cross_entropy_values_and_gradients(off_tpu):
    check_kernel(cross_entropy, *cross_entropy_arguments(), reference=cross_entropy_reference, mesh={"a": 2})


@needs_repeat
@needs_libtpu
def test_cross_entropy_compiles_for_tpu(off_tpu):
    compile_for_tpu(cross_entropy, *cross_entropy_arguments(), mapping={"token": "a", "embed": "b"}, kernels=1)


Batch, Chunks, Chunk = Axis("batch", 4), Axis("chunks", 2), Axis("chunk", 4)
State, Value = Axis("state", 4), Axis("value", 4)


# The state is a contraction of the first output and an axis of the second.
@named_kernel(
    "*batch chunks chunk, *batch chunks chunk, *batch chunks chunk state, *batch chunks chunk state,"
    " *batch chunks chunk value -> *batch chunks chunk value, *batch value state",
    policies={"value": Parallel(), "state": Sum()},
)
def ssd(log_decay, scale, b, c, x):
    from levanter.kernels.pallas.ssd import ssd_chunked_forward

    return ssd_chunked_forward(log_decay, scale, b, c, x)


@plain
def ssd_reference(log_decay, scale, b, c, x):
    """The recurrence, one position after the other."""
    total = jnp.concatenate([jnp.zeros_like(log_decay[..., :1]), log_decay], axis=-1)
    decay, scale, b, c, x = (
        v.reshape(Batch.size, Chunks.size * Chunk.size, *v.shape[3:])
        for v in (jnp.exp(jnp.diff(total, axis=-1)), scale, b, c, x)
    )

    def step(state, now):
        decay, scale, b, c, x = now
        update = jnp.einsum("nv,ns->nvs", x, b, precision="highest")
        state = decay[:, None, None] * state + scale[:, None, None] * update
        return state, jnp.einsum("nvs,ns->nv", state, c, precision="highest")

    start = jnp.zeros((Batch.size, Value.size, State.size), x.dtype)
    state, out = jax.lax.scan(step, start, tuple(jnp.moveaxis(v, 1, 0) for v in (decay, scale, b, c, x)))
    return jnp.moveaxis(out, 0, 1).reshape(Batch.size, Chunks.size, Chunk.size, Value.size), state


def ssd_arguments():
    decay = hax.named(-jax.nn.softplus(normal(0, Batch, Chunks, Chunk).array).cumsum(-1), (Batch, Chunks, Chunk))
    scale = hax.nn.softplus(normal(1, Batch, Chunks, Chunk))
    states = normal(2, Batch, Chunks, Chunk, State), normal(3, Batch, Chunks, Chunk, State)
    return decay, scale, *states, normal(4, Batch, Chunks, Chunk, Value)


def test_ssd_values_and_gradients():
    check_kernel(ssd, *ssd_arguments(), reference=ssd_reference, mesh={"a": 2})


Pos, Channel, Taps = Axis("pos", 16), Axis("channel", 64), Axis("taps", 4)


@named_kernel(
    "taps channel, batch pos channel -> batch pos channel",
    policies={"pos": Halo(before=Taps.size - 1), "batch": Parallel(), "channel": Parallel()},
)
def short_convolution(weights, x):
    from levanter.kernels.triton.short_conv import short_conv

    return short_conv(weights, x, implementation="reference")[:, Taps.size - 1 :]


@plain
def convolution_reference(weights, x):
    def one(x, w):
        return jnp.convolve(x, w, precision="highest")[: Pos.size]

    return jax.vmap(jax.vmap(one, (1, 1), 1), (0, None))(x, weights)


def test_short_convolution_values_and_gradients():
    pytest.importorskip("levanter.kernels.triton.short_conv", reason="marin-levanter 0.2.20 has no short convolution")
    arguments = normal(0, Taps, Channel), normal(1, Batch, Pos, Channel)
    check_kernel(short_convolution, *arguments, reference=convolution_reference, mesh={"a": 2})
