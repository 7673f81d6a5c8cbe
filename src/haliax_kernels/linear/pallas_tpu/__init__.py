# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Chunked linear attention in Pallas kernels for TPUs, under the contract of `haliax_kernels.linear.contract`.

Float32 and bfloat16, every option. `jax.vmap` over batch and key/value heads; what is not mapped is read once for all.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.linear import decays
from haliax_kernels.linear.contract import LinearGradients, LinearOperands, LinearOptions, LinearState
from haliax_kernels.linear.pallas_tpu import backward as _backward
from haliax_kernels.linear.pallas_tpu import forward as _forward
from haliax_kernels.linear.pallas_tpu.channel import pair_masks
from haliax_kernels.linear.pallas_tpu.plan import Plan, decay_operands, plan_for
from haliax_kernels.linear.xla import first_state, result_gradients

__all__ = ["backward", "forward"]

_LEAST_CHUNK = 16


class Residuals(NamedTuple):
    """What the gradients need beside the operands.

    Attributes:
        s_starts: the states at the blocks' starts, transposed.
        z_starts: those of the normaliser.
        y: the results, if they are normalised.
        normalizer: `q . z`.
    """

    s_starts: Float32[Array, "blocks value key"]
    z_starts: Float32[Array, "blocks 1 key"] | None
    y: Float[Array, "group pos value"] | None
    normalizer: Float32[Array, "group pos"] | None


def forward(
    options: LinearOptions, x: LinearOperands, *, residuals: bool = False, interpret: bool = False
) -> tuple[Float[Array, "group pos value"], LinearState, Residuals | None]:
    """As `LinearImplementation.forward`.

    Args:
        options: the static part of the call.
        x: its arrays; float32 or bfloat16.
        residuals: whether to return what `backward` needs.
        interpret: the call is under `pltpu.force_tpu_interpret_mode()`. Needed there under `jax.vmap` only.

    Raises:
        UnsupportedOptionError: naming the argument that the kernel cannot honour.
    """
    _check(options, x)
    state = first_state(options, x)
    plan = plan_for(options, x, backward=False)
    if plan.length == 0:
        y = jnp.zeros((plan.group, 0, plan.value), plan.out_dtype)
        return y, state, Residuals(state.s[None], None, None, None) if residuals else None
    operands = _operands(plan, x) | _transposed(state, "")
    found = _forward.forward(plan, operands, residuals, interpret)
    y = found["y"][:, : plan.length]
    last = _state(found, "_last")
    if not residuals:
        return y, last, None
    if not plan.normalize:
        return y, last, Residuals(found["s_starts"], None, None, None)
    normalizer = found["normalizer"].reshape(plan.group, -1)[:, : plan.length]
    return y, last, Residuals(found["s_starts"], found["z_starts"], y, normalizer)


def backward(
    options: LinearOptions,
    x: LinearOperands,
    residuals: Residuals,
    dy: Float[Array, "group pos value"],
    dstate: LinearState,
    *,
    interpret: bool = False,
) -> LinearGradients:
    """As `LinearImplementation.backward`, in one kernel."""
    _check(options, x)
    plan = plan_for(options, x, backward=True)
    if plan.length == 0:
        dlog = None if x.log_decay is None else jnp.zeros_like(x.log_decay)
        return LinearGradients(jnp.zeros_like(x.q), jnp.zeros_like(x.k), jnp.zeros_like(x.v), dlog, dstate)
    operands = _operands(plan, x)
    if plan.normalize:
        d = result_gradients(options, dy, residuals.y, residuals.normalizer, plan.dtype)
        assert d.normalizer is not None and residuals.z_starts is not None
        operands["dsums"] = plan.pad(d.sums, 1)
        dnormalizer = plan.pad(d.normalizer, 1)
        operands["dnormalizer"] = dnormalizer.reshape(plan.group, plan.blocks, plan.n, plan.size)
        operands["z_starts"] = residuals.z_starts
    else:
        operands["dsums"] = plan.pad(dy.astype(plan.dtype), 1)
    if plan.decay == "channel":
        operands["masks"] = pair_masks(plan)
    operands |= {"s_starts": residuals.s_starts} | _transposed(dstate, "_dlast")
    found = _backward.backward(plan, operands, interpret)
    return LinearGradients(
        found["dq"][:, : plan.length],
        found["dk"][: plan.length],
        found["dv"][: plan.length],
        decays.per_operand(_dlog(plan, operands, found), x.log_decay, x.segment_ids),
        _state(found, "_dfirst"),
    )


def _operands(plan: Plan, x: LinearOperands) -> dict[str, Array]:
    return {"q": plan.pad(x.q, 1), "k": plan.pad(x.k, 0), "v": plan.pad(x.v, 0)} | decay_operands(plan, x)


def _transposed(state: LinearState, suffix: str) -> dict[str, Array]:
    named = {f"s{suffix}": state.s.T}
    return named if state.z is None else named | {f"z{suffix}": state.z[None]}


def _state(found: dict[str, Array], suffix: str) -> LinearState:
    z = found.get(f"z{suffix}")
    return LinearState(found[f"s{suffix}"].T, None if z is None else z[0])


def _dlog(plan: Plan, operands: dict[str, Array], found: dict[str, Any]) -> Array | None:
    """The gradient by the logs of decays, from what the kernel says passed through them."""
    if not plan.want_log:
        return None
    if plan.decay == "channel":
        return found["dlog"][: plan.length]
    between, through_q, through_k = (found["drows"][:, i] for i in range(3))
    factors = operands["rows"][:, 4:6, 0].sum(-1)
    through = found["through"].sum((1, 2)) * factors
    dlog = between + decays.after(through_q, 1) + decays.before(through_k, 1) + through[:, None]
    return dlog.reshape(-1)[: plan.length]


def _check(options: LinearOptions, x: LinearOperands) -> None:
    for name, a in (("q", x.q), ("k", x.k), ("v", x.v)):
        if a.dtype not in (jnp.float32, jnp.bfloat16) or a.dtype != x.q.dtype:
            raise UnsupportedOptionError(
                f"{name}: the Pallas TPU linear attention takes float32 or bfloat16, the same for q, k and v, got "
                f"{a.dtype}; cast it, or use implementation='xla'."
            )
    if x.beta is not None:
        raise UnsupportedOptionError("beta: the Pallas TPU kernels have no delta rule; use implementation='xla'.")
    if options.chunk_size is not None and options.chunk_size < _LEAST_CHUNK:
        raise UnsupportedOptionError(
            f"chunk_size={options.chunk_size}: the Pallas TPU linear attention needs {_LEAST_CHUNK} or more."
        )
