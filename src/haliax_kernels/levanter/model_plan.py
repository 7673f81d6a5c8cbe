# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the kernels of a Levanter training run would do: its model traced on its mesh, with no weights and no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from haliax_kernels.errors import NamedKernelError
from haliax_kernels.implementations import planned_platform
from haliax_kernels.levanter.config import current_options
from haliax_kernels.levanter.run_config import RunConfig, RunConfigError
from haliax_kernels.pictures.schedule import ring_schedule
from haliax_kernels.plan import KernelPlan
from haliax_kernels.recording import RecordedCall, recorded_calls

# How much longer than a device's mean work a ring may take without a warning: two shards of a zigzag ring take 1.25.
UNEVEN = 1.3


@dataclass(frozen=True)
class ModelPlan:
    """What the kernels of a run would do.

    Attributes:
        mesh: the mesh axes with their sizes.
        batch: examples in one forward pass.
        length: tokens of an example.
        calls: each call of a named kernel that differs from the others, with how many there are in the trace. A scan
            over layers is traced once.
        warnings: what runs, but maybe not as it was meant to.
        refusal: why the run could not be; None if it could.
    """

    mesh: dict[str, int]
    batch: int
    length: int
    calls: tuple[tuple[RecordedCall, int], ...]
    warnings: tuple[str, ...]
    refusal: str | None = None

    @property
    def plans(self) -> tuple[tuple[KernelPlan, int], ...]:
        """The plans of the calls."""
        return tuple((call.plan, n) for call, n in self.calls)


def plan_model(args: Sequence[str], platform: str | None = None, kind: str = "") -> ModelPlan:
    """Trace the loss of a `train_lm` run on as many devices as JAX has.

    Args:
        args: Levanter's command line with `--config_path FILE`, and arguments of this package.
        platform: `cpu`, `gpu` or `tpu`, to choose implementations for; None for JAX's own.
        kind: the `device_kind` of its devices, as JAX calls it; empty for any.

    Raises:
        KernelsConfigError: a key of the config is wrong. What only shows while tracing is in the result's `refusal`.
    """
    run = RunConfig.load(list(args))
    with planned_platform(platform, kind):
        return plan_run(run)


def plan_run(run: RunConfig) -> ModelPlan:
    """As `plan_model`, for a config that is read already."""
    mesh, (_, batch) = run.mesh, run.batch
    run.check_mapping_targets()
    refusal, names = None, set()
    with run.trainer.use_device_mesh(), recorded_calls() as found:
        try:
            names = _trace(run, batch)
        except Exception as error:
            refusal = str(_refused(run, mesh, error))
    calls = _counted(found)
    if refusal is None:
        run.check_mapping_names(names | {a.name for c, _ in calls for x in c.plan.inputs for a in x.axes})
    plans = [(c.plan, n) for c, n in calls]
    length = run.config.train_seq_len or run.config.model.max_seq_len
    return ModelPlan(mesh, batch, length, calls, tuple(dict.fromkeys(_warnings(mesh, plans))), refusal)


def _trace(run: RunConfig, batch: int) -> set[str]:
    """Trace the loss and its gradient; return the names of all axes of the parameters and of an example."""
    trainer, Vocab, axes = run.trainer, run.vocab(), run.axes(batch)

    def loss(key: Any, tokens: Any) -> Any:
        model = trainer.mp.cast_to_compute(run.config.model.build(Vocab, key=key))

        def of_model(model: Any) -> Any:
            loss = run.loss(model, run.example(tokens), key=key)
            return loss.scalar() if isinstance(loss, NamedArray) else loss

        return eqx.filter_grad(of_model)(model), model

    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    with hax.axis_mapping(trainer.compute_axis_mapping):
        tokens = jax.ShapeDtypeStruct(tuple(a.size for a in axes), jnp.int32)
        _, model = eqx.filter_eval_shape(loss, key, tokens)
    leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, NamedArray))
    return {a.name for x in leaves if isinstance(x, NamedArray) for a in x.axes} | {a.name for a in axes}


def _refused(run: RunConfig, mesh: dict[str, int], error: Exception) -> RunConfigError:
    """One line about what stopped the trace, with the keys that its words point to."""
    if isinstance(error, RunConfigError):
        return error
    text = " ".join(str(error).split()) or type(error).__name__
    keys: list[str] = []
    mentioned = {word for word in [*mesh, *(axis for _, axis, _ in run.mappings())] if f"'{word}'" in text}
    for key, axis, targets in run.mappings():
        ours = axis in mentioned or (axis == "position" and "'key_position'" in text)
        if ours or (mentioned & set(targets) and not key.startswith("trainer.mesh.param_mapping")):
            keys.append(key)
    keys += [f"trainer.mesh.axes.{m}" for m in mesh if m in mentioned and m in run.trainer.mesh.axes]
    if "implementation" in text:
        own = "linear_attention" in text and hasattr(run.config.model, "linear")
        keys.insert(0, "model.linear.implementation" if own else "kernels.implementation")
    if "context_parallel" in text:
        keys.insert(0, "kernels.context_parallel")
    for block in ("block_q", "block_k"):
        if "block_sizes" in text and getattr(current_options(), block) is not None:
            keys.insert(0, f"kernels.{block}")
    if "attn_backend" in text or (isinstance(error, NamedKernelError) and not keys):
        keys.insert(0, "model.attn_backend")
    if not isinstance(error, NamedKernelError):
        text = f"{type(error).__name__}: {text}"
    return run.error(keys or ["model"], text)


def _counted(found: Sequence[RecordedCall]) -> tuple[tuple[RecordedCall, int], ...]:
    counts: dict[str, int] = {}
    first: dict[str, RecordedCall] = {}
    for call in found:
        text = str(call.plan)
        counts[text] = counts.get(text, 0) + 1
        first.setdefault(text, call)
    return tuple((first[text], n) for text, n in counts.items())


def _warnings(mesh: dict[str, int], plans: Sequence[tuple[KernelPlan, int]]) -> Iterator[str]:
    for plan, _ in plans:
        if plan.refusals:
            continue
        used = {m for x in plan.inputs for a in x.axes for m in a.mesh_axes}
        for m, size in mesh.items():
            if size > 1 and m not in used:
                yield (
                    f"{plan.kernel}: mesh axis {m!r} ({size} devices) shards none of its arguments: its devices all "
                    "compute the same."
                )
        for c in plan.collectives:
            if c.kind == "all-gather" and c.phase == "forward" and c.what != "the kernel itself":
                yield f"{plan.kernel}: {c.what} is gathered over {' and '.join(map(repr, c.mesh_axes))} in every call."
        if plan.ring is not None:
            schedule = ring_schedule(plan.ring)
            longest, mean = schedule.critical_path, schedule.blocks / schedule.shards
            if longest > UNEVEN * mean:
                yield (
                    f"{plan.kernel}: its mask gives the shards over "
                    f"{' and '.join(map(repr, plan.ring.mesh_axes))} unequal work: the ring waits for {longest:g} "
                    f"blocks, of which a device computes {mean:g} on average. kernels.context_parallel: zigzag evens "
                    "it out."
                )
