# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Which devices hold which slice, against what JAX itself says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels.pictures.slices import device_texts, numbering, slices_of
from support import make_mesh

NAMES = ("x", "y", "z")
SIZES = ((8,), (3,), (2, 4), (4, 2), (3, 2), (1, 5), (2, 2, 2), (2, 1, 3))


@st.composite
def layouts(draw):
    """(mesh sizes, for each axis of an array the mesh axes that shard it): any of them, in any order."""
    sizes = dict(zip(NAMES, draw(st.sampled_from(SIZES)), strict=False))
    axes = [[] for _ in range(draw(st.integers(0, 3)))]
    for m in draw(st.permutations(list(sizes))):
        target = draw(st.integers(-1, len(axes) - 1))
        if target >= 0:
            axes[target].append(m)
    return sizes, [tuple(a) for a in axes]


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_as_jax_lays_arrays_out(layout):
    sizes, axes = layout
    mesh = make_mesh(**sizes)
    shards = [1] * len(axes)
    for i, mesh_axes in enumerate(axes):
        for m in mesh_axes:
            shards[i] *= sizes[m]
    rows = 3  # of each shard
    shape = tuple(rows * n for n in shards)
    spec = PartitionSpec(*(a or None for a in axes))
    number = {device: i for i, device in enumerate(mesh.devices.flat)}
    wanted: dict[tuple[int, ...], list[int]] = {}
    for device, slices in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        shard = tuple(s.indices(n)[0] // rows for s, n in zip(slices, shape, strict=True))
        wanted.setdefault(shard, []).append(number[device])
    found = slices_of(axes, tuple(sizes.items()))
    assert found == {shard: tuple(sorted(devices)) for shard, devices in wanted.items()}


def test_the_order_of_mesh_axes_matters():
    sizes = (("x", 2), ("y", 3))
    assert slices_of([("x", "y")], sizes) == {(i,): (i,) for i in range(6)}
    assert slices_of([("y", "x")], sizes) == {(0,): (0,), (1,): (3,), (2,): (1,), (3,): (4,), (4,): (2,), (5,): (5,)}
    assert slices_of([(), ("y",)], sizes) == {(0, 0): (0, 3), (0, 1): (1, 4), (0, 2): (2, 5)}
    assert slices_of([()], ()) == {(0,): (0,)}


def test_what_no_device_holds_is_missing():
    """A call with one mesh axis for two axes of an array is refused, and can be drawn."""
    assert slices_of([("x",), ("x",)], (("x", 2),)) == {(0, 0): (0,), (1, 1): (1,)}


@pytest.mark.parametrize(
    "devices, texts",
    [
        ((3,), ("3",)),
        ((0, 2), ("0, 2", "0 and 1 more", "2 devices")),
        ((0, 1, 2, 3), ("0-3", "0 and 3 more", "4 devices")),
        ((0, 1, 4, 5, 6), ("0, 1, 4-6", "0 and 4 more", "5 devices")),
        ((0, 4, 8, 12), ("0, 4, 8, 12", "0, 4, ..., 12", "0 and 3 more", "4 devices")),
    ],
)
def test_names_of_devices(devices, texts):
    assert device_texts(devices) == texts


def test_numbering_of_devices():
    assert numbering((("data", 2), ("one", 1), ("model", 4), ("x", 3))) == "12 data + 3 model + x"
    assert numbering((("data", 1),)) == "0"
