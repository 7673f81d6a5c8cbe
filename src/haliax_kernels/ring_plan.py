# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""How keys and values travel around the shards of a sequence: what the Gantt chart of a plan is drawn from."""

from dataclasses import dataclass

from haliax_kernels.mesh import MeshAxes


@dataclass(frozen=True)
class RingPlan:
    """A ring of the shards of one sequence.

    Attributes:
        mesh_axes: the mesh axes that the ring runs over, the major one first.
        shards: the number of shards.
        zigzag: whether each shard holds an early and a late part of the sequence.
        q_rows: queries of one shard.
        k_rows: keys of one shard.
        left: how many earlier positions a query sees; None for all of them.
        right: how many later ones; None for all, 0 for a causal mask.
        q_offset: the position of the first query; None where only the device knows it.
    """

    mesh_axes: MeshAxes
    shards: int
    zigzag: bool
    q_rows: int
    k_rows: int
    left: int | None = None
    right: int | None = None
    q_offset: int | None = 0
