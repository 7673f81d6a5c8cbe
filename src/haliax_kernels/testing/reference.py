# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The unsharded kernel against a reference function of the same arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray

from haliax_kernels.testing.baseline import Baseline
from haliax_kernels.testing.call import Arrays, KernelCall, gradients_of, on_host, plain, single_device_mesh
from haliax_kernels.testing.compare import Tolerance, compare, scale_of
from haliax_kernels.testing.report import KernelCheckError


def check_reference(base: Baseline, reference: Callable[..., Any]) -> str:
    """Compare values, and gradients where they are checked, with those of `reference`, in float64 where it runs in it.

    Returns:
        A note on what was compared.

    Raises:
        KernelCheckError: they differ, or the reference returns something of another shape.
    """
    call, cotangents = base.call, base.cotangents
    names = [[a.name for a in out.axes] for out in call.plan((), single_device_mesh()).outputs]

    def function(*arrays: Any) -> Arrays:
        args, kwargs = call.arguments(arrays)
        return _ordered(call, reference(*args, **kwargs), names)

    try:
        with jax.enable_x64(True):
            values, gradients = _evaluated(function, call.widened(), cotangents)
        precision = "float64"
    except KernelCheckError:
        raise
    except Exception:  # a reference need not run in float64
        values, gradients = _evaluated(function, call, cotangents)
        precision = "its own dtypes"
    _compare(
        call,
        "the value of output {}",
        [str(i) for i in range(len(values))],
        base.results.values,
        values,
        base.tolerance,
    )
    note = f"of the unsharded call agree with the reference, in {precision}"
    if gradients is None or base.results.gradients is None:
        return f"values {note}"
    labels = [repr(call.shape.infos[i].label) for i in call.moving]
    found = [base.results.gradients[i] for i in call.moving]
    _compare(call, "the gradient of argument {}", labels, found, gradients, base.tolerance)
    return f"values and gradients {note}"


def _evaluated(
    function: Callable[..., Arrays], call: KernelCall, cotangents: Arrays | None
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...] | None]:
    values = on_host(jax.jit(function)(*call.arrays))
    if cotangents is None:
        return values, None
    return values, on_host(gradients_of(function, call.moving, call.arrays, cotangents)[1])


def _compare(
    call: KernelCall,
    what: str,
    labels: Sequence[str],
    found: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    tolerance: Tolerance,
) -> None:
    for label, v, want, scale in zip(labels, found, expected, scale_of(list(expected)), strict=True):
        subject = f"kernel {call.name!r}: {what.format(label)}"
        if v.shape != want.shape:
            raise KernelCheckError(f"{subject} has shape {v.shape}, but the reference's has {want.shape}.")
        difference = compare(v, want, tolerance.limit(v.dtype, scale))
        if difference is not None:
            raise KernelCheckError(
                f"{subject} is not that of the reference, even unsharded.\n  difference:    {difference.text()}"
            )


def _ordered(call: KernelCall, outs: Any, names: Sequence[Sequence[str]]) -> Arrays:
    """The reference's outputs with their axes in the order of the kernel's."""
    several = outs if isinstance(outs, tuple | list) else (outs,)
    for i, out in enumerate(several):
        if isinstance(out, NamedArray) and i < len(names) and {a.name for a in out.axes} != set(names[i]):
            raise KernelCheckError(
                f"kernel {call.name!r}: the reference returns output {i} with axes "
                f"({', '.join(a.name for a in out.axes)}), but the kernel's has ({', '.join(names[i])})."
            )
    return plain(
        tuple(
            hax.rearrange(o, tuple(n)) if isinstance(o, NamedArray) else o for o, n in zip(several, names, strict=True)
        )
    )
