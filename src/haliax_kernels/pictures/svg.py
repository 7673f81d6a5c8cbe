# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The picture of plans, as SVG."""

from collections.abc import Iterable, Sequence

from haliax_kernels.pictures.arrays import array_views, draw_array, draw_mesh
from haliax_kernels.pictures.gantt import draw_ring
from haliax_kernels.pictures.sheet import LARGE, NORMAL, Sheet, own_style, shortened
from haliax_kernels.plan import KernelPlan

_WIDTH, _MARGIN, _GAP, _COLUMNS = 720.0, 14.0, 26.0, 2
_REFUSED = "#a11212"


def svg_of(plans: Sequence[KernelPlan]) -> str:
    """An `<svg>` element with one plan below the other; the same for the same plans."""
    with own_style():
        return sheet_of(plans).svg(f"plans of {', '.join(dict.fromkeys(p.kernel for p in plans))}")


def sheet_of(plans: Iterable[KernelPlan]) -> Sheet:
    """The sheet with one plan below the other."""
    sheet = Sheet(_WIDTH)
    for plan in plans:
        sheet.y += _MARGIN
        _draw_plan(sheet, plan, _MARGIN, _WIDTH - 2 * _MARGIN)
    sheet.y += _MARGIN
    return sheet


def _draw_plan(sheet: Sheet, plan: KernelPlan, x: float, width: float) -> None:
    sheet.text(x, sheet.y + 8, shortened(plan.kernel, width, LARGE), LARGE, bold=True)
    sheet.y += 20
    sheet.paragraph(x, width, str(plan.signature))
    sheet.y += 2
    for error in plan.refusals:
        first = str(error).split("\n  - ")[0]
        sheet.paragraph(x, width, f"refused: {type(error).__name__}: {first}", NORMAL, _REFUSED)
    draw_mesh(sheet, plan.mesh, x, width)
    views = array_views(plan)
    column = (width - _GAP * (_COLUMNS - 1)) / _COLUMNS
    for start in range(0, len(views), _COLUMNS):
        sheet.y += _GAP / 2
        top, lowest = sheet.y, sheet.y
        for i, view in enumerate(views[start : start + _COLUMNS]):
            sheet.y = top
            draw_array(sheet, view, plan.mesh, x + i * (column + _GAP), column)
            lowest = max(lowest, sheet.y)
        sheet.y = lowest
    if plan.ring is not None and plan.mesh is not None and not plan.refusals:
        sheet.y += _GAP
        draw_ring(sheet, plan.ring, plan.mesh.sizes, x, width)
