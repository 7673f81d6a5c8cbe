# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What a config would run as functions of abstract arrays: Levanter's own train step, and each kernel alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.partitioning import infer_resource_partitions
from jax.sharding import Mesh, NamedSharding

from haliax_kernels.levanter.run_config import RunConfig
from haliax_kernels.recording import RecordedCall


@dataclass(frozen=True)
class AbstractProgram:
    """A function of plain global arrays.

    Attributes:
        run: the function.
        arguments: the arrays that it takes, with their shardings.
        donated: how many of the first arguments it may overwrite.
    """

    run: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donated: int = 0


def train_step(run: RunConfig) -> AbstractProgram:
    """The train step that `train_lm` would jit: loss, gradients, optimizer, new state. A mesh must be set."""
    import levanter.tracker
    from levanter.tracker import NoopTracker
    from levanter.trainer import Trainer
    from levanter.trainer_state import TrainerState

    config, tc = run.config, run.trainer
    with levanter.tracker.current_tracker(NoopTracker()):
        optimizer = config.optimizer.build(tc.num_train_steps)
        loss: Any = run.loss
        trainer = Trainer(tc, optimizer, loss, add_default_hooks=False)
    Vocab, axes = run.vocab(), run.axes(run.batch[0])

    def initial_state(key: Any) -> Any:
        return TrainerState.init(
            optimizer,
            config.model.build(Vocab, key=key),
            key=key,
            is_trainable=True,
            mp=trainer.mp,
            quantization=tc.quantization,
            model_averaging=tc.model_averaging,
        )

    with hax.axis_mapping(tc.parameter_axis_mapping):
        state = eqx.filter_eval_shape(initial_state, jax.eval_shape(lambda: jax.random.PRNGKey(0)))
        tokens = jax.ShapeDtypeStruct(tuple(a.size for a in axes), jnp.int32)
        example = eqx.filter_eval_shape(run.example, tokens)
    arrays, static = eqx.partition((state, example), _is_array)
    leaves, tree = jax.tree.flatten(arrays)
    shardings = [
        *_shardings(arrays[0], tc.parameter_axis_mapping, tc.device_mesh),
        *_shardings(arrays[1], tc.compute_axis_mapping, tc.device_mesh),
    ]

    def step(*flat: jax.Array) -> tuple[Any, ...]:
        state, example = eqx.combine(jax.tree.unflatten(tree, flat), static)
        with hax.axis_mapping(tc.parameter_axis_mapping):
            # What the public Trainer.train_step jits, before it waits for the loss.
            result = trainer._train_step(state, (example,), {}, _no_hooks=True)
        return (*jax.tree.leaves(eqx.filter(result.new_state, eqx.is_array)), result.loss)

    arguments = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, shardings, strict=True)
    )
    return AbstractProgram(step, arguments, donated=len(jax.tree.leaves(arrays[0])))


def gradient(call: RecordedCall, mesh: Mesh) -> AbstractProgram:
    """Forward and backward of one call, with gradients of every argument that has one."""
    assert call.run is not None
    forward, moving = call.run, [i for i, x in enumerate(call.plan.inputs) if x.differentiable]

    def both(*arrays: jax.Array) -> Any:
        def of_moving(*some: jax.Array) -> tuple[jax.Array, ...]:
            every = list(arrays)
            for i, x in zip(moving, some, strict=True):
                every[i] = x
            return forward(*every)

        out, pullback = jax.vjp(of_moving, *(arrays[i] for i in moving))
        # In a model other layers lie between the two, and nothing of one can serve the other.
        return out, jax.lax.optimization_barrier(pullback)(out)

    arguments = tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, x.spec))
        for a, x in zip(call.arguments, call.plan.inputs, strict=True)
    )
    return AbstractProgram(both, arguments)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _is_named(x: Any) -> bool:
    return isinstance(x, NamedArray)


def _shardings(tree: Any, mapping: Any, mesh: Any) -> list[Any]:
    """Of each array of a tree, as Levanter's `named_jit` lays them out."""
    found = infer_resource_partitions(tree, mapping, mesh=mesh)
    return jax.tree.leaves(jax.tree.map(lambda _, sharding: sharding, tree, found, is_leaf=_is_named))
