# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What the kernels of a Levanter training run would do: its model traced on its mesh, with no weights and no data."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import round_axis_for_partitioning

from haliax_kernels.errors import NamedKernelError
from haliax_kernels.implementations import planned_platform
from haliax_kernels.levanter.backend import register
from haliax_kernels.levanter.config import KernelsConfigError, nearest, set_options
from haliax_kernels.levanter.config_files import read_launcher_config
from haliax_kernels.plan import KernelPlan
from haliax_kernels.recording import recorded_plans

# Its size touches no kernel of ours, and a tokenizer may be far away.
_VOCAB = 32_000


class ModelPlanError(KernelsConfigError):
    """The run that a config asks for cannot be; the message is one line that names the keys of the YAML file."""


@dataclass(frozen=True)
class ModelPlan:
    """What the kernels of a run would do.

    Attributes:
        mesh: the mesh axes with their sizes.
        batch: examples in one forward pass.
        length: tokens of an example.
        plans: of each call of a named kernel that differs from the others, with how many there are in the trace.
            A scan over layers is traced once.
        warnings: what runs, but maybe not as it was meant to.
        refusal: why the run could not be; None if it could.
    """

    mesh: dict[str, int]
    batch: int
    length: int
    plans: tuple[tuple[KernelPlan, int], ...]
    warnings: tuple[str, ...]
    refusal: str | None = None


@dataclass(frozen=True)
class _Run:
    """A config as Levanter reads it."""

    file: str
    config: Any

    @property
    def trainer(self) -> Any:
        return self.config.trainer

    def error(self, keys: Sequence[str], text: str) -> ModelPlanError:
        return ModelPlanError(f"{self.file}: {', '.join(keys)}: {' '.join(text.split())}")


def plan_model(args: Sequence[str], platform: str | None = None) -> ModelPlan:
    """Trace the loss of a `train_lm` run on as many devices as JAX has.

    Args:
        args: Levanter's command line with `--config_path FILE`, and arguments of this package.
        platform: `cpu`, `gpu` or `tpu`, to choose implementations for; None for JAX's own.

    Raises:
        KernelsConfigError: a key of the config is wrong. What only shows while tracing is in the result's `refusal`.
    """
    run = _load(list(args))
    mesh, batch = _mesh(run)
    _check_mapping_targets(run, mesh)
    length = run.config.train_seq_len or run.config.model.max_seq_len
    refusal, names = None, set()
    with run.trainer.use_device_mesh(), planned_platform(platform), recorded_plans() as found:
        try:
            names = _trace(run, batch, length)
        except Exception as error:
            refusal = str(_refused(run, mesh, error))
    plans = _counted(found)
    if refusal is None:
        _check_mapping_names(run, names | {a.name for p, _ in plans for x in p.inputs for a in x.axes})
    return ModelPlan(mesh, batch, length, plans, tuple(dict.fromkeys(_warnings(mesh, plans))), refusal)


def _load(args: list[str]) -> _Run:
    import levanter.config
    from draccus.utils import DecodingError, ParsingError
    from levanter.main.train_lm import TrainLmConfig
    from levanter.models.lm_model import LmConfig

    LmConfig.get_known_choices()
    register()

    def keep(config: Any) -> Any:
        return config

    keep.__annotations__ = {"config": TrainLmConfig}
    with tempfile.TemporaryDirectory(prefix="haliax_kernels_") as copies:
        ours = read_launcher_config(args, Path(copies))
        name = ", ".join(ours.files) or "command line"
        set_options(ours.kernels)
        try:
            return _Run(name, levanter.config.main(keep, args=ours.args)())
        except (DecodingError, ParsingError, ValueError) as error:
            raise KernelsConfigError(f"{name}: {' '.join(str(error).split())}") from error


def _mesh(run: _Run) -> tuple[dict[str, int], int]:
    """The mesh's axes, and the examples in one forward pass."""
    trainer = run.trainer
    try:
        ici, dcn = trainer.mesh.axis_shapes(jax.device_count(), 1)
    except ValueError as error:
        axes = ", ".join(f"{k}: {v}" for k, v in trainer.mesh.axes.items())
        raise run.error(
            ["trainer.mesh.axes"],
            f"{error} The axes are {{{axes}}}, the devices {jax.device_count()}: change an axis, give one of them -1 "
            "to take what is left, or plan for another number of devices.",
        ) from error
    mesh = {**ici, **{k: v for k, v in dcn.items() if k not in ici}}
    shards, size, each = trainer.data_axis_size, trainer.train_batch_size, trainer.per_device_parallelism
    size = size if isinstance(size, int) else size[0].value
    if size == -1:
        size = each * shards
    if size % (shards * max(each, 1)):
        raise run.error(
            ["trainer.train_batch_size"] + (["trainer.per_device_parallelism"] if each > 0 else []),
            f"{size} is no multiple of {shards * max(each, 1)}, the {shards} shards of the batch"
            + (f" times {each} examples on each" if each > 0 else "")
            + f". Use {-(-size // (shards * max(each, 1))) * shards * max(each, 1)}, or fewer shards.",
        )
    return mesh, each * shards if each > 0 else size


def _mappings(run: _Run) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(key of the YAML file, array axis, mesh axes) of each mapping that the config spells out."""
    mesh = run.trainer.mesh
    for block in ("shared_mapping", "compute_mapping", "param_mapping"):
        for axis, targets in getattr(mesh, block).items():
            yield (
                f"trainer.mesh.{block}.{axis}",
                axis,
                (targets,) if isinstance(targets, str) else tuple(targets or ()),
            )


def _check_mapping_targets(run: _Run, mesh: dict[str, int]) -> None:
    for key, _, targets in _mappings(run):
        for target in targets:
            if target not in mesh:
                raise run.error(
                    [key],
                    f"the mesh has no axis {target!r};{nearest(target, list(mesh))} there are: {', '.join(mesh)}. "
                    "Name one of them, or add it to trainer.mesh.axes.",
                )


def _check_mapping_names(run: _Run, names: set[str]) -> None:
    """A misspelt axis shards nothing, in silence. (One that only other models have is no mistake.)"""
    for key, axis, _ in _mappings(run):
        close = difflib.get_close_matches(axis, sorted(names), n=1, cutoff=0.8)
        if axis not in names and close:
            raise run.error(
                [key], f"the model has no axis {axis!r}, and so nothing is sharded by it; did you mean {close[0]!r}?"
            )


def _trace(run: _Run, batch: int, length: int) -> set[str]:
    """Trace the loss; return the names of all axes of the parameters and of an example."""
    from levanter.layers.attention import AttentionMask
    from levanter.models.lm_model import LmExample

    config, trainer = run.config, run.trainer
    maximum = config.model.max_seq_len
    if length > maximum:
        raise run.error(["train_seq_len"], f"{length} is more than model.max_seq_len, {maximum}.")
    Batch, Pos = Axis(trainer.batch_axis_name or "batch", batch), config.model.max_Pos.resize(length)
    Vocab = round_axis_for_partitioning(Axis("vocab", _VOCAB), trainer.parameter_axis_mapping)
    segments = getattr(config.data, "block_cross_document_attention", True)

    def loss(key: Any, tokens: Any) -> Any:
        model = trainer.mp.cast_to_compute(config.model.build(Vocab, key=key))
        named = hax.named(tokens, (Batch, Pos))
        mask = AttentionMask.causal()
        if segments:
            mask = mask.with_segment_ids(named)
        example = LmExample(tokens=named, loss_weight=named.astype(jnp.float32), attn_mask=mask)
        out = model.compute_next_token_loss(example, key=key, logsumexp_weight=config.z_loss_weight)
        return out, model

    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    with hax.axis_mapping(trainer.compute_axis_mapping):
        _, model = eqx.filter_eval_shape(loss, key, jax.ShapeDtypeStruct((batch, length), jnp.int32))
    leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, NamedArray))
    return {a.name for x in leaves if isinstance(x, NamedArray) for a in x.axes} | {Batch.name, Pos.name}


def _refused(run: _Run, mesh: dict[str, int], error: Exception) -> ModelPlanError:
    """One line about what stopped the trace, with the keys that its words point to."""
    if isinstance(error, ModelPlanError):
        return error
    text = " ".join(str(error).split()) or type(error).__name__
    keys: list[str] = []
    mentioned = {word for word in [*mesh, *(axis for _, axis, _ in _mappings(run))] if f"'{word}'" in text}
    for key, axis, targets in _mappings(run):
        ours = axis in mentioned or (axis == "position" and "'key_position'" in text)
        if ours or (mentioned & set(targets) and not key.startswith("trainer.mesh.param_mapping")):
            keys.append(key)
    keys += [f"trainer.mesh.axes.{m}" for m in mesh if m in mentioned and m in run.trainer.mesh.axes]
    if "implementation" in text:
        keys.insert(0, "kernels.implementation")
    if "context_parallel" in text:
        keys.insert(0, "kernels.context_parallel")
    if "attn_backend" in text or (isinstance(error, NamedKernelError) and not keys):
        keys.insert(0, "model.attn_backend")
    if not isinstance(error, NamedKernelError):
        text = f"{type(error).__name__}: {text}"
    return run.error(keys or ["model"], text)


def _counted(found: Sequence[KernelPlan]) -> tuple[tuple[KernelPlan, int], ...]:
    counts: dict[str, int] = {}
    first: dict[str, KernelPlan] = {}
    for plan in found:
        text = str(plan)
        counts[text] = counts.get(text, 0) + 1
        first.setdefault(text, plan)
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
