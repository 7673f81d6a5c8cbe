# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The forward kernel: a block of chunks each step, the state in vector memory from one to the next."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from haliax_kernels.linear.pallas_tpu.chunks import chunk_decay
from haliax_kernels.linear.pallas_tpu.plan import Plan, compiler_params, row, shape, spec


def forward(plan: Plan, operands: dict[str, Array], residuals: bool, interpret: bool) -> dict[str, Array]:
    """Run the kernel.

    Args:
        plan: of the kernel.
        operands: q, k, v, what `decay_operands` says, and the first state `s` (and `z`), all as `spec` has them.
        residuals: whether to write down what the backward kernel needs.
        interpret: for TPU interpret mode.

    Returns:
        `y`, `s_last`, `z_last` if normalised; the residuals `s_starts`, and `z_starts` and `normalizer` if normalised.
    """
    letters = "sz" if plan.normalize else "s"
    dtypes = {"y": plan.out_dtype} | {f"{a}_last": jnp.float32 for a in letters}
    if residuals:
        dtypes |= {f"{a}_starts": jnp.float32 for a in letters}
        if plan.normalize:
            dtypes["normalizer"] = jnp.float32
    scratch = [
        pltpu.VMEM((plan.value, plan.key), jnp.float32),
        pltpu.VMEM((1, plan.key), jnp.float32),
        pltpu.VMEM((plan.n, plan.value, plan.key), plan.dtype),
        pltpu.VMEM((plan.n, 1, plan.key), jnp.float32),
    ]
    outputs = pl.pallas_call(
        functools.partial(_kernel, plan, tuple(operands), tuple(dtypes)),
        grid=(plan.blocks, plan.head_blocks),
        in_specs=[spec(plan, name) for name in operands],
        out_specs=[spec(plan, name) for name in dtypes],
        out_shape=[shape(plan, name, dtype) for name, dtype in dtypes.items()],
        scratch_shapes=scratch,
        compiler_params=compiler_params(interpret),
        name="linear_attention_forward",
    )(*operands.values())
    return dict(zip(dtypes, outputs, strict=True))


def _kernel(plan: Plan, inputs: tuple[str, ...], outputs: tuple[str, ...], *refs: Any) -> None:
    named = dict(zip((*inputs, *outputs), refs, strict=False))
    s, z, s_chunks, z_chunks = refs[-4:]
    first, last_block = pl.program_id(0) == 0, pl.program_id(0) == plan.blocks - 1
    last_head = pl.program_id(1) == plan.head_blocks - 1
    chunks = [chunk_decay(plan, named, c) for c in range(plan.n)]

    @pl.when(first & (pl.program_id(1) == 0))
    def _():
        s[...] = named["s"][...]
        if plan.normalize:
            z[...] = named["z"][...]

    def states():
        if "s_starts" in named:
            named["s_starts"][...] = s[...]
            if plan.normalize:
                named["z_starts"][...] = z[...]
        s_now, z_now = s[...], z[...]
        for c, decay in enumerate(chunks):
            s_chunks[c], z_chunks[c] = plan.narrow(s_now), z_now
            k = decay.to_end(named["k"][plan.rows(c), :])
            s_now = decay.carry(s_now) + plan.dot(named["v"][plan.rows(c), :], plan.narrow(k), (0, 0))
            if plan.normalize:
                z_now = decay.carry(z_now) + k.astype(jnp.float32).sum(0, keepdims=True)
        s[...], z[...] = s_now, z_now

    if plan.head_blocks == 1:
        states()
    else:
        pl.when(pl.program_id(1) == 0)(states)

    for g in range(plan.heads):
        for c, decay in enumerate(chunks):
            rows = plan.rows(c)
            q, k, v = named["q"][g, rows, :], named["k"][rows, :], named["v"][rows, :]
            scores, q_start = decay.scores(q, k), decay.from_start(q)
            # The normaliser sums what the products see, so that a quotient is the mean that it should be.
            scores, q_start = plan.narrow(scores), plan.narrow(q_start)
            sums = plan.dot(scores, v, (1, 0)) + plan.dot(q_start, s_chunks[c], (1, 1))
            factor: Any = plan.scale
            if plan.normalize:
                normalizer = scores.astype(jnp.float32).sum(1, keepdims=True)
                normalizer += (q_start.astype(jnp.float32) * z_chunks[c]).sum(1, keepdims=True)
                least = jnp.where(normalizer < 0, -plan.epsilon, plan.epsilon)
                factor = plan.scale / jnp.where(jnp.abs(normalizer) < plan.epsilon, least, normalizer)
                if "normalizer" in named:
                    named["normalizer"][g, c : c + 1, :] = row(normalizer)
            named["y"][g, rows, :] = (sums * factor).astype(plan.out_dtype)

    @pl.when(last_block & last_head)
    def _():
        named["s_last"][...] = s[...]
        if plan.normalize:
            named["z_last"][...] = z[...]
