# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Collectives read from compiled programs: kinds, mesh axes, bytes, how often they run."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_kernels.compiled.collectives import _groups, compiled_collectives
from haliax_kernels.compiled.program import Program
from haliax_kernels.compiled.topologies import topology_mesh
from support import make_mesh

SIZES = {"a": 2, "b": 2, "c": 2}
AXES = [axes for n in (1, 2, 3) for axes in itertools.combinations(SIZES, n)]
# (kind, what a device does with its (16, 128) float32, bytes of the result, given how many take part)
KINDS = {
    "all-reduce": (lambda x, axes: lax.psum(x, axes), lambda n: 8192),
    "all-gather": (lambda x, axes: lax.all_gather(x, axes, tiled=True), lambda n: 8192 * n),
    "reduce-scatter": (lambda x, axes: lax.psum_scatter(x, axes, tiled=True), lambda n: 8192 // n),
    "all-to-all": (lambda x, axes: lax.all_to_all(x, axes, 0, 1, tiled=True), lambda n: 8192),
    "collective-permute": (
        lambda x, axes: lax.ppermute(x, axes, [(i, (i + 1) % 2 ** len(axes)) for i in range(2 ** len(axes))]),
        lambda n: 8192,
    ),
}


def found(mesh, body, sizes):
    f = jax.shard_map(body, mesh=mesh, in_specs=P(tuple(sizes)), out_specs=P(tuple(sizes)), check_vma=False)
    x = jax.ShapeDtypeStruct((16 * mesh.size, 128), jnp.float32, sharding=NamedSharding(mesh, P(tuple(sizes))))
    return compiled_collectives(Program(jax.jit(f).trace(x).lower().compile().as_text()), sizes)


@pytest.mark.parametrize("axes", AXES, ids=",".join)
@pytest.mark.parametrize("kind", KINDS)
def test_on_cpu_devices(kind, axes):
    do, size = KINDS[kind]
    (one,) = found(make_mesh(**SIZES), lambda x: jnp.sin(do(x, axes)), SIZES)
    assert (one.kind, one.mesh_axes, one.bytes_per_device, one.runs) == (kind, axes, size(2 ** len(axes)), 1)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("kind", KINDS)
def test_on_tpus(kind):
    do, size = KINDS[kind]
    mesh = topology_mesh("v5e:2x4", SIZES)
    for axes in (("b",), ("a", "c"), ("a", "b", "c")):
        (one,) = found(mesh, lambda x, axes=axes: jnp.sin(do(x, axes)), SIZES)
        if (one.kind, kind) == ("all-reduce", "reduce-scatter"):  # the compiler's choice for so small an array
            assert one.bytes_per_device == 8192
        else:
            assert (one.kind, one.bytes_per_device) == (kind, size(2 ** len(axes)))
        assert (one.mesh_axes, one.runs) == (axes, 1)


def test_in_loops():
    def body(x):
        def outer(_, x):
            return lax.fori_loop(0, 3, lambda _, x: jnp.sin(lax.psum(x, "b")), jnp.cos(lax.psum(x, "a")))

        return lax.fori_loop(0, 5, outer, x)

    runs = {c.mesh_axes: c.runs for c in found(make_mesh(**SIZES), body, SIZES)}
    assert runs == {("a",): 5, ("b",): 15}


def test_a_loop_of_unknown_length():
    def body(x):
        return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: jnp.sin(lax.psum(x, "a")), x)

    (one,) = found(make_mesh(**SIZES), body, SIZES)
    assert one.runs is None and one.total_bytes == 8192


def test_sending_to_oneself_is_over_no_mesh_axis():
    (one,) = found(make_mesh(**SIZES), lambda x: jnp.sin(lax.ppermute(x, "a", [(0, 0), (1, 1)])), SIZES)
    assert one.mesh_axes == ()


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, more", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[4,2]<=[8], more", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), more", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2), more", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['x'=2,'y'=2,'z'=2] {'y'}, more", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}, more", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups={}, more", [list(range(8))]),
        ("source_target_pairs={{0,1},{1,0}}, more", [[0, 1], [1, 0]]),
    ],
)
def test_how_groups_are_written(text, groups):
    np.testing.assert_array_equal(np.sort(np.asarray(_groups(text, 8)), -1), np.sort(np.asarray(groups), -1))
