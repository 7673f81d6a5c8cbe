# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Feature maps: what makes queries and keys of linear attention out of those of a model.

A map is a name or a function of one array, applied to queries and keys alike.
"""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from haliax_kernels.errors import ArgumentError

Name = Literal["elu+1", "relu", "identity", "exp"]
FeatureMap = Name | Callable[[Array], Array]


def elu_plus_one(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """`exp(x)` below 0 and `x + 1` above (Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, equation 7).

    As an exponential, and in float32: `elu(x) + 1` in 16 bits rounds to 0 where x is -8, and then nothing is left to
    normalise by.
    """
    wide = x.astype(jnp.float32)
    return jnp.where(wide > 0, wide + 1, jnp.exp(jnp.where(wide > 0, 0, wide))).astype(x.dtype)


def queries(feature_map: FeatureMap, q: Float[Array, "*axes key"]) -> Float[Array, "*axes key"]:
    """The map of queries.

    `exp` subtracts from each query the largest of its own channels. That scales its result and its normaliser alike,
    so that it is exact if results are normalised, and only then (see `needs_normalizer`).
    """
    if feature_map == "exp":
        wide = q.astype(jnp.float32)
        return jnp.exp(wide - lax.stop_gradient(wide.max(-1, keepdims=True))).astype(q.dtype)
    return _plain(feature_map, q)


def keys(
    feature_map: FeatureMap, k: Float[Array, "pos key"], shift: Float32[Array, ""] | None = None
) -> Float[Array, "pos key"]:
    """The map of the keys of one head.

    `exp` subtracts one number from all keys, which scales all results and normalisers alike: it too is exact if
    results are normalised, and only then. The number is `shift`, or the largest element of `k`, over tokens and
    channels. All keys that meet in one state need the same number: pass it where the sequence is sharded (`lax.pmax`
    of `key_shift`), or goes on from a state. Keys more than 87 below it vanish in float32.
    """
    if feature_map == "exp":
        shift = key_shift(k) if shift is None else lax.stop_gradient(shift)
        return jnp.exp(k.astype(jnp.float32) - shift).astype(k.dtype)
    return _plain(feature_map, k)


def key_shift(k: Float[Array, "pos key"]) -> Float32[Array, ""]:
    """What `keys` subtracts for `exp`: the largest element, of which no gradient is needed."""
    return lax.stop_gradient(k.astype(jnp.float32).max(initial=-jnp.inf))


def needs_normalizer(feature_map: FeatureMap) -> bool:
    """Whether the map is only right if results are normalised."""
    return feature_map == "exp"


def check_name(feature_map: FeatureMap) -> None:
    """Refuse a name that is none.

    Raises:
        ArgumentError: it says which there are.
    """
    if not callable(feature_map) and feature_map not in get_args(Name):
        names = ", ".join(repr(name) for name in get_args(Name))
        raise ArgumentError(f"feature_map={feature_map!r} is none of {names}, or a function.")


def _plain(feature_map: FeatureMap, x: Array) -> Array:
    check_name(feature_map)
    if callable(feature_map):
        return feature_map(x)
    if feature_map == "elu+1":
        return elu_plus_one(x)
    if feature_map == "relu":
        return jax.nn.relu(x)
    return x
