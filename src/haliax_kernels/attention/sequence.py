# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Whether a call's sequence is sharded, and how its shards are to work together."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import haliax
from haliax import Axis

from haliax_kernels import _compat
from haliax_kernels.attention.contract import AttentionOptions
from haliax_kernels.context.strategy import ContextParallel, SequenceCall, Strategy, choose
from haliax_kernels.mesh import as_mesh_axes
from haliax_kernels.plan import AxisPlan, InputPlan, KernelPlan
from haliax_kernels.ring_plan import RingPlan


@contextlib.contextmanager
def keys_beside_queries(q_pos: Axis, k_pos: Axis) -> Iterator[None]:
    """Let the axis mapping say of the keys' position axis what it says of the queries'.

    Models rename `position` just before attention, and axis mappings do not know the new name. Keys that the mesh axes
    do not divide are left whole.
    """
    mapping: Any = haliax.partitioning.current_thread_local_mapping() or {}
    mesh_axes = as_mesh_axes(mapping.get(q_pos.name))
    if not mesh_axes or k_pos.name in mapping or k_pos.size % _devices(mesh_axes):
        yield
        return
    with haliax.axis_mapping({**mapping, k_pos.name: mesh_axes}):
        yield


def _devices(mesh_axes: tuple[str, ...]) -> int:
    mesh = _compat.context_mesh() or _compat.legacy_mesh()
    return math.prod(mesh.shape.get(m, 1) for m in mesh_axes) if mesh is not None else 1


def strategy_of(
    plan: KernelPlan,
    options: AttentionOptions,
    wanted: ContextParallel,
    layout: str,
    *,
    static_offset: bool,
    pairs: bool,
) -> tuple[Strategy | None, str | None]:
    """(strategy, the axis of the heads), or (None, None) where neither queries nor keys are sharded.

    Args:
        plan: of the call with whole sequences.
        options: the static part of the call.
        wanted: the caller's `context_parallel`.
        layout: the caller's `sequence_layout`.
        static_offset: whether the position of the first query is 0; else it is known on the device only.
        pairs: whether there is a mask or bias with an entry for each query and key.

    Raises:
        NamedKernelError: as `choose` does.
    """
    q, k, v = plan.inputs[:3]
    q_pos, k_pos = _core(q, "q_pos"), _core(k, "k_pos")
    sizes = dict(plan.mesh.sizes) if plan.mesh is not None else {}
    q_axes, k_axes = (tuple((m, sizes[m]) for m in plan.several(a.mesh_axes)) for a in (q_pos, k_pos))
    if wanted == "error" or not (q_axes or k_axes):
        return None, None
    if any(a.size % a.shards for a in (q_pos, k_pos)):  # the plan of the shards says what would fit
        return Strategy("ring", tuple(m for m, _ in q_axes or k_axes)), None
    shared = [a for a in q.axes if a.loop and all(a.name in (b.name for b in x.axes) for x in (k, v))]
    heads = next((a for a in shared if "head" in a.name), shared[-1] if len(shared) > 1 else None)
    call = SequenceCall(
        options=options,
        q_offset=0 if static_offset else None,
        q_mesh_axes=q_axes,
        k_mesh_axes=k_axes,
        q_rows=q_pos.local_size,
        k_rows=k_pos.local_size,
        heads=None if heads is None else (heads.name, heads.local_size),
        group=math.prod(a.local_size for a in q.axes if a.core == "group"),
        batch=math.prod(a.local_size for a in q.axes if a.loop and (heads is None or a.name != heads.name)),
        sizes=(_core(k, "key").size, math.prod(a.size for a in v.axes if a.core == "value")),
        itemsize=q.dtype.itemsize,
        pairs=pairs,
        layout=layout,
        names=(q_pos.name, k_pos.name),
    )
    strategy = choose(call, wanted)
    return strategy, call.heads[0] if strategy.ulysses and call.heads else None


def _core(x: InputPlan, core: str) -> AxisPlan:
    return next(a for a in x.axes if a.core == core)


def ring_of(
    strategy: Strategy, plan: KernelPlan, options: AttentionOptions, *, static_offset: bool
) -> RingPlan | None:
    """The ring of a call, if `strategy` has one; `plan` and `static_offset` are as in `strategy_of`."""
    axes = strategy.mesh_axes[: len(strategy.mesh_axes) - len(strategy.ulysses)]
    if strategy.mode not in ("ring", "zigzag") or plan.mesh is None or not axes:
        return None
    sizes = dict(plan.mesh.sizes)
    shards = math.prod(sizes[m] for m in axes)
    q, k = plan.inputs[:2]
    return RingPlan(
        mesh_axes=axes,
        shards=shards,
        zigzag=strategy.mode == "zigzag" or strategy.stored_zigzag,
        q_rows=_core(q, "q_pos").size // shards,
        k_rows=_core(k, "k_pos").size // shards,
        left=options.left,
        right=options.right,
        q_offset=0 if static_offset else None,
    )


def without_reason(strategy: Strategy) -> Strategy:
    """What the compiled program depends on."""
    return replace(strategy, reason="")


def note(strategy: Strategy, wanted: Any) -> str:
    """The plan's line about the strategy."""
    names = {"own_queries": "each device its own queries", "own_keys": "each device its own keys"}
    mode = names.get(strategy.mode, strategy.mode)
    rest = strategy.mesh_axes[: len(strategy.mesh_axes) - len(strategy.ulysses)]
    parts = [f"{mode} over {', '.join(rest)}"] if rest else []
    parts += [f"ulysses over {', '.join(strategy.ulysses)}"] if strategy.ulysses else []
    stored = ", in zigzag order" if strategy.stored_zigzag else ""
    return f"context_parallel={wanted!r}: {' and '.join(parts)}{stored}; {strategy.reason}"
