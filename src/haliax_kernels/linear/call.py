# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""A call of `linear_attention` or of its step: what both read from their arguments, and check."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import haliax
import jax.numpy as jnp
from haliax import AxisSelector, NamedArray
from haliax.axis import axis_name

from haliax_kernels.errors import ArgumentError
from haliax_kernels.linear.backends import Decay, Layout
from haliax_kernels.linear.feature_maps import FeatureMap, check_name, needs_normalizer


class LinearAttentionState(NamedTuple):
    """What is left of the tokens before. A PyTree of NamedArrays, in float32; FEATURE is the axis `<Key>_feature`.

    Attributes:
        s: {loop axes, FEATURE, Value}, the decayed sum of `key^T value`.
        z: {loop axes, FEATURE}, the decayed sum of keys; None where results are not normalised.
        shift: {loop axes}, what the feature map `exp` has subtracted from the keys; None for other maps.
    """

    s: NamedArray
    z: NamedArray | None = None
    shift: NamedArray | None = None


@dataclass(frozen=True)
class Call:
    """What `linear_attention` and its step read from their arguments alike."""

    qkv: tuple[NamedArray, NamedArray, NamedArray]
    log_decay: NamedArray | None
    decay: Decay | None
    normalize: bool
    shifted: bool
    state: tuple[NamedArray | None, NamedArray | None, NamedArray | None]
    axes: dict[str, Any]

    def layout(self, *, return_state: bool) -> Layout:
        """Of the kernel for a sequence that is whole."""
        return Layout(self.decay, self.normalize, self.shifted, return_state, sharded=False)

    @staticmethod
    def of(
        name: str,
        Pos: AxisSelector | None,
        Key: AxisSelector,
        query: NamedArray,
        key: NamedArray,
        value: NamedArray,
        feature_map: FeatureMap,
        decay: NamedArray | float | None,
        gate: NamedArray | None,
        beta: NamedArray | None,
        normalize: bool,
        state: LinearAttentionState | None,
        segment_ids: NamedArray | None = None,
    ) -> "Call":
        """Read and check them.

        Raises:
            ArgumentError: they contradict each other.
        """
        pos, head = None if Pos is None else axis_name(Pos), axis_name(Key)
        check_name(feature_map)
        if needs_normalizer(feature_map) and not normalize:
            raise ArgumentError(
                f"{name}: feature_map={feature_map!r} scales queries and keys, which only the normaliser takes back. "
                "Use normalize=True, or a function: feature_map=jnp.exp."
            )
        if beta is not None and normalize:
            raise ArgumentError(f"{name}: results of the delta rule (beta) have no normaliser; pass normalize=False.")
        dtype = jnp.result_type(query.dtype, key.dtype, value.dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ArgumentError(f"{name}: query, key and value must be floating-point, but together are {dtype}.")
        shifted = feature_map == "exp"
        states = _checked_state(name, state, normalize, shifted)
        log_decay = _log_decay(name, decay, gate, pos, head)
        others = [x for x in (key, value, log_decay, segment_ids, beta, *states) if x is not None]
        shared = {a.name for x in others for a in x.axes}
        group = tuple(a.name for a in query.axes if a.name not in shared and a.name not in (pos, head))
        not_values = {a.name for x in (query, key) for a in x.axes}
        values = (head,) if value.has_axis(head) else tuple(a.name for a in value.axes if a.name not in not_values)
        rank = None
        if log_decay is not None:
            rank = "channel" if log_decay.has_axis(head) else "token" if pos and log_decay.has_axis(pos) else "head"
        q, k, v = (x if x.dtype == dtype else x.astype(dtype) for x in (query, key, value))
        axes = {"group": group, "key": head, "value": values, "feature": f"{head}_feature"}
        if pos is not None:
            axes["pos"] = pos
        return Call((q, k, v), log_decay, rank, normalize, shifted, states, axes)


def _log_decay(
    name: str, decay: NamedArray | float | None, gate: NamedArray | None, pos: str | None, head: str
) -> NamedArray | None:
    """The logarithm of all decay there is."""
    if gate is not None and pos is not None and not gate.has_axis(pos):
        raise ArgumentError(
            f"{name}: gate has axes {[a.name for a in gate.axes]}, and not {pos!r}. For one decay of all tokens pass "
            "decay=haliax.exp(gate)."
        )
    if decay is None:
        return None if gate is None else gate.astype(jnp.float32)
    if isinstance(decay, NamedArray):
        wrong = [a for a in (pos, head) if a is not None and decay.has_axis(a)]
        if wrong:
            raise ArgumentError(
                f"{name}: decay has axis {wrong[0]!r}, but is constant; a decay of each token is given by its "
                "logarithm: gate=haliax.log(decay)."
            )
        wide = decay.astype(jnp.float32)
    elif 0 <= decay <= 1:
        wide = haliax.named(jnp.float32(decay), ())
    else:
        raise ArgumentError(f"{name}: decay={decay!r} is not from 0 to 1.")
    # Without a gradient of 0 * inf at a decay of 0.
    log = haliax.where(wide > 0, haliax.log(haliax.where(wide > 0, wide, 1.0)), -jnp.inf)
    return log if gate is None else log + gate.astype(jnp.float32)


def _checked_state(
    name: str, state: LinearAttentionState | None, normalize: bool, shifted: bool
) -> tuple[NamedArray | None, NamedArray | None, NamedArray | None]:
    if state is None:
        return None, None, None
    wanted = {"z": (state.z, normalize, "normalize=True"), "shift": (state.shift, shifted, "'exp'")}
    for part, (found, needed, why) in wanted.items():
        if (found is not None) != needed:
            what = "lacks" if needed else "has"
            raise ArgumentError(
                f"{name}: the state {what} {part!r}, which there is with {why} only. Use the same normalize and "
                "feature_map in every call that a state goes through."
            )
    return state
