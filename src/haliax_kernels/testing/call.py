# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""One call of a kernel, to be run again under other shardings, with other arrays, forward and backward."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from haliax_kernels.arguments import CallShape
from haliax_kernels.binding import AxisBinding
from haliax_kernels.kernel import NamedKernel
from haliax_kernels.plan import KernelPlan
from haliax_kernels.testing.interpret import tpu_interpret_mode
from haliax_kernels.testing.report import Sharding, as_mapping

Arrays = tuple[Any, ...]


@dataclass(frozen=True)
class Results:
    """What one run of a call gave, on the host.

    Attributes:
        values: the outputs of the forward pass.
        saving: the floating-point outputs of the forward pass that saves for the backward one; None without gradients.
        gradients: by index of the array; None without gradients.
    """

    values: tuple[np.ndarray, ...]
    saving: tuple[np.ndarray, ...] | None = None
    gradients: dict[int, np.ndarray] | None = None


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A call of a kernel.

    Attributes:
        kernel: the kernel.
        axes: the bindings of its call.
        shape: the form of the call without its arrays.
        arrays: its arrays, each on one device.
        forced: whether Pallas calls are run by TPU interpret mode, whatever they say themselves.
    """

    kernel: NamedKernel
    axes: Mapping[str, AxisBinding] | None
    shape: CallShape
    arrays: Arrays
    forced: bool = False

    @property
    def name(self) -> str:
        return self.kernel._spec.name

    @property
    def moving(self) -> tuple[int, ...]:
        """The arrays that have a gradient."""
        return tuple(i for i, info in enumerate(self.shape.infos) if jnp.issubdtype(info.dtype, jnp.inexact))

    @property
    def keys(self) -> tuple[int, ...]:
        """The arrays that are typed PRNG keys."""
        return tuple(i for i, info in enumerate(self.shape.infos) if info.is_key)

    def with_arrays(self, arrays: Sequence[Any]) -> "KernelCall":
        return replace(self, arrays=tuple(arrays))

    def widened(self) -> "KernelCall":
        """The call with its floating-point arrays in float64, which must be enabled."""
        wide = [jnp.asarray(v, jnp.float64) if jnp.issubdtype(v.dtype, jnp.floating) else v for v in self.arrays]
        return self.with_arrays(wide)

    def in_interpret_mode(self, forced: bool = True) -> "KernelCall":
        return replace(self, forced=forced)

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the call, with `arrays` in the places of its arrays."""
        leaves = []
        for info, v in zip(self.shape.infos, arrays, strict=True):
            axes = tuple(Axis(name or "", size) for name, size in info.axes)
            leaves.append(NamedArray(v, axes) if info.named else v)
        return self.shape.rebuild(leaves)

    def plan(self, sharding: Sharding, mesh: Mesh) -> KernelPlan:
        """The plan of the call under a sharding. The kernel is not traced for it."""
        args, kwargs = self.arguments(self.arrays)
        shape, _, key = self.kernel._read(args, kwargs, self.axes, as_mapping(sharding), mesh)
        return self.kernel._ready(self.kernel._spec, shape, *key)[0]

    def function(self, sharding: Sharding, mesh: Mesh) -> Callable[..., Arrays]:
        """The call as a function of its arrays that returns the outputs' arrays."""
        # A fresh kernel: one that was traced before, in another mode, would be reused.
        fresh = NamedKernel(self.kernel._fn, self.kernel._spec, self.kernel._axes)

        def run(*arrays: Any) -> Arrays:
            args, kwargs = self.arguments(arrays)
            return plain(fresh(*args, axes=self.axes, axis_mapping=as_mapping(sharding), mesh=mesh, **kwargs))

        return run

    def runner(self, sharding: Sharding = (), mesh: Mesh | None = None) -> "Runner":
        return Runner(self, sharding, single_device_mesh() if mesh is None else mesh)


class Runner:
    """A call under one sharding, compiled when it first runs and then used again."""

    def __init__(self, call: KernelCall, sharding: Sharding, mesh: Mesh):
        self._call, self._sharding, self._mesh = call, sharding, mesh
        function = call.function(sharding, mesh)
        self._forward = jax.jit(function)
        self._both = jax.jit(with_gradients(function, call.moving))
        self._specs = [x.spec for x in call.plan(sharding, mesh).inputs]

    def __call__(self, arrays: Arrays | None = None, cotangents: Arrays | None = None) -> Results:
        """Run forward, and with cotangents of the floating-point outputs backward too."""
        return self.copies(arrays, cotangents)[0]

    def copies(self, arrays: Arrays | None = None, cotangents: Arrays | None = None) -> list[Results]:
        """The same, once for each copy that devices hold of what they all should have alike."""
        call = self._call
        placed = [self._placed(v, s) for v, s in zip(arrays or call.arrays, self._specs, strict=True)]
        with jax.set_mesh(self._mesh), tpu_interpret_mode() if call.forced else contextlib.nullcontext():
            if cotangents is None:
                values = self._forward(*placed)
                return [Results(on_host(values, i)) for i in range(_count_copies(values))]
            values, saving, gradients = self._both(placed, cotangents)
            return [
                Results(
                    on_host(values, i), on_host(saving, i), dict(zip(call.moving, on_host(gradients, i), strict=True))
                )
                for i in range(_count_copies((*values, *saving, *gradients)))
            ]

    def _placed(self, v: Any, spec: PartitionSpec) -> Any:
        return v if self._mesh.size == 1 else jax.device_put(v, NamedSharding(self._mesh, spec))


def read_call(
    kernel: NamedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Mapping[str, AxisBinding] | None
) -> KernelCall:
    """Take a call of a kernel apart."""
    shape, arrays = kernel._reader.read(args, kwargs)
    return KernelCall(kernel, axes, shape, tuple(jax.device_put(v, jax.devices()[0]) for v in arrays))


def _substituted(arrays: Sequence[Any], which: tuple[int, ...], new: Sequence[Any]) -> list[Any]:
    changed = list(arrays)
    for i, v in zip(which, new, strict=True):
        changed[i] = v
    return changed


def gradients_of(
    function: Callable[..., Arrays], moving: tuple[int, ...], arrays: Sequence[Any], cotangents: Arrays
) -> tuple[Arrays, Arrays]:
    """(the floating-point outputs, the gradients of the arrays `moving`)."""

    def of_moving(*xs: Any) -> Arrays:
        outs = function(*_substituted(arrays, moving, xs))
        return tuple(v for v in outs if jnp.issubdtype(v.dtype, jnp.inexact))

    saving, pullback = jax.vjp(of_moving, *(arrays[i] for i in moving))
    return saving, pullback(tuple(jnp.asarray(c, v.dtype) for c, v in zip(cotangents, saving, strict=True)))


def with_gradients(function: Callable[..., Arrays], moving: tuple[int, ...]) -> Callable[..., Any]:
    """A function of (arrays, cotangents) that returns (values, values while saving, gradients).

    The values twice: under `jax.custom_vjp` the forward pass that saves is another function than the plain one.
    """

    def both(arrays: Sequence[Any], cotangents: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        return function(*arrays), *gradients_of(function, moving, arrays, cotangents)

    return both


def random_cotangents(function: Callable[..., Arrays], arrays: Arrays, seed: int) -> Arrays:
    """A random cotangent for each floating-point output."""
    random = np.random.default_rng(seed)
    outs = [s for s in jax.eval_shape(function, *arrays) if jnp.issubdtype(s.dtype, jnp.inexact)]
    return tuple(np.asarray(random.normal(size=s.shape), s.dtype) for s in outs)


def plain(outs: Any) -> Arrays:
    """The arrays of one output or of several."""
    several = outs if isinstance(outs, tuple | list) else (outs,)
    return tuple(v.array if isinstance(v, NamedArray) else v for v in several)


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of simulated or real devices.

    Raises:
        RuntimeError: jax has too few devices.
    """
    wanted, devices = math.prod(sizes.values()), jax.devices()
    if wanted > len(devices):
        raise RuntimeError(
            f"check_kernel needs {wanted} devices for its mesh {dict(sizes)}, but jax has "
            f"{len(devices)}. They are fixed when jax starts; simulated ones on a CPU will do:\n"
            f"  - before jax is imported:        XLA_FLAGS=--xla_force_host_platform_device_count={wanted}\n"
            f"  - or before jax is first used:   jax.config.update('jax_num_cpu_devices', {wanted})\n"
            "  - or check on a smaller mesh:    check_kernel(..., mesh={'a': 2})"
        )
    shape = tuple(sizes.values())
    return Mesh(np.array(devices[:wanted]).reshape(shape), tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def single_device_mesh() -> Mesh:
    """One device: the kernel is then called directly, whatever mesh is set around the check."""
    return Mesh(np.array(jax.devices()[:1]), ("one",), axis_types=(AxisType.Auto,))


def on_host(arrays: Arrays, copy: int = 0) -> tuple[np.ndarray, ...]:
    """Wait for arrays and fetch them, from the devices with that copy of each part."""
    found = []
    for v in arrays:
        whole = np.empty(v.shape, v.dtype)
        for parts in _copies(v):
            part = parts[min(copy, len(parts) - 1)]
            whole[part.index] = np.asarray(part.data)
        found.append(whole)
    return tuple(found)


def _copies(v: Any) -> list[list[Any]]:
    """The parts of an array, each as the list of its copies: `np.asarray` would take the first of these."""
    parts: dict[str, list[Any]] = {}
    for shard in v.addressable_shards:
        parts.setdefault(str(shard.index), []).append(shard)
    return list(parts.values())


def _count_copies(arrays: Arrays) -> int:
    return max(len(copies) for v in arrays for copies in _copies(v))
