# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Compile what a Levanter config would run, for TPUs that are not there."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_kernels.compiled.collectives import CompiledCollective, compiled_collectives
from haliax_kernels.compiled.kernels import CompiledKernel, compiled_kernels
from haliax_kernels.compiled.program import Program
from haliax_kernels.compiled.schedules import dump_schedules, read_schedules
from haliax_kernels.compiled.topologies import device_kind, hbm_bytes, topology_mesh
from haliax_kernels.implementations import planned_platform
from haliax_kernels.levanter.model_plan import ModelPlan, plan_run
from haliax_kernels.levanter.programs import AbstractProgram, gradient, train_step
from haliax_kernels.levanter.run_config import RunConfig

Stage = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class CompiledProgram:
    """What the TPU compiler says of one program.

    Attributes:
        title: what it is.
        failure: why it does not compile; None if it does.
        argument_bytes: on one device: of parameters, optimizer state and data.
        other_bytes: on one device: of what it needs beside them while it runs, its own code included.
        collectives: its collectives.
        kernels: its Pallas kernels.
        named_kernels: the names of the named kernels in it, which stand in the `op_name` of what belongs to them.
    """

    title: str
    failure: str | None = None
    argument_bytes: int = 0
    other_bytes: int = 0
    collectives: tuple[CompiledCollective, ...] = ()
    kernels: tuple[CompiledKernel, ...] = ()
    named_kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preflight:
    """What a run would be on a topology.

    Attributes:
        topology: its name.
        hbm_bytes: memory of one chip.
        plan: the plans of the model's kernels; where it has a refusal, nothing was compiled.
        programs: what was compiled.
    """

    topology: str
    hbm_bytes: int
    plan: ModelPlan
    programs: tuple[CompiledProgram, ...]

    @property
    def passed(self) -> bool:
        """Whether the run could start."""
        return self.plan.refusal is None and all(p.failure is None for p in self.programs)


def preflight(args: Sequence[str], topology: str, only: str | None, stage: Stage) -> Preflight:
    """Compile the train step of a `train_lm` run, or its attention, for a TPU topology.

    JAX must have as many CPU devices as the topology has chips, and libtpu must not be loaded yet.

    Args:
        args: Levanter's command line with `--config_path FILE`, and arguments of this package.
        topology: such as `v5e:4x4`.
        only: `attention` to compile each kind of call of a named kernel alone, forward and backward; None for the
            whole train step.
        stage: a context manager for each stage, given its title.

    Raises:
        KernelsConfigError: a key of the config is wrong.
        UnsupportedOptionError: there is no such topology, or no libtpu.
    """
    with tempfile.TemporaryDirectory(prefix="haliax_kernels_") as dump:
        dump_schedules(Path(dump))
        with stage("reading the config"):
            run = RunConfig.load(list(args))
        with planned_platform("tpu", device_kind(topology)):
            with stage("planning the model's kernels"):
                plan = plan_run(run)
            found: list[CompiledProgram] = []
            if plan.refusal is None:
                mesh = topology_mesh(topology, run.mesh)
                seen: set[str] = set()
                for title, make in _programs(run, plan, only):
                    with stage(f"tracing {title}"), run.trainer.use_device_mesh():
                        program = make()
                        exported = _export(program)
                    lowered = _lower(program, exported, mesh)
                    with stage(f"compiling {title} for {topology}"):
                        found.append(_compile(title, lowered, plan, Path(dump), seen))
    return Preflight(topology, hbm_bytes(topology), plan, tuple(found))


def _programs(
    run: RunConfig, plan: ModelPlan, only: str | None
) -> Iterator[tuple[str, Callable[[], AbstractProgram]]]:
    if only is None:
        yield "the train step", lambda: train_step(run)
        return
    for n, (call, _) in enumerate(plan.calls):
        number = f" (kind {n + 1} of {len(plan.calls)})" if len(plan.calls) > 1 else ""
        yield (
            f"{call.plan.kernel}, forward and backward{number}",
            lambda call=call: gradient(call, run.trainer.device_mesh),
        )


def _export(program: AbstractProgram) -> export.Exported:
    """The program for TPUs, traced on CPU devices: models make arrays while they are traced, and absent devices cannot
    hold them."""
    jitted = jax.jit(program.run, in_shardings=[a.sharding for a in program.arguments])
    return export.export(jitted, platforms=["tpu"])(*program.arguments)


def _lower(program: AbstractProgram, exported: export.Exported, mesh: Mesh) -> Any:
    """The exported program on the mesh of absent devices."""
    specs = [getattr(a.sharding, "spec", PartitionSpec()) for a in program.arguments]
    arguments = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(program.arguments, specs, strict=True)
    ]
    return jax.jit(exported.call, donate_argnums=tuple(range(program.donated))).trace(*arguments).lower()


def _compile(title: str, lowered: Any, plan: ModelPlan, dump: Path, seen: set[str]) -> CompiledProgram:
    try:
        compiled = lowered.compile()
    except Exception as error:
        return CompiledProgram(title, failure=_reason(error))
    program, memory = Program(compiled.as_text()), compiled.memory_analysis()
    return CompiledProgram(
        title,
        argument_bytes=memory.argument_size_in_bytes,
        other_bytes=memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.generated_code_size_in_bytes,
        collectives=compiled_collectives(program, plan.mesh),
        kernels=compiled_kernels(program, read_schedules(dump, seen)),
        named_kernels=tuple(dict.fromkeys(p.kernel for p, _ in plan.plans)),
    )


def _reason(error: Exception) -> str:
    """The compiler's message in one line, without its lists of allocations."""
    text = str(error)
    used = re.search(r"Ran out of memory in memory space (\w+)\.\s*(Used [^.]*\.\d+\w* of [^.]*\.\d+\w*)?", text)
    needed = re.search(r"Ran out of memory on HBM, (the total .*? exceeds available HBM \([\d.]+\w*\))", text)
    if needed or (used and used[1] == "hbm"):
        found = needed[1] if needed else used and used[2]
        return (
            f"it does not fit into the chip's memory (HBM): {found or 'out of memory'}. Use more chips, a lower "
            "trainer.per_device_parallelism, or gradient_checkpointing in the model."
        )
    if used:
        return f"it does not fit into memory space {used[1]}: {used[2] or 'out of memory'}."
    return " ".join(text.split("\n\n")[0].split())[:600]
