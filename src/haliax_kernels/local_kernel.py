# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The kernel on one device's arrays: axes moved into place, loop axes vmapped, outputs checked."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from haliax import Axis, NamedArray
from jax import lax

from haliax_kernels.arguments import CallShape
from haliax_kernels.halos import with_halos
from haliax_kernels.layout import check_outputs, input_layout, kernel_shape, output_layout
from haliax_kernels.plan import InputPlan, KernelPlan

Arrays = tuple[jax.Array, ...]


class LocalKernel:
    """The kernel on one device's arrays: axes moved into place, loop axes vmapped, outputs checked."""

    def __init__(self, fn: Callable[..., Any], plan: KernelPlan, shape: CallShape):
        self._fn, self.plan, self._shape = fn, plan, shape
        self.layouts = tuple(input_layout(plan, x) for x in plan.inputs)

    def prepare(self, xs: Sequence[jax.Array]) -> Arrays:
        """Local arrays as the kernel takes them; gathered axes must be whole already."""
        folded = (with_halos(self.plan, x, fold_key(x, v)) for x, v in zip(self.plan.inputs, xs, strict=True))
        return tuple(layout(v) for layout, v in zip(self.layouts, folded, strict=True))

    def __call__(self, *prepared: jax.Array) -> Arrays:
        call = self._call
        for name in reversed(self.plan.vmapped):
            call = jax.vmap(call, in_axes=tuple(0 if _has(x, name) else None for x in self.plan.inputs))
        return call(*prepared)

    def scoped(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f` under the kernel's name, which profiles and compiled programs show for all that it does."""
        return jax.named_scope(self.plan.kernel)(f)

    def _call(self, *arrays: jax.Array) -> Arrays:
        values = [self._with_axes(x, v) for x, v in zip(self.plan.inputs, arrays, strict=True)]
        args, kwargs = self._shape.rebuild(values)
        return check_outputs(self.plan, self._fn(*args, **kwargs))

    def _with_axes(self, x: InputPlan, v: jax.Array) -> jax.Array | NamedArray:
        if x.place is not None or not x.named:
            return v
        return NamedArray(v, tuple(Axis(a.name, a.kernel_size) for a in x.axes if a.name not in self.plan.vmapped))

    def output_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the outputs on one device, in the plan's axis order, by abstract evaluation."""

        def abstract(*xs: jax.Array) -> Arrays:
            return self.in_output_order(*self(*(layout(v) for layout, v in zip(self.layouts, xs, strict=True))))

        return jax.eval_shape(abstract, *(jax.ShapeDtypeStruct(kernel_shape(x), x.dtype) for x in self.plan.inputs))

    def direct(self, *xs: jax.Array) -> Arrays:
        """The whole call without a mesh."""
        with jax.named_scope(self.plan.kernel):
            return self.in_output_order(*self(*self.prepare(xs)))

    def in_output_order(self, *raw: jax.Array) -> Arrays:
        """What the kernel returned, in the plan's axis order; not cut yet."""
        return tuple(output_layout(self.plan, j, r.shape)(r) for j, r in enumerate(raw))


def _has(x: InputPlan, name: str) -> bool:
    return any(a.name == name and a.loop for a in x.axes)


def fold_key(x: InputPlan, key: jax.Array) -> jax.Array:
    """Fold the shard's index over the mesh axes along which shards do different work into a PRNG key."""
    if not x.fold:
        return key
    index = lax.axis_index(x.fold)
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, index)
