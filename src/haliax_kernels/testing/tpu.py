# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Compile a call ahead of time for a TPU topology, on a machine without a TPU."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.testing.baseline import Baseline
from haliax_kernels.testing.blame import Blame
from haliax_kernels.testing.call import with_gradients
from haliax_kernels.testing.report import counted
from haliax_kernels.testing.shardings import Shardings

_TYPES = {"v5e": "v5litepod-8", "v6e": "v6e-8", "v5p": "v5p-8", "v4": "v4-8"}


def check_compiles(base: Baseline, topology: str, sizes: Mapping[str, int], shardings: Shardings) -> str:
    """Compile forward, and backward where gradients are checked, unsharded and with each axis sharded alone.

    Returns:
        A note on what was compiled.

    Raises:
        KernelCheckError: it does not compile.
        UnsupportedOptionError: there is no such topology, or no libtpu to compile with.
    """
    call, cotangents = base.call, base.cotangents
    mesh = topology_mesh(topology, sizes)
    kernels = 0
    every = ((), *shardings.alone)
    for sharding in every:
        blame = Blame(call.name, mesh, shardings.axes, sharding)
        function = call.function(sharding, mesh)
        specs = [x.spec for x in call.plan(sharding, mesh).inputs]
        arrays = [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, s))
            for v, s in zip(call.arrays, specs, strict=True)
        ]
        programs: list[tuple[str, Any, tuple[Any, ...]]] = [("forward", function, tuple(arrays))]
        if cotangents is not None:
            cts = tuple(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in cotangents)
            programs.append(("gradient", with_gradients(function, call.moving), (arrays, cts)))
        for phase, f, args in programs:
            try:
                with jax.set_mesh(mesh):
                    text = jax.jit(f).trace(*args).lower().compile().as_text()
            except Exception as e:
                raise blame.does_not_compile(topology, phase, e) from e
            kernels += (text or "").count("tpu_custom_call")
    what = "forward and gradient" if cotangents is not None else "forward"
    note = f"{what} compile for TPU {topology} under {counted(len(every))}"
    return note if kernels else f"{note}, but without a single Pallas kernel: does it ask for interpret mode?"


def topology_mesh(topology: str, sizes: Mapping[str, int]) -> Mesh:
    """A mesh of TPUs to compile for, on a machine without any.

    Lower a program with `jax.ShapeDtypeStruct`s whose `NamedSharding`s are on this mesh, and compile it:
    `jax.jit(f).trace(*args).lower().compile()`.

    Args:
        topology: such as `"v5e:2x2"`, `"v6e:2x2"`, `"v5p:2x2x1"` or `"v4:2x2x1"`.
        sizes: mesh axes and their sizes, at most as many devices as the topology has.

    Raises:
        UnsupportedOptionError: there is no such topology, no libtpu, or too few devices.
    """
    generation = topology.split(":")[0]
    if generation not in _TYPES:
        raise UnsupportedOptionError(
            f"topology={topology!r}: its generation is none of {', '.join(_TYPES)}; write 'v5e:2x2', for example."
        )
    try:
        with _environment(TPU_ACCELERATOR_TYPE=_TYPES[generation]):
            devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    except Exception as e:
        raise UnsupportedOptionError(
            f"topology={topology!r} needs libtpu (pip install 'haliax-kernels[tpu]') and a topology that it knows: "
            f"{str(e).splitlines()[0] if str(e) else type(e).__name__}"
        ) from e
    shape = tuple(sizes.values())
    if math.prod(shape) > len(devices):
        raise UnsupportedOptionError(
            f"topology={topology!r} has {len(devices)} devices, but the mesh {dict(sizes)} needs {math.prod(shape)}: "
            "pass a smaller mesh=, or a larger topology."
        )
    return Mesh(
        np.array(devices[: math.prod(shape)]).reshape(shape), tuple(sizes), axis_types=(AxisType.Auto,) * len(shape)
    )


@contextlib.contextmanager
def _environment(**more: str) -> Iterator[None]:
    """What libtpu reads when it is loaded on a machine without a TPU; put back afterwards."""
    wanted = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        **more,
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
