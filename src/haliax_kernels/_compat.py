# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The one place that knows how JAX versions differ, and that reaches for what JAX has no public name for."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer as Tracer
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

_ZERO = np.float32(0)

with warnings.catch_warnings():
    # Deprecated together with `with mesh:` itself; as long as that works, this is the only way to see it.
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        from jax.interpreters.pxla import thread_resources as _thread_resources
    except ImportError:
        _thread_resources = None


def legacy_mesh() -> Mesh | None:
    """The mesh of an enclosing `with mesh:`, the older way of setting one."""
    if _thread_resources is None:
        return None
    mesh = _thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def context_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of an enclosing `jax.set_mesh` or `shard_map`: concrete outside jit, abstract inside."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty and any(t == jax.sharding.AxisType.Manual for t in abstract.axis_types):
        return abstract
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # under jit JAX answers with an error
        concrete = None
    if concrete is not None and not concrete.empty:
        return concrete
    return None if abstract.empty else abstract


def concrete_array(x: Any) -> jax.Array | None:
    """The concrete array behind `x`, also where eager `grad` wrapped it in a tracer; None where there is none."""
    if isinstance(x, Tracer):
        x = x.to_concrete_value()
    return x if isinstance(x, jax.Array) and not isinstance(x, Tracer) else None


def is_staged() -> bool:
    """Whether what is computed now is recorded for `jit` (or `scan`, ...) instead of run."""
    return isinstance(jax.lax.neg(_ZERO), Tracer)  # then operations on constants are traced too


def shard_map(
    f: Callable[..., Any], mesh: Mesh | AbstractMesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map`, manual over every mesh axis, without `check_vma`.

    The check cannot be used around Pallas kernels (interpret mode fails under it); the plan keeps the book of what
    varies over which mesh axis instead. `mesh=None` takes the context's.
    """
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which an enclosing `shard_map` with `check_vma` knows `x` to vary."""
    found = jax.typeof(x)
    if hasattr(found, "vma"):  # jax 0.9
        return found.vma
    return getattr(getattr(found, "manual_axis_type", None), "varying", frozenset())


def mark_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x`, known to vary over `axes` too; its gradient is then summed over those that are new."""
    new = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, new, to="varying") if new else x


def type_spec(x: Any) -> tuple[Any, PartitionSpec] | None:
    """(mesh, PartitionSpec) of the array's own type, or None where its type names no mesh."""
    try:
        sharding = jax.typeof(x).sharding
    except (AttributeError, TypeError):
        return None
    if sharding is None or sharding.mesh.empty:
        return None
    return sharding.mesh, sharding.spec


def mesh_platform(mesh: Mesh | AbstractMesh | None) -> str | None:
    """The platform of a mesh's devices, or None where it does not say."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return getattr(getattr(mesh, "abstract_device", None), "platform", None)


def lowering_devices(ctx: Any) -> int | None:
    """How many devices a program is lowered for, from the context of a lowering rule; None where it does not say."""
    return getattr(ctx.module_context.axis_context, "num_devices", None)
