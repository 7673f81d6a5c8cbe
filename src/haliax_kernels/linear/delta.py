# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The gated delta rule for a piece of the sequence: its chunks in turn.

With `u_t` of `haliax_kernels.linear.contract` for values it is plain linear attention. Within a chunk all u solve one
triangular system (the WY form: Yang et al. 2024, https://arxiv.org/abs/2406.06484, section 3.2; gated,
https://arxiv.org/abs/2412.06464, section 3.3),

    (I + M) U = beta * (V - (decay from the start * K) S),  M_ij = beta_i * (decay from j to i * k_i) . k_j  for j < i

with S the state at the chunk's start. Decays may be of channels (Kimi Linear, https://arxiv.org/abs/2510.26692).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from haliax_kernels.linear import decays
from haliax_kernels.linear.chunked import Piece, times
from haliax_kernels.linear.contract import LinearState
from haliax_kernels.linear.decays import square


def forward(
    piece: Piece, beta: Float32[Array, "n size"], state: LinearState, dot: decays.Dot
) -> tuple[Float32[Array, "group n size value"], LinearState]:
    """`(q S, state)` of a piece that begins with `state`; differentiable by JAX."""
    q, k, v, _ = piece
    decay = decays.of(piece.log, k.shape[1], dot)
    scores, _ = decay.scores(q, k)
    among_keys, _ = decay.scores(k[None], k)
    inverse = unit_lower_inverse(beta[..., None] * jnp.tril(among_keys[0], -1), dot) * beta[:, None, :]
    from_values = dot("nij,nje->nie", inverse, v)
    from_state = dot("nij,njd->nid", inverse, times(k, decay.from_start))
    k_end = times(k, decay.to_end)

    def step(s: Array, chunk: tuple[Array, Array, Array, Array | None]) -> tuple[Array, tuple[Array, Array]]:
        from_values, from_state, k_end, total = chunk
        u = from_values - dot("id,de->ie", from_state, s)
        kept = s if total is None else decays.decayed(s, total[:, None])
        return kept + dot("jd,je->de", k_end, u), (s, u)

    last, (starts, u) = lax.scan(step, state.s, (from_values, from_state, k_end, decay.total))
    sums = dot("gnij,nje->gnie", scores, u) + dot("gnid,nde->gnie", times(q, decay.from_start), starts)
    return sums, LinearState(last)


def unit_lower_inverse(m: Float32[Array, "n size size"], dot: decays.Dot) -> Float32[Array, "n size size"]:
    """`(I + m)^-1` for `m` that is 0 on and above the diagonal.

    Blocks on the diagonal are inverted two by two: of `[[a, 0], [b, c]]` the inverse is that of `a` and of `c`, and
    `-c^-1 b a^-1` below. As stable as substitution, which the series of powers of `m` is not: where keys are alike
    they grow as binomial coefficients do.
    """

    @jax.custom_jvp
    def inverse(m: Array) -> Array:
        size = m.shape[-1]
        found = jnp.broadcast_to(jnp.eye(size, dtype=m.dtype), m.shape)
        half = 1
        while half < size:
            between = jnp.where(square(size, half), m, 0)
            found = found - dot("nij,njk->nik", found, dot("nij,njk->nik", between, found))
            half *= 2
        return found

    @inverse.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        found = inverse(*primals)
        return found, -dot("nij,njk->nik", found, dot("nij,njk->nik", tangents[0], found))

    assert np.ndim(m) == 3
    return inverse(m)
