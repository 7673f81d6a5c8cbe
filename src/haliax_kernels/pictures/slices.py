# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Which devices hold which slice of an array, as plain data."""

import math
from collections.abc import Sequence

import numpy as np

from haliax_kernels.mesh import MeshAxes

MeshSizes = Sequence[tuple[str, int]]
Shard = tuple[int, ...]
Devices = tuple[int, ...]


def slices_of(axes: Sequence[MeshAxes], sizes: MeshSizes) -> dict[Shard, Devices]:
    """The devices that hold each shard of an array.

    Args:
        axes: for each axis of the array, the mesh axes that shard it, the major one first.
        sizes: the mesh axes and their sizes, in the mesh's order.

    Returns:
        For the index of a shard along each axis, the devices that hold it, ascending. A device is numbered by its
        place in the mesh, counted in row-major order. Indices that no device holds are missing.
    """
    names, shape = [name for name, _ in sizes], [size for _, size in sizes]
    at = dict(zip(names, np.indices(shape).reshape(len(shape), math.prod(shape)), strict=True))
    index = np.zeros((len(axes), math.prod(shape)), int)
    for row, mesh_axes in zip(index, axes, strict=True):
        for m in mesh_axes:
            row[:] = row * dict(sizes)[m] + at[m]
    found: dict[Shard, list[int]] = {}
    for device, shard in enumerate(zip(*index.tolist(), strict=True) if len(axes) else [()] * math.prod(shape)):
        found.setdefault(shard, []).append(device)
    return {shard: tuple(devices) for shard, devices in sorted(found.items())}


def device_texts(devices: Devices) -> tuple[str, ...]:
    """Names of a set of devices, the most telling first: `0-3, 8-11`, then shorter ones for where there is no room."""
    runs: list[list[int]] = []
    for d in devices:
        if runs and d == runs[-1][1] + 1:
            runs[-1][1] = d
        else:
            runs.append([d, d])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    texts = [", ".join(parts)]
    if len(parts) > 3:
        texts.append(f"{parts[0]}, {parts[1]}, ..., {parts[-1]}")
    if len(devices) > 1:
        texts += [f"{devices[0]} and {len(devices) - 1} more", f"{len(devices)} devices"]
    return tuple(texts)


def numbering(sizes: MeshSizes) -> str:
    """How devices are numbered: `4 data + model`."""
    several = [(name, size) for name, size in sizes if size > 1]
    strides = [math.prod(size for _, size in several[i + 1 :]) for i in range(len(several))]
    return " + ".join(name if n == 1 else f"{n} {name}" for (name, _), n in zip(several, strides, strict=True)) or "0"
