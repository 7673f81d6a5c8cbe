# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Chunked linear attention for GPUs, in Pallas with its Triton backend: `haliax_kernels.linear.contract`.

Float32, bfloat16 and float16, every option but the delta rule. One kernel takes the state from chunk to chunk and
writes it down at each chunk's start, and another has the results of all chunks at once: FlashLinearAttention with its
states materialised (Yang et al. 2024, https://arxiv.org/abs/2312.06635). The gradients compute the states once more,
so that none of them are kept until then. `jax.vmap` over batch and key/value heads.

Products of bfloat16 inputs run on the tensor cores in bfloat16, those of float16 inputs in TF32 where a sum or a
quotient might leave float16's range, and those of float32 inputs as true float32 products, which are slow there.
JAX calls its Triton backend deprecated, and means to remove it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from haliax_kernels.linear import decays
from haliax_kernels.linear.contract import LinearGradients, LinearOperands, LinearOptions, LinearState
from haliax_kernels.linear.pallas_gpu.gradients import gradients
from haliax_kernels.linear.pallas_gpu.outputs import outputs
from haliax_kernels.linear.pallas_gpu.plan import Plan, decay_operands, plan_for
from haliax_kernels.linear.pallas_gpu.states import states
from haliax_kernels.linear.xla import first_state, result_gradients

__all__ = ["backward", "forward"]


class Residuals(NamedTuple):
    """What the gradients need beside the operands, if results are normalised.

    Attributes:
        y: the results.
        normalizer: `q . z`.
    """

    y: Float[Array, "group pos value"] | None
    normalizer: Float32[Array, "group pos"] | None


def forward(
    options: LinearOptions, x: LinearOperands, *, residuals: bool = False, interpret: bool = False
) -> tuple[Float[Array, "group pos value"], LinearState, Residuals | None]:
    """As `LinearImplementation.forward`.

    Args:
        options: the static part of the call.
        x: its arrays; float32, bfloat16 or float16.
        residuals: whether to return what `backward` needs.
        interpret: run in Pallas' interpreter, on any platform: for tests, and slow.

    Raises:
        UnsupportedOptionError: naming the argument that the kernels cannot honour.
    """
    plan, state = plan_for(options, x), first_state(options, x)
    dtype = options.out_dtype or x.q.dtype
    if x.q.size == 0:
        y = jnp.zeros((plan.group, plan.length, plan.value), dtype)
        return y, state, Residuals(y, jnp.zeros(y.shape[:2], jnp.float32)) if residuals else None
    decay = decay_operands(plan, x)
    borders, last = states(plan, decay, state, x.k[None], x.v[None], interpret=interpret)
    decay = {name: a for name, a in decay.items() if name in ("from_start", "exact", "rest", "log")}
    operands = {"q": x.q, "k": x.k, "v": x.v} | decay | borders
    found = outputs(plan, operands, dtype, residuals=residuals, interpret=interpret)
    if not residuals:
        return found["y"], last, None
    return found["y"], last, Residuals(found["y"] if options.normalize else None, found.get("normalizer"))


def backward(
    options: LinearOptions,
    x: LinearOperands,
    residuals: Residuals,
    dy: Float[Array, "group pos value"],
    dstate: LinearState,
    *,
    interpret: bool = False,
) -> LinearGradients:
    """As `LinearImplementation.backward`."""
    plan = plan_for(options, x)
    if x.q.size == 0:
        dlog = None if x.log_decay is None else jnp.zeros_like(x.log_decay)
        return LinearGradients(jnp.zeros_like(x.q), jnp.zeros_like(x.k), jnp.zeros_like(x.v), dlog, dstate)
    dnormalizer, dsums = None, dy
    if options.normalize:
        y, normalizer = residuals
        dsums, dnormalizer = result_gradients(options, dy, y, normalizer, plan.narrow_dtype)
    elif dsums.dtype != plan.dtype:
        dsums = plan.narrow(dsums)
    decay = decay_operands(plan, x)
    borders, _ = states(plan, decay, first_state(options, x), x.k[None], x.v[None], interpret=interpret)
    dborders, dfirst = states(plan, decay, dstate, x.q, dsums, dnormalizer, reverse=True, interpret=interpret)
    operands = {"q": x.q, "k": x.k, "v": x.v, "dsums": dsums} | decay | borders
    operands |= {f"d{name}": a for name, a in dborders.items()}
    if dnormalizer is not None:
        operands["dnormalizer"] = dnormalizer
    found = gradients(plan, operands, interpret=interpret)
    dlog = _dlog(plan, operands | found) if plan.want_log else None
    dlog = decays.per_operand(dlog, x.log_decay, x.segment_ids)
    return LinearGradients(found["dq"], found["dk"], found["dv"], dlog, dfirst)


def _dlog(plan: Plan, found: dict[str, Array]) -> Float32[Array, " pos"] | Float32[Array, "pos key"]:
    """The gradient by the logs of decays, from what passed through them."""
    # Of tokens there is one for each block of keys.
    dlog_q, dlog_k = found["dlog_q"].sum(0), found["dlog_k"]
    dlog = dlog_q + dlog_k if plan.decay == "channel" else (dlog_q + dlog_k).sum(0)
    through = jnp.einsum("nde,nde->nd", found["s_borders"], found["ds_borders"], precision="highest")
    if plan.options.normalize:
        through = through + found["z_borders"] * found["dz_borders"]
    through = (through if plan.decay == "channel" else through.sum(1)) * jnp.exp(found["total"])
    return dlog + jnp.repeat(through, plan.size, axis=0)[: plan.length]
