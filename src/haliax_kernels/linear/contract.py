# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What every implementation of linear attention computes: `forward` and `backward`, on one device's arrays.

With the state `S` (key, value) and, if results are normalised, `z` (key), token by token:

    S_t = exp(log_decay_t) * S_{t-1} + k_t^T v_t
    z_t = exp(log_decay_t) * z_{t-1} + k_t
    y_t = scale * q_t S_t                                           not normalised
    y_t = scale * q_t S_t / n_t,  n_t = clamp(q_t . z_t)            normalised

With `beta` the delta rule (DeltaNet; gated with a decay: Yang et al. 2024, https://arxiv.org/abs/2412.06464, equation
10) has in place of `v_t` what is missing to it in the state:

    u_t = beta_t * (v_t - k_t (exp(log_decay_t) * S_{t-1}))
    S_t = exp(log_decay_t) * S_{t-1} + k_t^T u_t                    never normalised

`clamp(n)` has n's sign (0 counts as positive) and at least the size `epsilon`; where it is in force no gradient
goes to the normaliser. Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, equations 16 to 20, with a decay:
a constant one as in RetNet (Sun et al. 2023, https://arxiv.org/abs/2307.08621), one a token as in Mamba-2 (Dao and Gu
2024, https://arxiv.org/abs/2405.21060), one a token and key channel as in GLA (Yang et al. 2024,
https://arxiv.org/abs/2312.06635, equation 3).

The arrays belong to one key/value head and the group of query heads that share it; `jax.vmap` over batch and key/value
heads.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32


@dataclass(frozen=True)
class LinearOptions:
    """The static part of a call.

    Attributes:
        scale: what `q_t S_t` is multiplied by; it does not cancel against the normaliser, which has none.
        normalize: whether results are divided by `q_t . z_t`.
        epsilon: the least size of the normaliser. With features that are not negative it only matters where all of
            them vanish, so that it may be far below any sum that counts.
        chunk_size: tokens per chunk, a power of 2; None for what suits the shapes.
        out_dtype: the dtype of `y`; None for q's.
        decay_gradient: whether the gradient by `log_decay` is wanted; it costs a matrix product a chunk.
    """

    scale: float = 1.0
    normalize: bool = False
    epsilon: float = 1e-12
    chunk_size: int | None = None
    out_dtype: DTypeLike | None = None
    decay_gradient: bool = True

    def __post_init__(self):
        size = self.chunk_size
        if size is not None and (size < 1 or size & (size - 1) or size > MAX_CHUNK):
            raise ValueError(f"chunk_size must be a power of 2 of at most {MAX_CHUNK}, got {size!r}")
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon!r}")


# Cumulative logs within a chunk are exact to this length (see `decays.FLOOR`).
MAX_CHUNK = 256


class LinearState(NamedTuple):
    """What is left of the tokens before.

    Attributes:
        s: the decayed sum of `k^T v`.
        z: the decayed sum of `k`; None where results are not normalised.
    """

    s: Float32[Array, "key value"]
    z: Float32[Array, " key"] | None = None


class LinearOperands(NamedTuple):
    """The arrays of a call. All must be finite but `log_decay`, which may be -inf.

    Attributes:
        q: the queries after the feature map; float32 or a 16-bit dtype.
        k: the keys after the feature map, in q's dtype.
        v: the values, in q's dtype; their size may differ from the keys'.
        log_decay: at most 0, float32: of the head, of each token, or of each token and key channel; None for no decay.
        segment_ids: where the id changes, the state starts anew. An id that comes again later is another segment.
        state: what the first token's segment starts from, decayed by the first token's decay; None for zero.
        beta: for the delta rule, from 0 to 1 (or to 2) for keys of length 1; None for the plain sum.
    """

    q: Float[Array, "group pos key"]
    k: Float[Array, "pos key"]
    v: Float[Array, "pos value"]
    log_decay: Float32[Array, ""] | Float32[Array, " pos"] | Float32[Array, "pos key"] | None = None
    segment_ids: Int32[Array, " pos"] | None = None
    state: LinearState | None = None
    beta: Float[Array, " pos"] | None = None


class LinearGradients(NamedTuple):
    """The gradients, each in the dtype of what it is the gradient of; `state` is never None."""

    q: Float[Array, "group pos key"]
    k: Float[Array, "pos key"]
    v: Float[Array, "pos value"]
    log_decay: Float32[Array, ""] | Float32[Array, " pos"] | Float32[Array, "pos key"] | None
    state: LinearState
    beta: Float[Array, " pos"] | None = None


class LinearImplementation(Protocol):
    """A module or object with both. It honours every option and operand, or raises `UnsupportedOptionError`."""

    def forward(
        self, options: LinearOptions, x: LinearOperands, *, residuals: bool = False
    ) -> tuple[Float[Array, "group pos value"], LinearState, Any]:
        """`(y, state, residuals)`: the results, the state after the last token, and what `backward` needs of both.

        Products of 16-bit inputs are accumulated in float32, and the state is float32. The residuals are a PyTree of
        arrays, linear in the length; None unless they are asked for.
        """
        ...

    def backward(
        self,
        options: LinearOptions,
        x: LinearOperands,
        residuals: Any,
        dy: Float[Array, "group pos value"],
        dstate: LinearState,
    ) -> LinearGradients:
        """The gradients of `y` and the final state together."""
        ...
