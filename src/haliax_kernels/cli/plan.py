# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`haliax-kernels plan`: what each kernel of a Levanter run does on its mesh, on any machine."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haliax_kernels.cli.arguments import add_config_command, topology
from haliax_kernels.compiled.topologies import chip_count, device_kind
from haliax_kernels.cpu_devices import device_count, use_cpu_devices
from haliax_kernels.distributions import require_levanter, require_matplotlib
from haliax_kernels.errors import bytes_text
from haliax_kernels.report import plan_dict

if TYPE_CHECKING:
    from haliax_kernels.levanter.model_plan import ModelPlan

_DESCRIPTION = """\
Traces the model of a Levanter config on a mesh of as many devices as you name, with no weights, no data and no
accelerator, and prints for each call of a kernel its plan: how every array is sharded, what is communicated, with its
bytes, how a sharded sequence is computed and why. All other arguments go to Levanter, as in a run:
`--trainer.train_batch_size 64`, `--kernels.context_parallel ring`. The exit status is 1 where the run could not be.
"""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = add_config_command(
        commands, "plan", "print what each kernel of a Levanter config does on its mesh", _DESCRIPTION
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--devices", type=device_count, metavar="N", help="the number of devices")
    where.add_argument("--topology", type=topology, metavar="v5p:4x4x4", help="TPU chips, as they are connected")
    parser.add_argument("--platform", choices=("tpu", "gpu", "cpu"), help="of the --devices; tpu unless given")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the plans, into this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command."""
    require_levanter()
    if args.svg is not None:
        require_matplotlib()
        if not args.svg.parent.is_dir():
            return _failed(f"--svg {args.svg}: there is no directory {str(args.svg.parent)!r}")
    use_cpu_devices(args.devices or chip_count(args.topology))
    # Levanter tells about itself; here only the plan is wanted.
    logging.disable(logging.WARNING)
    from haliax_kernels.levanter.model_plan import plan_model

    kind = device_kind(args.topology) if args.topology else ""
    found = plan_model(["--config_path", args.config, *rest], args.platform or "tpu", kind)
    print(json.dumps(model_plan_dict(found), indent=2) if args.json else _text(found))
    if args.svg is not None and found.plans:
        from haliax_kernels.pictures.svg import svg_of

        try:
            args.svg.write_text(svg_of([plan for plan, _ in found.plans]), encoding="utf-8")
        except OSError as error:
            return _failed(f"--svg {args.svg}: {error.strerror}")
    elif args.svg is not None and found.refusal is None:
        return _failed(f"--svg {args.svg}: there is no kernel to draw")
    if found.refusal is not None and not args.json:
        return _failed(found.refusal)
    return 1 if found.refusal is not None else 0


def _failed(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 1


def _text(found: ModelPlan) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in found.mesh.items())
    lines = [f"mesh: {mesh}", f"one forward pass: {found.batch} examples of {found.length} tokens"]
    for plan, count in found.plans:
        times = "" if count == 1 else f" (traced {count} times)"
        lines += ["", "-" * 100, f"{plan}{times}", "", _sum(plan)]
    return "\n".join([*lines, *closing_lines(found)])


def closing_lines(found: ModelPlan) -> list[str]:
    """What a command says of a plan in the end."""
    lines = ["", "warnings:", *(f"  {w}" for w in found.warnings)] if found.warnings else []
    if not found.plans and found.refusal is None:
        lines += ["", "The model calls no named kernel. Set model.attn_backend: pallas_flash for ours."]
    return lines


def _sum(plan: Any) -> str:
    per_phase = []
    for phase in ("forward", "backward"):
        sizes = [(c.bytes_per_device or 0) * (c.steps or 1) for c in plan.collectives if c.phase == phase]
        per_phase.append(f"{phase} {bytes_text(sum(sizes))}")
    return f"communication of one call on one device: {', '.join(per_phase)}"


def model_plan_dict(found: ModelPlan) -> dict[str, Any]:
    """A plan as plain data."""
    return {
        "mesh": found.mesh,
        "batch": found.batch,
        "length": found.length,
        "kernels": [{**plan_dict(plan), "traced": count} for plan, count in found.plans],
        "warnings": list(found.warnings),
        "refusal": found.refusal,
    }
