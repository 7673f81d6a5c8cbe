# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""A `train_lm` config as Levanter reads it, and what follows from it without weights, data or devices."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.partitioning import round_axis_for_partitioning

from haliax_kernels.levanter.backend import register
from haliax_kernels.levanter.config import KernelsConfigError, nearest, set_options
from haliax_kernels.levanter.config_files import read_launcher_config

# Its size touches no kernel of ours, and a tokenizer may be far away.
_VOCAB = 32_000


class RunConfigError(KernelsConfigError):
    """The run that a config asks for cannot be; the message is one line that names the keys of the YAML file."""


@dataclass(frozen=True)
class RunConfig:
    """A config as Levanter reads it.

    Attributes:
        file: where it comes from, for messages.
        config: Levanter's `TrainLmConfig`.
    """

    file: str
    config: Any

    @classmethod
    def load(cls, args: Sequence[str]) -> RunConfig:
        """Read a command line with `--config_path FILE`, and arguments of this package.

        Raises:
            KernelsConfigError: a key is wrong.
        """
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
            ours = read_launcher_config(list(args), Path(copies))
            name = ", ".join(ours.files) or "command line"
            set_options(ours.kernels)
            try:
                return cls(name, levanter.config.main(keep, args=ours.args)())
            except (DecodingError, ParsingError, ValueError) as error:
                raise KernelsConfigError(f"{name}: {' '.join(str(error).split())}") from error

    @property
    def trainer(self) -> Any:
        return self.config.trainer

    def error(self, keys: Sequence[str], text: str) -> RunConfigError:
        """An error of one line that names keys."""
        return RunConfigError(f"{self.file}: {', '.join(keys)}: {' '.join(text.split())}")

    @cached_property
    def mesh(self) -> dict[str, int]:
        """The mesh axes with their sizes, on as many devices as JAX has.

        Raises:
            RunConfigError: they do not fit the number of devices.
        """
        trainer = self.trainer
        try:
            ici, dcn = trainer.mesh.axis_shapes(jax.device_count(), 1)
        except ValueError as error:
            axes = ", ".join(f"{k}: {v}" for k, v in trainer.mesh.axes.items())
            raise self.error(
                ["trainer.mesh.axes"],
                f"{error} The axes are {{{axes}}}, the devices {jax.device_count()}: change an axis, give one of them "
                "-1 to take what is left, or plan for another number of devices.",
            ) from error
        return {**ici, **{k: v for k, v in dcn.items() if k not in ici}}

    @cached_property
    def batch(self) -> tuple[int, int]:
        """Examples of one step, and of one forward pass.

        Raises:
            RunConfigError: the shards do not divide them.
        """
        trainer = self.trainer
        shards, size, each = trainer.data_axis_size, trainer.train_batch_size, trainer.per_device_parallelism
        size = size if isinstance(size, int) else size[0].value
        if size == -1:
            size = each * shards
        if size % (shards * max(each, 1)):
            raise self.error(
                ["trainer.train_batch_size"] + (["trainer.per_device_parallelism"] if each > 0 else []),
                f"{size} is no multiple of {shards * max(each, 1)}, the {shards} shards of the batch"
                + (f" times {each} examples on each" if each > 0 else "")
                + f". Use {-(-size // (shards * max(each, 1))) * shards * max(each, 1)}, or fewer shards.",
            )
        return size, each * shards if each > 0 else size

    @cached_property
    def length(self) -> int:
        """Tokens of an example.

        Raises:
            RunConfigError: more than the model takes.
        """
        length, maximum = self.config.train_seq_len, self.config.model.max_seq_len
        if length is not None and length > maximum:
            raise self.error(["train_seq_len"], f"{length} is more than model.max_seq_len, {maximum}.")
        return length or maximum

    def axes(self, batch: int) -> tuple[Axis, Axis]:
        """The axes of an example's tokens."""
        name = self.trainer.batch_axis_name or "batch"
        return Axis(name, batch), self.config.model.max_Pos.resize(self.length)

    def vocab(self) -> Axis:
        """The axis of a vocabulary; a mesh must be set."""
        return round_axis_for_partitioning(Axis("vocab", _VOCAB), self.trainer.parameter_axis_mapping)

    def example(self, tokens: Any) -> Any:
        """Levanter's training example of tokens (batch, position)."""
        from levanter.layers.attention import AttentionMask
        from levanter.models.lm_model import LmExample

        named = hax.named(tokens, self.axes(tokens.shape[0]))
        mask = AttentionMask.causal()
        if getattr(self.config.data, "block_cross_document_attention", True):
            mask = mask.with_segment_ids(named)
        return LmExample(tokens=named, loss_weight=named.astype(jnp.float32), attn_mask=mask)

    def loss(self, model: Any, example: Any, *, key: Any = None) -> Any:
        """The loss of `train_lm`."""
        return model.compute_next_token_loss(example, key=key, logsumexp_weight=self.config.z_loss_weight)

    def mappings(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(key of the YAML file, array axis, mesh axes) of each mapping that the config spells out."""
        mesh = self.trainer.mesh
        for block in ("shared_mapping", "compute_mapping", "param_mapping"):
            for axis, targets in getattr(mesh, block).items():
                found = (targets,) if isinstance(targets, str) else tuple(targets or ())
                yield f"trainer.mesh.{block}.{axis}", axis, found

    def check_mapping_targets(self) -> None:
        """Refuse mesh axes that are none.

        Raises:
            RunConfigError: a mapping names one.
        """
        for key, _, targets in self.mappings():
            for target in targets:
                if target not in self.mesh:
                    raise self.error(
                        [key],
                        f"the mesh has no axis {target!r};{nearest(target, list(self.mesh))} there are: "
                        f"{', '.join(self.mesh)}. Name one of them, or add it to trainer.mesh.axes.",
                    )

    def check_mapping_names(self, names: set[str]) -> None:
        """Refuse a misspelt array axis, which shards nothing, in silence. (One of other models is no mistake.)

        Raises:
            RunConfigError: a mapping names one.
        """
        for key, axis, _ in self.mappings():
            close = difflib.get_close_matches(axis, sorted(names), n=1, cutoff=0.8)
            if axis not in names and close:
                raise self.error(
                    [key],
                    f"the model has no axis {axis!r}, and so nothing is sharded by it; did you mean {close[0]!r}?",
                )
