# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`check_kernel`: prove a kernel right under every sharding that it accepts."""

from collections.abc import Callable, Mapping
from typing import Any

import haliax as hax
import jax

from haliax_kernels.binding import AxisBinding
from haliax_kernels.kernel import NamedKernel
from haliax_kernels.testing.baseline import run_unsharded
from haliax_kernels.testing.call import make_mesh, read_call, single_device_mesh
from haliax_kernels.testing.compare import Tolerance
from haliax_kernels.testing.gradients import check_differences
from haliax_kernels.testing.races import look_for_races
from haliax_kernels.testing.reference import check_reference
from haliax_kernels.testing.report import CheckReport
from haliax_kernels.testing.sharded import compare_shardings
from haliax_kernels.testing.shardings import find_shardings
from haliax_kernels.testing.tpu import check_compiles


def check_kernel(
    kernel: NamedKernel,
    *args: Any,
    axes: Mapping[str, AxisBinding] | None = None,
    mesh: Mapping[str, int] | None = None,
    samples: int | None = 32,
    seed: int = 0,
    gradients: bool = True,
    reference: Callable[..., Any] | None = None,
    races: bool = False,
    topology: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Run a call of a kernel unsharded and under the shardings that its plan accepts, and compare.

    Every accepted sharding of one array axis alone is run, so that a failure names the axis to blame, and then a
    sample of those of several axes. The unsharded gradient is compared with finite differences. Keep the arrays small,
    and their sizes multiples of the number of devices.

    Args:
        kernel: the kernel.
        *args: the arguments of the call, as the kernel takes them.
        axes: the bindings of the call, as the kernel takes them.
        mesh: mesh axes and their sizes; two axes of two devices by default.
        samples: how many shardings of several axes to run; None for all of them.
        seed: of the sample, of the cotangents and of the directions.
        gradients: whether to check gradients with respect to every floating-point array.
        reference: a function of the same arguments, NamedArrays too, that returns what the kernel should. It is run in
            float64 where possible.
        races: whether to run Pallas calls in TPU interpret mode with race detection too.
        topology: a TPU topology (`"v5e:2x2"`) to compile the call for too; it needs libtpu and no TPU.
        rtol: how far results may be apart, relative to the largest expected element. By default that of the dtype:
            float32 2e-5, bfloat16 2e-2, float16 4e-3, float64 1e-9.
        atol: an absolute distance that is added to that; twice the dtype's machine epsilon by default.
        **kwargs: the keyword arguments of the call.

    Returns:
        What was checked, what was refused, and what could not be checked.

    Raises:
        KernelCheckError: the kernel is wrong, or nothing of the call can be sharded.
        RuntimeError: jax has fewer devices than the mesh.
    """
    sizes = dict(mesh or {"a": 2, "b": 2})
    devices = make_mesh(sizes)
    # The caller's own mesh and mapping must not be seen, neither by jit nor by the kernel.
    with jax.set_mesh(single_device_mesh()), hax.axis_mapping({}):
        base = run_unsharded(read_call(kernel, args, kwargs, axes), gradients, seed, Tolerance(rtol, atol))
        notes = []
        if gradients and base.cotangents is None:
            notes.append("there are no gradients: no floating-point argument, or no such output")
        if reference is not None:
            notes.append(check_reference(base, reference))
        if base.cotangents is not None:
            notes.append(check_differences(base.call, base.cotangents, seed))
        shardings = find_shardings(base.call, devices, samples, seed)
        notes += compare_shardings(base, devices, shardings)
        if races:
            notes.append(look_for_races(base, devices, shardings))
        if topology is not None:
            notes.append(check_compiles(base, topology, sizes, shardings))
    return CheckReport(
        kernel=base.call.name,
        mesh=tuple(sizes.items()),
        checked=shardings.alone + shardings.together,
        gradients=base.cotangents is not None,
        refused=shardings.refused,
        unchecked=shardings.unchecked,
        notes=tuple(notes),
    )
