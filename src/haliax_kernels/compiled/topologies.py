# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""TPUs to compile for, on a machine without any."""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping

import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from haliax_kernels.errors import UnsupportedOptionError

_TYPES = {"v5e": "v5litepod-8", "v6e": "v6e-8", "v5p": "v5p-8", "v4": "v4-8"}
# GiB of memory of one chip (cloud.google.com/tpu/docs/system-architecture-tpu-vm).
_HBM_GIB = {"v5e": 16, "v6e": 32, "v5p": 95, "v4": 32}
# What JAX calls the chips.
_KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "v5p": "TPU v5", "v4": "TPU v4"}


def generation(topology: str) -> str:
    """The chips of a topology: `v4`, `v5e`, `v5p` or `v6e`.

    Raises:
        UnsupportedOptionError: it is none of these.
    """
    found = topology.split(":")[0]
    if found not in _TYPES:
        raise UnsupportedOptionError(
            f"topology={topology!r}: its generation is none of {', '.join(_TYPES)}; write 'v5e:2x2', for example."
        )
    return found


def chip_count(topology: str) -> int:
    """The number of chips that a topology's name gives.

    Raises:
        UnsupportedOptionError: it is no topology.
    """
    match = re.fullmatch(r"\w+:(\d+(?:x\d+)+)", topology)
    if match is None:
        raise UnsupportedOptionError(f"{topology!r} is no topology such as v5e:4x4 or v5p:4x4x4.")
    generation(topology)
    return math.prod(map(int, match[1].split("x")))


def hbm_bytes(topology: str) -> int:
    """Bytes of memory of one chip."""
    return _HBM_GIB[generation(topology)] * 2**30


def device_kind(topology: str) -> str:
    """JAX's `device_kind` of the chips."""
    return _KINDS[generation(topology)]


def topology_mesh(topology: str, sizes: Mapping[str, int]) -> Mesh:
    """A mesh of TPUs to compile for, on a machine without any.

    Lower a program with `jax.ShapeDtypeStruct`s whose `NamedSharding`s are on this mesh, and compile it:
    `jax.jit(f).trace(*args).lower().compile()`. A mesh of all chips lies over them as `jax.make_mesh` would lay it.

    Args:
        topology: such as `"v5e:2x2"`, `"v6e:2x2"`, `"v5p:2x2x1"` or `"v4:2x2x1"`.
        sizes: mesh axes and their sizes, at most as many devices as the topology has.

    Raises:
        UnsupportedOptionError: there is no such topology, no libtpu, or too few devices.
    """
    kind = generation(topology)
    try:
        with _environment(TPU_ACCELERATOR_TYPE=_TYPES[kind]):
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
    if math.prod(shape) == len(devices):
        laid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        laid = np.array(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(laid, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


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
