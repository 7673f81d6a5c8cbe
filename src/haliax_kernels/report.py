# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""A plan as a table to print, and as plain data."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from haliax_kernels.errors import bytes_text
from haliax_kernels.plan import AxisPlan, Collective, KernelPlan

AXIS_COLUMNS = (
    "argument",
    "axis",
    "core axis",
    "global",
    "on a device",
    "kernel sees",
    "mesh axes",
    "policy",
    "sharding",
)


def render_plan(plan: KernelPlan) -> str:
    """The text of `print(plan)`."""
    lines = summary_lines(plan)
    lines += ["", *table([AXIS_COLUMNS, *axis_rows(plan)])]
    if plan.mesh is not None and not plan.refusals:
        lines += ["", "collectives (bytes of the result on one device):"]
        found = collective_rows(plan)
        lines += [f"  {row}" for row in table(found)] if found else ["  none, forward and backward"]
    for title, texts in (("reshards", plan.reshards), ("notes", plan.notes)):
        if texts:
            lines += ["", f"{title}:", *(f"  {t}" for t in texts)]
    if plan.refusals:
        lines += ["", f"REFUSED, for {len(plan.refusals)} reason{'s' if len(plan.refusals) > 1 else ''}:"]
        for error in plan.refusals:
            lines += [f"  {line}" for line in f"{type(error).__name__}: {error}".splitlines()]
    return "\n".join(lines)


def summary_lines(plan: KernelPlan) -> list[str]:
    """The kernel, the mesh and the loop axes."""
    lines = [f'kernel {plan.kernel!r}: "{plan.signature}"', f"mesh: {_mesh(plan)}"]
    if plan.loop_axes:
        how = []
        if plan.vmapped:
            how.append(f"vmapped: {', '.join(plan.vmapped)}")
        if plan.leading:
            kind = "one leading dimension" if plan.collapse else "leading dimensions"
            how.append(f"{kind} of the kernel: {', '.join(plan.leading)}")
        lines.append(f"loop axes {'; '.join(how)}")
    return lines


def axis_rows(plan: KernelPlan) -> list[tuple[str, ...]]:
    """A row of `AXIS_COLUMNS` for each axis of each argument and output."""
    rows = []
    for x in plan.inputs:
        rows += _rows(x.label, x.axes) or [
            (x.label, "-", "-", str(x.shape), str(x.shape), str(x.shape), "-", "-", "whole")
        ]
    for i, out in enumerate(plan.outputs):
        rows += _rows(f"output {i}", out.axes, output=True) or [
            (f"output {i}", "-", "-", "()", "()", "()", "-", "-", "")
        ]
    return rows


def collective_rows(plan: KernelPlan) -> list[tuple[str, ...]]:
    """A row for each collective: phase, kind, mesh axes, what for, bytes."""
    return [
        (c.phase, c.kind, f"over {', '.join(c.mesh_axes)}", f"of {c.what}", _bytes(c.bytes_per_device) + _steps(c))
        for c in plan.collectives
    ]


def plan_dict(plan: KernelPlan) -> dict[str, Any]:
    """A plan as plain data, for JSON: sizes in elements, bytes on one device."""

    def axes(found: Iterable[AxisPlan]) -> list[dict[str, Any]]:
        return [
            {
                "name": a.name,
                "core": a.core,
                "size": a.size,
                "local_size": a.local_size,
                "mesh_axes": list(a.mesh_axes),
                "policy": None if a.policy is None else str(a.policy),
                "sharding_from": a.origin,
            }
            for a in found
        ]

    return {
        "kernel": plan.kernel,
        "signature": str(plan.signature),
        "mesh": None if plan.mesh is None else dict(plan.mesh.sizes),
        "inputs": [
            {"label": x.label, "dtype": str(x.dtype), "axes": axes(x.axes), "local_bytes": x.local_bytes}
            for x in plan.inputs
        ],
        "outputs": [
            {"dtype": None if x.dtype is None else str(x.dtype), "axes": axes(x.axes), "local_bytes": x.local_bytes}
            for x in plan.outputs
        ],
        "collectives": [{**asdict(c), "mesh_axes": list(c.mesh_axes)} for c in plan.collectives],
        "reshards": list(plan.reshards),
        "notes": list(plan.notes),
        "refusals": [f"{type(e).__name__}: {e}" for e in plan.refusals],
    }


def _mesh(plan: KernelPlan) -> str:
    if plan.mesh is None:
        return "none; the kernel is called directly"
    sizes = " x ".join(f"{name} {size}" for name, size in plan.mesh.sizes)
    return f"{sizes}, from {plan.mesh.source}"


def _rows(label: str, axes: Iterable[AxisPlan], output: bool = False) -> list[tuple[str, ...]]:
    rows = []
    for a in axes:
        known = a.size >= 0
        rows.append(
            (
                label,
                a.name,
                a.core or ("(loop)" if a.loop else "(whole)"),
                str(a.size) if known else "?",
                str(a.local_size) if known else "?",
                str(a.own_size if output else a.kernel_size) if known else "?",
                "+".join(a.mesh_axes) or "-",
                str(a.policy) if a.policy is not None else "-",
                a.origin if a.mesh_axes else "",
            )
        )
        label = ""
    return rows


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of cells in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _steps(c: Collective) -> str:
    if c.steps == 1:
        return ""
    return f", {c.steps} times" if c.steps is not None else ", as often as the data say"


def _bytes(n: int | None) -> str:
    return (
        "size known once the kernel is traced"
        if n is None
        else f"{n} B" + (f" ({bytes_text(n)})" if n >= 1000 else "")
    )
