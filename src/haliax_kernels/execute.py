# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Run a plan: the local kernel under `shard_map`, and its gradient.

The gradient stands outside two `shard_map`s: the forward one runs `jax.vjp` of the local kernel and lets the residuals
out, the backward one runs its pullback and adds up only what different shards hold different parts of. One `shard_map`
around the kernel's own `custom_vjp` would instead sum every cotangent over every mesh axis that its spec does not
name.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels import _compat
from haliax_kernels.errors import TransformError
from haliax_kernels.halos import without_halos
from haliax_kernels.layout import kernel_shape, output_layout
from haliax_kernels.local_kernel import Arrays, LocalKernel, fold_key
from haliax_kernels.mesh import MeshAxes, as_mesh_axes
from haliax_kernels.plan import gradient_steps


def sharded_call(local: LocalKernel) -> Callable[..., Arrays]:
    """The function of global arrays that runs `local` under `shard_map`, differentiable in reverse mode."""
    return _Sharded(local).run


def local_functions(local: LocalKernel) -> tuple[Callable[..., Arrays], Callable[..., Arrays]]:
    """What one device does where the caller makes the mesh axes manual itself: the call, and its gradient.

    The first takes the arguments' shards; the second also the outputs' and, or None, those of their cotangents.
    """
    sharded = _Sharded(local)
    return local.scoped(sharded._forward_local), local.scoped(sharded._backward_again_local)


@contextlib.contextmanager
def refusing_forward_mode(kernel: str, what: str) -> Iterator[None]:
    """Say it in our words where JAX says that a `custom_vjp` has no forward mode."""
    try:
        yield
    except TypeError as e:
        if "forward-mode" in str(e) and "custom_vjp" in str(e):
            raise TransformError(
                f"kernel {kernel!r}: forward-mode differentiation (jax.jvp, jax.jacfwd) of {what} is not supported. "
                "Use reverse mode: jax.grad, jax.vjp, jax.jacrev."
            ) from e
        raise


class _Aux:
    """How to rebuild the pullback from residuals. Compared by identity: it holds a traced program."""

    def __init__(self, tree: Any, sources: tuple[tuple[str, Any], ...], returned: tuple[jax.ShapeDtypeStruct, ...]):
        self.tree, self.sources, self.returned = tree, sources, returned

    def indices(self, kind: str) -> list[int]:
        return sorted({i for k, i in self.sources if k == kind})


@jax.tree_util.register_pytree_node_class
class _Saved:
    """Residuals that are neither arguments nor outputs, each with a leading dimension that stacks the devices'."""

    def __init__(self, leaves: Sequence[jax.Array], aux: _Aux):
        self.leaves, self.aux = tuple(leaves), aux

    def tree_flatten(self) -> tuple[Arrays, _Aux]:
        return self.leaves, self.aux

    @classmethod
    def tree_unflatten(cls, aux: _Aux, leaves: Sequence[jax.Array]) -> "_Saved":
        return cls(leaves, aux)


class _Sharded:
    def __init__(self, local: LocalKernel):
        self.local, self.plan = local, local.plan
        assert self.plan.mesh is not None
        self.mesh = self.plan.mesh
        self.sizes = dict(self.mesh.sizes)
        self.in_specs = tuple(x.spec for x in self.plan.inputs)
        self.out_specs = tuple(out.spec for out in self.plan.outputs)
        # Residuals are stacked over the mesh axes that make them differ; an enclosing vmap may own the others.
        self.stacked = PartitionSpec(self.plan.varying or None)
        self.moving = tuple(i for i, x in enumerate(self.plan.inputs) if x.differentiable)
        self._traced = False

    @functools.cached_property
    def _forward(self) -> Callable[..., Arrays]:
        return jax.jit(self._map(self._forward_local, self.in_specs, self.out_specs))

    @functools.cached_property
    def _once(self) -> Callable[..., Arrays]:
        """For the first call under jit: nothing is jitted again, since that would be traced through one more layer."""
        return self._differentiable(lambda f: f)

    @functools.cached_property
    def _again(self) -> Callable[..., Arrays]:
        """For further ones: jitted pieces, which are traced once and then reused, in one jit or in many."""
        return self._differentiable(jax.jit)

    def _differentiable(self, wrap: Callable[..., Any]) -> Callable[..., Arrays]:
        saving_specs = (self.out_specs, self.stacked)
        forward = wrap(self._map(self._forward_local, self.in_specs, self.out_specs))
        forward_saving = wrap(self._map(self._forward_saving_local, self.in_specs, saving_specs))
        backward = wrap(self._backward_global)

        @jax.custom_vjp
        def call(*xs: jax.Array) -> Arrays:
            return self._like_inputs(forward(*xs), xs)

        call.defvjp(
            lambda *xs: self._vjp_forward(forward_saving, xs), lambda *both: self._vjp_backward(backward, *both)
        )
        return call

    def _map(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return _compat.shard_map(self.local.scoped(f), self.mesh.mesh, in_specs, out_specs)

    def run(self, *xs: jax.Array) -> Arrays:
        xs = tuple(self._pin(v, x.spec) if x.reshard else v for x, v in zip(self.plan.inputs, xs, strict=True))
        if not any(isinstance(v, _compat.Tracer) for v in xs):
            return self._forward(*xs)
        xs = self._all_varying(xs)
        once = not self._traced and _compat.is_staged()
        self._traced = True
        with refusing_forward_mode(self.plan.kernel, "a named kernel on a mesh"):
            return (self._once if once else self._again)(*xs)

    def _all_varying(self, xs: Arrays) -> Arrays:
        """Let an enclosing `shard_map` with `check_vma` know that what one argument varies over, all results do.

        The inner `shard_map` drops that knowledge; an argument that is the same everywhere would then get the gradient
        of one shard only.
        """
        moving = self._like_inputs(tuple(xs[i] for i in self.moving), xs)
        return tuple(_merge(xs, self.moving, moving))

    def _like_inputs(self, outs: Arrays, inputs: Sequence[jax.Array | None]) -> Arrays:
        """`outs`, known to vary over the manual mesh axes that any of `inputs` varies over."""
        if not self.mesh.manual:
            return outs
        varying = frozenset[str]().union(*(_compat.varying_axes(v) for v in inputs if v is not None))
        return tuple(_compat.mark_varying(v, varying) for v in outs)

    def _pin(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Reshard `x` where its type on an Explicit mesh says something else than `spec`."""
        mesh, found = _compat.type_spec(x) or (self.mesh.mesh or _compat.context_mesh(), PartitionSpec())
        assert mesh is not None
        explicit = [m for m in mesh.axis_names if m not in self.mesh.auto]
        wanted = PartitionSpec(*(_only(e, explicit) for e in (*spec, *[None] * (x.ndim - len(spec)))))
        same = [_only(e, explicit) for e in (*found, *[None] * (x.ndim - len(found)))] == list(wanted)
        return x if same else jax.sharding.reshard(x, NamedSharding(mesh, wanted))

    # Forward

    def _gathered(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        out = []
        for x, v in zip(self.plan.inputs, xs, strict=True):
            for dim, a in enumerate(x.axes):
                if a.gathered:
                    v = lax.all_gather(v, self.plan.several(a.mesh_axes), axis=dim, tiled=True)
            out.append(v)
        return out

    def _finish(self, raw: Arrays) -> tuple[Arrays, tuple[bool, ...]]:
        """Outputs in their own axis order, summed and cut; and which of them the kernel returned just so."""
        found = []
        for j, (out, r) in enumerate(zip(self.plan.outputs, raw, strict=True)):
            v = output_layout(self.plan, j, r.shape)(r)
            for dim, cut in enumerate(out.slices):
                v = self._cut(v, dim, cut)
            found.append(v)
        for mesh_axes in {self.plan.several(out.psum) for out in self.plan.outputs} - {()}:
            which = [j for j, out in enumerate(self.plan.outputs) if self.plan.several(out.psum) == mesh_axes]
            for j, v in zip(which, lax.psum([found[j] for j in which], mesh_axes), strict=True):
                found[j] = v
        same = [v is r for v, r in zip(found, raw, strict=True)]
        return tuple(found), tuple(same)

    def _forward_local(self, *xs: jax.Array) -> Arrays:
        return self._finish(self.local(*self.local.prepare(self._gathered(xs))))[0]

    def _forward_saving_local(self, *xs: jax.Array) -> tuple[Arrays, _Saved]:
        prepared = self.local.prepare(self._gathered(xs))
        raw, pullback = self._vjp(prepared)
        outs, same = self._finish(raw)
        leaves, tree = jax.tree_util.tree_flatten(pullback)
        known = {id(v): ("input", i) for i, v in enumerate(prepared) if not self._is_enlarged(i)}
        known.update({id(r): ("output", j) for j, r in enumerate(raw) if same[j]})
        sources: list[tuple[str, Any]] = []
        saved: list[jax.Array] = []
        for leaf in leaves:
            if id(leaf) not in known:
                if not np.size(leaf):  # an empty residual crossing a shard_map crashes some jaxlib versions
                    sources.append(("empty", jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)))
                    continue
                known[id(leaf)] = ("saved", len(saved))
                saved.append(jnp.asarray(leaf)[None])
            sources.append(known[id(leaf)])
        returned = tuple(jax.ShapeDtypeStruct(r.shape, r.dtype) for r in raw)
        return outs, _Saved(saved, _Aux(tree, tuple(sources), returned))

    def _vjp(self, prepared: Arrays) -> tuple[Arrays, Any]:
        """What the kernel returns, and its pullback to the arguments that have a gradient."""

        def differentiable(*moving: jax.Array) -> Arrays:
            return self.local(*_merge(prepared, self.moving, moving))

        moving = tuple(prepared[i] for i in self.moving)
        try:
            return jax.vjp(differentiable, *moving)
        except Exception as e:
            self._explain(e, differentiable, moving)
            raise

    def _is_enlarged(self, i: int) -> bool:
        return any(a.gathered or any(a.halo) for a in self.plan.inputs[i].axes)

    def _explain(self, error: Exception, f: Callable[..., Any], args: Arrays) -> None:
        """Raise our own error where only the differentiation failed; return where the kernel itself does not run."""
        try:
            jax.eval_shape(f, *args)
        except Exception:
            return
        raise TransformError(
            f"kernel {self.plan.kernel!r} runs, but cannot be differentiated in reverse mode: {error}\n  - give it a "
            "backward:    jax.custom_vjp, then kernel.defvjp(forward, backward)"
        ) from error

    # Backward

    def _vjp_forward(self, forward_saving: Callable[..., Any], xs: Arrays) -> tuple[Arrays, Any]:
        outs, saved = forward_saving(*xs)
        outs = self._like_inputs(outs, xs)
        needed = [xs[i] for i in saved.aux.indices("input")]
        reused = [outs[j] for j in saved.aux.indices("output")]
        return outs, (needed, reused, saved)

    def _vjp_backward(
        self, backward: Callable[..., Arrays], residuals: Any, cts: Arrays
    ) -> tuple[jax.Array | None, ...]:
        real = [
            None if ct.dtype == jax.dtypes.float0 else self._pin(ct, out.spec) if _compat.type_spec(ct) else ct
            for ct, out in zip(cts, self.plan.outputs, strict=True)
        ]
        grads = dict(zip(self.moving, self._like_inputs(backward(*residuals, real), real), strict=True))
        return tuple(grads.get(i) for i in range(len(self.plan.inputs)))

    def _backward_global(
        self, needed: list[jax.Array], reused: list[jax.Array], saved: _Saved, cts: list[jax.Array | None]
    ) -> Arrays:
        aux = saved.aux
        ins, outs = aux.indices("input"), aux.indices("output")

        def backward_local(
            needed: list[jax.Array], reused: list[jax.Array], saved: _Saved, cts: list[jax.Array | None]
        ) -> Arrays:
            have: dict[tuple[str, int], jax.Array] = {("saved", i): v[0] for i, v in enumerate(saved.leaves)}
            have.update({("output", j): v for j, v in zip(outs, reused, strict=True)})
            for i, v in zip(ins, needed, strict=True):
                have["input", i] = self.local.layouts[i](fold_key(self.plan.inputs[i], v))
            leaves = [jnp.zeros(i.shape, i.dtype) if kind == "empty" else have[kind, i] for kind, i in aux.sources]
            pullback = jax.tree_util.tree_unflatten(aux.tree, leaves)
            grads = pullback(tuple(self._returned_cotangent(j, r, cts[j]) for j, r in enumerate(aux.returned)))
            return self._reduced(grads)

        in_specs = (
            [self.in_specs[i] for i in ins],
            [self.out_specs[j] for j in outs],
            self.stacked,
            [None if ct is None else spec for ct, spec in zip(cts, self.out_specs, strict=True)],
        )
        out_specs = tuple(self.in_specs[i] for i in self.moving)
        return self._map(backward_local, in_specs, out_specs)(needed, reused, saved, cts)

    def _backward_again_local(
        self, xs: Sequence[jax.Array], outs: Sequence[jax.Array], cts: Sequence[jax.Array | None]
    ) -> Arrays:
        """The gradient from arguments and outputs: residuals that are neither are computed again."""
        raw, pullback = self._vjp(self.local.prepare(self._gathered(xs)))
        _, same = self._finish(raw)
        # With the outputs as they were given, nothing of the kernel may be left to compute again.
        given = {id(r): out for r, out, untouched in zip(raw, outs, same, strict=True) if untouched}
        leaves, tree = jax.tree_util.tree_flatten(pullback)
        pullback = jax.tree_util.tree_unflatten(tree, [given.get(id(v), v) for v in leaves])
        returned = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in raw]
        return self._reduced(pullback(tuple(self._returned_cotangent(j, r, cts[j]) for j, r in enumerate(returned))))

    def _returned_cotangent(self, j: int, returned: jax.ShapeDtypeStruct, ct: jax.Array | None) -> Any:
        """The cotangent of what the kernel returned, from that of the output."""
        if ct is None:
            return np.zeros(returned.shape, jax.dtypes.float0)
        out = self.plan.outputs[j]
        if out.once:
            # Every shard along these mesh axes holds this same output, and their gradients will be added up.
            ct = jnp.where(lax.axis_index(out.once) == 0, ct, jnp.zeros_like(ct))
        for dim, cut in enumerate(out.slices):
            several = self.plan.several(cut)
            if several:
                whole = jnp.zeros(
                    (*ct.shape[:dim], ct.shape[dim] * self._count(several), *ct.shape[dim + 1 :]), ct.dtype
                )
                start = lax.axis_index(several) * ct.shape[dim]
                ct = lax.dynamic_update_slice_in_dim(whole, ct, start, dim)
        return output_layout(self.plan, j, returned.shape).transpose(ct, returned.shape)

    def _reduced(self, grads: Sequence[jax.Array]) -> Arrays:
        """Gradients of the local arguments: gathered axes made local again, and parts on several shards added up."""
        found: dict[int, jax.Array] = {}
        rest: dict[MeshAxes, list[int]] = {}
        for i, g in zip(self.moving, grads, strict=True):
            x = self.plan.inputs[i]
            g = without_halos(self.plan, x, self.local.layouts[i].transpose(g, kernel_shape(x)))
            done: set[str] = set()
            for dim, a in enumerate(x.axes):
                for mesh_axes, summed in gradient_steps(x, a) if a.gathered else ():
                    several = self.plan.several(mesh_axes)
                    if summed and several:
                        g = lax.psum_scatter(g, several, scatter_dimension=dim, tiled=True)
                    else:
                        g = self._cut(g, dim, several)
                    done.update(mesh_axes)
            found[i] = g
            left = self.plan.several(tuple(m for m in x.grad_sum if m not in done))
            if left:
                rest.setdefault(left, []).append(i)
        for mesh_axes, which in rest.items():
            for i, g in zip(which, lax.psum([found[i] for i in which], mesh_axes), strict=True):
                found[i] = g
        return tuple(found[i] for i in self.moving)

    def _cut(self, v: jax.Array, dim: int, mesh_axes: MeshAxes) -> jax.Array:
        several = self.plan.several(mesh_axes)
        if not several:
            return v
        size = v.shape[dim] // self._count(several)
        return lax.dynamic_slice_in_dim(v, lax.axis_index(several) * size, size, dim)

    def _count(self, mesh_axes: MeshAxes) -> int:
        return math.prod(self.sizes[m] for m in mesh_axes)


def _only(entry: Any, mesh_axes: Sequence[str]) -> Any:
    kept = tuple(m for m in as_mesh_axes(entry) if m in mesh_axes)
    return kept[0] if len(kept) == 1 else kept or None


def _merge(all_of: Arrays, which: Sequence[int], new: Sequence[jax.Array]) -> list[jax.Array]:
    merged = list(all_of)
    for i, v in zip(which, new, strict=True):
        merged[i] = v
    return merged
