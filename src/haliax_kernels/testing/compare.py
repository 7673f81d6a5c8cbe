# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Compare what was found with what was expected: how large the difference is, where it lies, what it looks like."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

_RTOL = {"float64": 1e-9, "complex128": 1e-9, "float32": 2e-5, "complex64": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
_NARROW = 0.25  # the 8-bit types


@dataclass(frozen=True)
class Tolerance:
    """How far two results may be apart: `atol + rtol * (the largest expected element)`.

    Attributes:
        rtol: None for that of the dtype: float64 1e-9, float32 2e-5, float16 4e-3, bfloat16 2e-2, 0 for integers.
        atol: None for twice the dtype's machine epsilon.
    """

    rtol: float | None = None
    atol: float | None = None

    def limit(self, dtype: Any, scale: float) -> float:
        if not jnp.issubdtype(dtype, jnp.inexact):
            return 0.0
        rtol = _RTOL.get(str(dtype), _NARROW) if self.rtol is None else self.rtol
        atol = 2 * float(jnp.finfo(dtype).eps) if self.atol is None else self.atol
        return atol + rtol * scale


@dataclass(frozen=True)
class Difference:
    """Two results that disagree, both as float64 (or complex128)."""

    found: np.ndarray
    expected: np.ndarray
    wrong: np.ndarray

    def text(self) -> str:
        """How large the difference is."""
        gap = np.abs(self.found - self.expected)
        at = np.unravel_index(np.argmax(np.where(self.wrong, np.nan_to_num(gap, nan=np.inf), -1)), gap.shape)
        where = f" at {tuple(int(i) for i in at)}" if gap.ndim else ""
        scale = _largest(self.expected)
        relative = f", {gap[at] / scale:.2g} of the largest element" if scale and np.isfinite(gap[at]) else ""
        return (
            f"{int(self.wrong.sum())} of {self.wrong.size} elements are wrong, the most by {gap[at]:.3g}{relative} "
            f"(found {self.found[at]:.6g}, expected {self.expected[at]:.6g}{where})"
        )

    def factor(self) -> float | None:
        """The constant by which what was found is larger, if it is one."""
        counted = self.wrong & (np.abs(self.expected) > 1e-3 * _largest(self.expected))
        if counted.sum() < 2:
            return None
        ratios = np.real(self.found[counted] / self.expected[counted])
        middle = float(np.median(ratios))
        return middle if np.isfinite(middle) and np.allclose(ratios, middle, rtol=1e-2, atol=1e-3) else None

    def where(self, dim: int, shards: int) -> tuple[str, str | None]:
        """(where along a sharded dimension the wrong elements lie, a hint for the remedy).

        The hint: they lie near borders between shards, `before`, `after` or `both`, which are the rows of neighbours
        that may be missing; or at the end of every shard, a `remainder`.
        """
        size = self.wrong.shape[dim]
        rows = np.flatnonzero(self.wrong.any(axis=tuple(d for d in range(self.wrong.ndim) if d != dim)))
        own = size // shards
        bad = sorted({int(r) // own for r in rows})
        first = max(int(r) % own for r in rows) + 1
        last = max(own - 1 - int(r) % own for r in rows) + 1
        if first < own and 0 not in bad:
            return f"only in the first {first} of {own} rows of {_listed(bad)}", "before"
        if last < own:
            side = "remainder" if shards - 1 in bad else "after"
            return f"only in the last {last} of {own} rows of {_listed(bad)}", side
        borders = [own * n for n in range(1, shards)]
        near = max(min(max(b - 1 - int(r), int(r) - b) for b in borders) for r in rows) if borders else own
        if near < (own - 1) // 2:
            return f"only within {near + 1} rows of the borders between shards", "both"
        if len(bad) < shards:
            return f"only in {_listed(bad)} of {shards}", None
        return f"in all {shards} shards", None


def compare(found: np.ndarray, expected: np.ndarray, limit: float) -> Difference | None:
    """What differs by more than `limit`; None where nothing does. NaNs and infinities must be in the same places."""
    a, b = _wide(found), _wide(expected)
    with np.errstate(invalid="ignore"):
        close = (np.abs(a - b) <= limit) | (a == b) | (np.isnan(a) & np.isnan(b))
    return None if close.all() else Difference(a, b, ~close)


def scale_of(arrays: list[np.ndarray]) -> list[float]:
    """Per array the size of its elements, and at least a hundredth of the largest array's: below that is rounding."""
    largest = [_largest(_wide(v)) for v in arrays]
    return [max(v, 1e-2 * max(largest)) for v in largest]


def _largest(v: np.ndarray) -> float:
    finite = np.abs(v[np.isfinite(v)])
    return float(finite.max()) if finite.size else 0.0


def _wide(v: np.ndarray) -> np.ndarray:
    return v.astype(np.complex128 if np.iscomplexobj(v) else np.float64)


def _listed(shards: list[int]) -> str:
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"
