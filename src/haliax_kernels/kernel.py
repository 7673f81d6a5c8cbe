# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`named_kernel`: a kernel of plain local arrays becomes a function of NamedArrays that may be sharded."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, overload

import haliax
import jax
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, Mesh

from haliax_kernels.arguments import ArgumentReader, CallShape
from haliax_kernels.binding import AxisBinding, FrozenAxes, freeze_axes
from haliax_kernels.closures import refuse_closed_over_tracers
from haliax_kernels.errors import ArgumentError, PolicyError, SignatureError
from haliax_kernels.execute import sharded_call
from haliax_kernels.local_kernel import LocalKernel
from haliax_kernels.mesh import AxisMapping, MeshContext, ShardingSource, find_mesh, freeze_mapping
from haliax_kernels.own_collectives import trace_kernel
from haliax_kernels.plain import PlainKernel
from haliax_kernels.plan import KernelPlan
from haliax_kernels.planner import KernelSpec, make_plan
from haliax_kernels.policies import Manual, Policy, check_policies
from haliax_kernels.recording import implementation_notes, tell
from haliax_kernels.shard_context import with_shard
from haliax_kernels.signature import call_signature, parse_signature, signature_from_annotations

_OWN_KEYWORDS = ("axes", "axis_mapping", "mesh")


class NamedKernel:
    """A kernel that takes and returns NamedArrays; made by `named_kernel`."""

    def __init__(
        self, fn: Callable[..., Any], spec: KernelSpec, axes: FrozenAxes = (), ready: Callable[..., Any] | None = None
    ):
        self._fn, self._axes = fn, axes
        python = call_signature(fn)
        taken = [k for k in _OWN_KEYWORDS if python is not None and k in python.parameters]
        if taken:
            raise SignatureError(
                f"kernel {spec.name!r} has a parameter {taken[0]!r}, a keyword that every named kernel takes itself. "
                "Rename the kernel's."
            )
        python, spec = _without_shard(python, spec)
        self._spec = spec
        self._reader = ArgumentReader(spec.name, spec.signature, python)
        # Kernels derived from this one share its cache: `kernel.bind(...)(...)` in a loop compiles once.
        self._ready = ready or functools.lru_cache(maxsize=256)(functools.partial(_make_ready, fn))
        functools.update_wrapper(self, fn, updated=())

    def __repr__(self) -> str:
        return f'named_kernel({self._spec.name!r}, "{self._spec.signature}")'

    def __call__(
        self,
        *args: Any,
        axes: Mapping[str, AxisBinding] | None = None,
        axis_mapping: AxisMapping | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the kernel.

        Args:
            *args: the kernel's arguments: NamedArrays with any loop axes beside the core axes of their place, in any
                order; plain arrays, positional by the signature; PyTrees of them; static values.
            axes: per core axis, the array axis it binds to: an `Axis`, a name, or a tuple of them that is flattened
                into the one core axis. A core axis that is not named here binds to the array axis of its own name.
            axis_mapping: how array axes are laid over mesh axes in this call, instead of what the arrays' types or
                `haliax.axis_mapping` say.
            mesh: the mesh to use where no enclosing `shard_map` has set one.
            **kwargs: the kernel's keyword arguments, by the same rules.

        Returns:
            A NamedArray per output, of global size: loop axes in order of first appearance, then the output's core
            axes under the names they are bound to. Plain arrays where no argument is a NamedArray.

        Raises:
            NamedKernelError: a subclass that says what cannot run and what to do; before the kernel is traced.
        """
        shape, arrays, key = self._read(args, kwargs, axes, axis_mapping, mesh)
        plan, run = self._ready(self._spec, shape, *key)
        tell((self._fn, self._spec, shape, *key), lambda: self._traced(plan, shape, run is None), run)
        if run is None:
            raise plan.refusal()
        refuse_closed_over_tracers(self._fn, self._spec.name)
        if any(isinstance(v, jax.ShapeDtypeStruct) for v in arrays):
            raise ArgumentError(
                f"kernel {self._spec.name!r} was called with a jax.ShapeDtypeStruct; use .plan(...) to plan without "
                "arrays."
            )
        outs = run(*arrays)
        if any(info.named for info in shape.infos):
            outs = tuple(
                NamedArray(v, tuple(Axis(a.name, n) for a, n in zip(out.axes, v.shape, strict=True)))
                for out, v in zip(plan.outputs, outs, strict=True)
            )
        return outs if self._spec.signature.several else outs[0]

    def plan(
        self,
        *args: Any,
        axes: Mapping[str, AxisBinding] | None = None,
        axis_mapping: AxisMapping | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        **kwargs: Any,
    ) -> KernelPlan:
        """Plan the call without running it; `print` the result to see a table.

        The arguments are those of a call; arrays may be `jax.ShapeDtypeStruct`s, in NamedArrays too. Where the call
        cannot run, the plan's `refusals` say why. Where it can, the kernel is traced for the shapes of its outputs.
        """
        shape, _, key = self._read(args, kwargs, axes, axis_mapping, mesh)
        plan, run = self._ready(self._spec, shape, *key)
        return self._traced(plan, shape, run is None)

    def _traced(self, plan: KernelPlan, shape: CallShape, refused: bool) -> KernelPlan:
        """The plan with what only a trace of the kernel says, unless the call is refused."""
        if refused:
            return plan
        local = LocalKernel(with_shard(self._fn, self._spec, plan), plan, shape)
        with implementation_notes() as said:
            if not (plan.sharded and self._spec.takes_shard):
                plan = plan.with_outputs(local.output_shapes())
            else:
                traced = trace_kernel(local)
                plan = replace(plan.with_outputs(traced.outputs), own=traced.collectives)
                said += [] if traced.note is None else [traced.note]
        return replace(plan, notes=(*plan.notes, *said))

    def plan_of_inputs(
        self, *args: Any, axes: Mapping[str, AxisBinding] | None = None, mesh: Any = None, **kwargs: Any
    ) -> KernelPlan:
        """The plan as far as it is known before the kernel is traced: without the sizes of its outputs."""
        shape, _, key = self._read(args, kwargs, axes, None, mesh)
        return self._ready(self._spec, shape, *key)[0]

    @functools.cached_property
    def plain(self) -> PlainKernel:
        """The kernel on plain arrays, under `jit` without an axis mapping too: `attend.plain(q, k, v)`.

        The last dimensions of an array are the core axes of its place in the signature, those before them loop axes,
        aligned from the right; plain arrays come back. Policies are kept as in the named form, with the shardings that
        the arrays have, or that XLA gives them. On TPU an Auto mesh is refused under `jit`: use the named form there.
        """
        return PlainKernel(self._fn, self._spec, self._reader, self._ready)

    def bind(self, **axes: AxisBinding) -> "NamedKernel":
        """The kernel with some core axes bound for good: `attend.bind(q_pos="position")`."""
        frozen = freeze_axes(axes, self._spec.signature, self._spec.name)
        return NamedKernel(self._fn, self._spec, _merged(self._axes, frozen), self._ready)

    def with_policies(self, **policies: Policy) -> "NamedKernel":
        """The kernel with other policies for some core axes: `attend.with_policies(k_pos=Gather())`.

        Raises:
            PolicyError: as the decorator does.
        """
        merged = {**dict(self._spec.policies), **policies}
        checked = check_policies(merged, self._spec.signature, self._spec.name)
        spec = replace(self._spec, policies=tuple(checked.items()))
        return NamedKernel(self._fn, spec, self._axes, self._ready)

    def with_remedies(self, remedies: Mapping[str, tuple[tuple[str, str], ...]]) -> "NamedKernel":
        """The kernel with its own ways out where a core axis is sharded that it needs whole, instead of the general
        ones.

        For operations that wrap a named kernel and do not hand its keywords on to their callers.

        Args:
            remedies: per core axis, (what it does, code); `{axis}` and `{mesh_axes}` stand for the array axis and the
                mesh axes that shard it.
        """
        spec = replace(self._spec, remedies=tuple(remedies.items()))
        return NamedKernel(self._fn, spec, self._axes, self._ready)

    def _read(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axes: Mapping[str, AxisBinding] | None,
        axis_mapping: AxisMapping | None,
        mesh: Mesh | AbstractMesh | None,
    ) -> tuple[CallShape, list[Any], tuple[FrozenAxes, MeshContext | None, ShardingSource]]:
        if self._spec.takes_shard and "shard" in kwargs:
            raise ArgumentError(
                f"kernel {self._spec.name!r} was called with shard=...: that keyword is the ShardContext, which only "
                "the named kernel can know. Leave it out."
            )
        shape, arrays = self._reader.read(args, kwargs)
        frozen = self._axes
        if axes:
            frozen = _merged(frozen, freeze_axes(axes, self._spec.signature, self._spec.name))
        context = haliax.partitioning.current_thread_local_mapping()
        source = ShardingSource(freeze_mapping(axis_mapping), freeze_mapping(context))
        return shape, arrays, (frozen, find_mesh(mesh, arrays), source)


def _make_ready(
    fn: Callable[..., Any],
    spec: KernelSpec,
    shape: CallShape,
    axes: FrozenAxes,
    mesh: MeshContext | None,
    source: ShardingSource,
) -> tuple[KernelPlan, Callable[..., tuple[jax.Array, ...]] | None]:
    """The plan of a call, and what runs it (None where it is refused)."""
    plan = make_plan(spec, shape.infos, axes, mesh, source)
    if plan.refusals:
        return plan, None
    local = LocalKernel(with_shard(fn, spec, plan), plan, shape)
    return plan, sharded_call(local) if plan.sharded else jax.jit(local.direct)


def _without_shard(python: inspect.Signature | None, spec: KernelSpec) -> tuple[inspect.Signature | None, KernelSpec]:
    """The function's signature without the keyword `shard`, and the spec that says whether it has one.

    Raises:
        SignatureError: `shard` is a positional parameter.
        PolicyError: `Manual` for a function that cannot receive it.
    """
    manual = [core for core, policy in spec.policies if isinstance(policy, Manual)]
    if python is None:  # nobody knows what it takes
        return None, replace(spec, takes_shard=bool(manual))
    parameter = python.parameters.get("shard")
    if parameter is not None and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        raise SignatureError(
            f"kernel {spec.name!r} has a positional parameter 'shard', the name of the keyword in which a kernel "
            "receives its ShardContext. Write it behind a '*', or rename it."
        )
    variadic = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in python.parameters.values())
    if manual and parameter is None and not variadic:
        raise PolicyError(
            f"kernel {spec.name!r}: axis {manual[0]!r} is Manual(), but the function has no keyword 'shard' to be "
            f"told its shard in. Add one: def {spec.name}(..., *, shard)."
        )
    rest = [p for name, p in python.parameters.items() if name != "shard"]
    return python.replace(parameters=rest), replace(spec, takes_shard=bool(parameter or manual))


def _merged(old: FrozenAxes, new: FrozenAxes) -> FrozenAxes:
    return tuple({**dict(old), **dict(new)}.items())


@overload
def named_kernel(signature: Callable[..., Any], /) -> NamedKernel: ...


@overload
def named_kernel(
    signature: str | None = None,
    /,
    *,
    policies: Mapping[str, Policy] | None = None,
    multiple_of: Mapping[str, int] | None = None,
    loop: Literal["vmap", "collapse"] = "vmap",
    rng: Literal["fold", "replicated"] = "fold",
    name: str | None = None,
) -> Callable[[Callable[..., Any]], NamedKernel]: ...


def named_kernel(
    signature: str | Callable[..., Any] | None = None,
    /,
    *,
    policies: Mapping[str, Policy] | None = None,
    multiple_of: Mapping[str, int] | None = None,
    loop: Literal["vmap", "collapse"] = "vmap",
    rng: Literal["fold", "replicated"] = "fold",
    name: str | None = None,
) -> Any:
    """Make a kernel of plain local arrays into a function of NamedArrays, on any mesh and axis mapping.

    Usable as `@named_kernel("q_pos key, k_pos key -> q_pos")`, as `@named_kernel` where jaxtyping annotations give the
    signature, and as `named_kernel(...)(fn)`.

    Args:
        signature: the core axes of each argument and output: `"q_pos key, k_pos key, k_pos value -> q_pos value"`.
            `()` for an array without core axes; `*batch` at the front of every one says that the kernel takes leading
            dimensions itself. Its arguments are the function's first positional ones.
        policies: per core axis, what the kernel tolerates when it is sharded: `Local()` (the default: nothing),
            `Parallel()`, `Gather()`, `Sum()`, `Halo(before, after)`, `Manual()`.
        multiple_of: per core axis, what its size on one device must be a multiple of.
        loop: `vmap`, or `collapse` to give the kernel all loop axes as one leading dimension (arguments that lack one
            are then copied along it).
        rng: `fold` folds the shard's index into typed PRNG keys; `replicated` gives every shard the same key.
        name: the kernel's name in messages and profiles; the function's by default.

    Raises:
        SignatureError: the signature cannot be read; the message names the token.
        PolicyError: a policy that cannot be.

    A function with a keyword-only parameter `shard` receives a `ShardContext` there: which part of every core axis it
    is given. `Manual()` needs it.
    """
    if callable(signature):
        return named_kernel()(signature)

    def decorate(fn: Callable[..., Any]) -> NamedKernel:
        title = name or getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", "kernel")
        parsed = parse_signature(signature, title) if signature is not None else signature_from_annotations(fn, title)
        checked = check_policies(policies or {}, parsed, title)
        for core, divisor in (multiple_of or {}).items():
            if core not in parsed.core_axes or not isinstance(divisor, int) or divisor < 1:
                raise PolicyError(
                    f"kernel {title!r}: multiple_of={{{core!r}: {divisor!r}}} must give one of its core axes "
                    f"({', '.join(parsed.core_axes)}) a positive integer."
                )
        for what, value, allowed in (("loop", loop, ("vmap", "collapse")), ("rng", rng, ("fold", "replicated"))):
            if value not in allowed:
                raise SignatureError(f"kernel {title!r}: {what}={value!r} is none of {', '.join(map(repr, allowed))}.")
        spec = KernelSpec(title, parsed, tuple(checked.items()), tuple((multiple_of or {}).items()), loop, rng)
        return NamedKernel(fn, spec)

    return decorate
