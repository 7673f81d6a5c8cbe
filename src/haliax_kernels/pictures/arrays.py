# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Draw an array as a block, cut into the shards that its devices hold."""

import math
from dataclasses import dataclass
from typing import Any

from haliax_kernels.errors import bytes_text
from haliax_kernels.mesh import MeshContext
from haliax_kernels.pictures.sheet import EMPTY, FAINT, NORMAL, SMALL, Sheet, shade, shortened, text_width, wrapped
from haliax_kernels.pictures.slices import Devices, Shard, device_texts, numbering, slices_of
from haliax_kernels.plan import AxisPlan, KernelPlan

# Room for numbers left and right of a block; the height of a row of it; the least of a block; that of a line of text.
_RULER, _OVERHANG, _ROW, _BLOCK, _LINE = 44, 18, 17, 30, 12


@dataclass(frozen=True)
class ArrayView:
    """An array of a plan, as it is drawn.

    Attributes:
        title: its name.
        about: its dtype and size.
        axes: its axes; empty for a plain array that every device has whole.
        shape: its shape where it has no axes.
    """

    title: str
    about: str
    axes: tuple[AxisPlan, ...]
    shape: tuple[int, ...] = ()

    @property
    def drawn(self) -> tuple[int, ...]:
        """The axes that are its rows and columns: those with the most shards, and else the last ones."""
        return tuple(sorted(range(len(self.axes)), key=lambda i: (self.axes[i].shards, i))[-2:])


def array_views(plan: KernelPlan) -> list[ArrayView]:
    """The arguments and outputs of a plan."""
    views = [ArrayView(x.label, _about(x.dtype, x.local_bytes), x.axes, x.shape) for x in plan.inputs]
    for i, out in enumerate(plan.outputs):
        name = "output" if len(plan.outputs) == 1 else f"output {i}"
        views.append(ArrayView(name, _about(out.dtype, out.local_bytes), out.axes))
    return views


@dataclass(frozen=True)
class Span:
    """A shard's place along one side of a block; `index` is None for those that are left out."""

    index: int | None
    at: float
    length: float


def spans(axis: AxisPlan | None, other: AxisPlan | None) -> list[Span]:
    """The shards along one side, as wide as the whole is 1; of many only the first ones and the last."""
    shards, beside = (1 if a is None else a.shards for a in (axis, other))
    most = 8 if beside <= 4 else 5
    indices = [*range(shards)] if shards <= most else [*range(most - 2), None, shards - 1]
    weights = [0.5 if i is None else 1.0 for i in indices]
    places = [sum(weights[:n]) / sum(weights) for n in range(len(weights) + 1)]
    return [Span(i, a, b - a) for i, a, b in zip(indices, places, places[1:], strict=False)]


def ticks(axis: AxisPlan, along: list[Span]) -> list[tuple[float, int]]:
    """(place, index of the array) where shards begin, and the end."""
    found, begin = [], 0
    for span in along:
        begin = begin if span.index is None else span.index
        found.append((span.at, begin * axis.size // axis.shards))
        begin += 1
    return [*found, (1.0, axis.size)]


def draw_mesh(sheet: Sheet, mesh: MeshContext | None, x: float, width: float) -> None:
    """Say how devices are numbered, below what is there already."""
    if mesh is None:
        sheet.paragraph(x, width, "No mesh: the kernel is called directly.")
        return
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.sizes)
    text = f"Mesh {sizes}. Numbers in the blocks are devices: number = {numbering(mesh.sizes)}."
    if mesh.manual:
        inside = ", ".join(name for name, _ in mesh.manual)
        text += f" Within one shard of the enclosing shard_map over {inside}."
    sheet.paragraph(x, width, text)


def draw_array(sheet: Sheet, view: ArrayView, mesh: MeshContext | None, x: float, width: float) -> None:
    """Draw one array below what is there already."""
    sheet.text(x, sheet.y + 7, shortened(view.title, width, NORMAL), bold=True)
    sheet.text(x, sheet.y + 7 + _LINE, shortened(view.about, width, SMALL), SMALL, FAINT)
    sheet.y += 7 + 1.7 * _LINE
    drawn = [view.axes[i] for i in view.drawn]
    for a, arrow in zip(drawn, "\u2193\u2192"[-len(drawn) :], strict=False):
        sheet.text(x, sheet.y + 5, shortened(f"{arrow} {_axis(a)}", width, SMALL), SMALL)
        sheet.y += _LINE
    sheet.y += _LINE
    _draw_block(sheet, view, mesh, x + _RULER, width - _RULER - _OVERHANG)
    for text in _caption(view):
        sheet.paragraph(x, width, text)


def _draw_block(sheet: Sheet, view: ArrayView, mesh: MeshContext | None, x: float, width: float) -> None:
    row, column = (None, None, *(view.axes[i] for i in view.drawn))[-2:]
    down, across = spans(row, column), spans(column, row)
    held = slices_of([a.mesh_axes for a in view.axes], mesh.sizes if mesh is not None else ())
    cells = [[_cell(view, held, (r, c), width * c.length) for c in across] for r in down]
    lines = max(len(cell.lines) for along in cells for cell in along)
    height = max(_BLOCK, max(_ROW, 6 + _LINE * lines) / max(r.length for r in down))
    for r, along in zip(down, cells, strict=True):
        for c, cell in zip(across, along, strict=True):
            place = x + width * c.at, sheet.y + height * r.at, width * c.length, height * r.length
            if cell.fill is not None:
                sheet.rectangle(*place, cell.fill)
            for i, line in enumerate(cell.lines):
                y = place[1] + place[3] / 2 + _LINE * (i - (len(cell.lines) - 1) / 2)
                sheet.text(place[0] + place[2] / 2, y, line, align="center")
    _draw_rulers(sheet, (row, down), (column, across), (x, width, height))
    sheet.y += height + 6


@dataclass(frozen=True)
class _Cell:
    """What stands in a shard, and its colour; None where shards are left out."""

    lines: list[str]
    fill: str | None


def _cell(view: ArrayView, held: dict[Shard, Devices], at: tuple[Span, Span], width: float) -> _Cell:
    if at[0].index is None or at[1].index is None:
        return _Cell(["..."], None)
    devices = sum(map(len, held.values()))
    if len(held) == 1:
        return _Cell([f"all {devices} devices" if devices > 1 else "whole"], EMPTY)
    shard = dict(zip(reversed(view.drawn), (at[1].index, at[0].index), strict=False))
    holders = held.get(tuple(shard.get(i, 0) for i in range(len(view.axes))), ())
    if not holders:  # a mesh axis that shards two axes, for which the call is refused
        return _Cell(["none"], EMPTY)
    for text in device_texts(holders):
        lines = wrapped(text, width - 3, NORMAL)
        if len(lines) <= 3 and " ".join(lines) == text:
            return _Cell(lines, shade(holders[0] / (devices - 1)))
    return _Cell([], shade(holders[0] / (devices - 1)))


def _draw_rulers(
    sheet: Sheet,
    rows: tuple[AxisPlan | None, list[Span]],
    columns: tuple[AxisPlan | None, list[Span]],
    block: tuple[float, float, float],
) -> None:
    x, width, height = block
    if rows[0] is not None and rows[0].size >= 0:
        for place, index in ticks(rows[0], rows[1]):
            sheet.text(x - 4, sheet.y + height * place, str(index), SMALL, FAINT, "right")
    free = -math.inf
    if columns[0] is not None and columns[0].size >= 0:
        for place, index in ticks(columns[0], columns[1]):
            middle, half = x + width * place, text_width(str(index), SMALL) / 2
            if middle - half > free:
                sheet.text(middle, sheet.y - 6, str(index), SMALL, FAINT, "center")
                free = middle + half + 3


def _axis(a: AxisPlan) -> str:
    size = str(a.size) if a.size >= 0 else "?"
    over = f" over {' + '.join(a.mesh_axes)} ({a.shards})" if a.shards > 1 else ""
    return f"{a.name} {size}{over}"


def _caption(view: ArrayView) -> list[str]:
    """What the block does not show."""
    rest = [a for i, a in enumerate(view.axes) if i not in view.drawn]
    texts = [f"{_axis(a)}: shown is shard 0" for a in rest if a.shards > 1]
    whole = [_axis(a) for a in rest if a.shards == 1]
    if not view.axes:
        whole = [f"an array of shape {view.shape}" if view.shape else "a scalar"]
    return texts + ([f"not drawn, whole on each device: {', '.join(whole)}"] if whole and rest else whole)


def _about(dtype: Any, local_bytes: int | None) -> str:
    if dtype is None or local_bytes is None:
        return "dtype and size known once the kernel is traced"
    return f"{dtype}, {bytes_text(local_bytes)} on a device"
