# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Flash attention for GPUs, in Pallas with its Triton backend.

Products of 16-bit inputs run on the tensor cores and are accumulated in float32; those of float32 inputs are true
float32 products, which are slow there. Blocks that a window hides are neither loaded nor computed, whether the
offsets are known when compiling or not; with segment ids or a mask, whose content is known on the device only, every
block that the window shows is visited.

cuDNN's attention is not used, since `jax.nn.dot_product_attention` returns its logsumexp in the dtype of the output,
and one of 16 bits is too coarse to merge the parts of a ring by.

The default blocks need up to 180 KiB of shared memory, which Hopper and its successors have; a chip with less wants
smaller `block_sizes`. JAX calls its Triton backend deprecated, and means to remove it.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from haliax_kernels.attention.contract import AttentionGradients, AttentionOperands, AttentionOptions
from haliax_kernels.attention.pallas_gpu import _backward, _forward
from haliax_kernels.attention.pallas_gpu._problem import describe


@dataclass(frozen=True)
class PallasGpu:
    """The pair of `AttentionImplementation`.

    Attributes:
        interpret: run in Pallas' interpreter, on any platform: for tests, and slow.
    """

    interpret: bool = False

    def forward(
        self, options: AttentionOptions, x: AttentionOperands
    ) -> tuple[Float[Array, "group q_pos value"], Float32[Array, "group q_pos"]]:
        """As `AttentionImplementation.forward`; float16 inputs too."""
        problem = describe(options, x)
        if x.q.size == 0 or x.k.size == 0:
            o = jnp.zeros((*x.q.shape[:2], problem.value_size), options.out_dtype or problem.dtype)
            return o, jnp.full(x.q.shape[:2], -jnp.inf, jnp.float32)
        return _forward.forward(problem, x, interpret=self.interpret)

    def backward(
        self,
        options: AttentionOptions,
        x: AttentionOperands,
        lse: Float32[Array, "group q_pos"],
        do: Float[Array, "group q_pos value"],
        delta: Float32[Array, "group q_pos"],
    ) -> AttentionGradients:
        """As `AttentionImplementation.backward`."""
        problem = describe(options, x)
        if x.q.size == 0 or x.k.size == 0:
            dq, dk, dv = (jnp.zeros(a.shape, options.grad_dtype or problem.dtype) for a in (x.q, x.k, x.v))
            return AttentionGradients(dq, dk, dv, None if x.bias is None else jnp.zeros(x.bias.shape, jnp.float32))
        return _backward.backward(problem, x, lse, do, delta, interpret=self.interpret)


forward = PallasGpu().forward
backward = PallasGpu().backward
