# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Give the kernel's arguments their neighbours' rows (`Halo`), and send the cotangents of those rows back."""

import jax

from haliax_kernels.collectives import halo_exchange
from haliax_kernels.plan import InputPlan, KernelPlan
from haliax_kernels.policies import Halo


def with_halos(plan: KernelPlan, x: InputPlan, v: jax.Array) -> jax.Array:
    """The local array `v` of argument `x`, gathered axes whole already, with the rows that `Halo` adds."""
    for dim in x.halo_dims(plan.signature):
        policy = x.axes[dim].policy
        assert isinstance(policy, Halo)
        v = _exchanged(plan, x, v, dim, policy.edge)
    return v


def without_halos(plan: KernelPlan, x: InputPlan, ct: jax.Array) -> jax.Array:
    """The transpose of `with_halos`: a cotangent of the same array before the rows were added."""
    for dim in reversed(x.halo_dims(plan.signature)):
        rows = ct.shape[dim] - sum(x.axes[dim].halo)
        before = jax.ShapeDtypeStruct((*ct.shape[:dim], rows, *ct.shape[dim + 1 :]), ct.dtype)
        # What stands beyond the ends is constant, whatever it is: its cotangent goes nowhere.
        (ct,) = jax.linear_transpose(lambda v, dim=dim: _exchanged(plan, x, v, dim, 0), before)(ct)
    return ct


def _exchanged(plan: KernelPlan, x: InputPlan, v: jax.Array, dim: int, edge: float) -> jax.Array:
    before, after = x.axes[dim].halo
    mesh_axes = plan.several(x.axes[dim].mesh_axes)
    return halo_exchange(v, mesh_axes, dim=dim, before=before, after=after, edge=edge)
