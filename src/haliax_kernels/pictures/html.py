# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""A plan as HTML, for notebooks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from haliax_kernels.distributions import DistributionError, require_matplotlib
from haliax_kernels.plan import KernelPlan
from haliax_kernels.report import AXIS_COLUMNS, axis_rows, collective_rows, summary_lines

_CELL = "text-align: left; padding: 1px 10px 1px 0; white-space: nowrap"
_REFUSED = "border-left: 4px solid #c62828; padding-left: 10px; white-space: pre-wrap"


@dataclass(frozen=True)
class PlanView:
    """A plan as notebooks show it.

    Attributes:
        kernel: the kernel's name.
        svg: the pictures, as an `<svg>` element.
        html: table, pictures and all else.
    """

    kernel: str
    svg: str = field(repr=False)
    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return self.html


def show_plan(plan: KernelPlan) -> PlanView:
    """The view of a plan.

    Raises:
        DistributionError: an ImportError; matplotlib is missing.
    """
    require_matplotlib()
    from haliax_kernels.pictures.svg import svg_of

    svg = svg_of([plan])
    return PlanView(plan.kernel, svg, _page(plan, svg))


def plan_html(plan: KernelPlan) -> str:
    """The HTML of a plan; without pictures where matplotlib is missing."""
    try:
        return show_plan(plan).html
    except DistributionError:
        return _page(plan, None)


def _page(plan: KernelPlan, svg: str | None) -> str:
    # Text takes the page's own colours, light or dark; the pictures bring their paper.
    parts = [f"<p>{'<br>'.join(map(escape, summary_lines(plan)))}</p>", _table(AXIS_COLUMNS, axis_rows(plan))]
    if plan.mesh is not None and not plan.refusals:
        rows = collective_rows(plan)
        parts.append("<p>collectives (bytes of the result on one device):</p>")
        parts.append(_table((), rows) if rows else "<p>none, forward and backward</p>")
    for title, texts in (("reshards", plan.reshards), ("notes", plan.notes)):
        if texts:
            parts.append(f"<p>{title}:</p><ul>{''.join(f'<li>{escape(t)}</li>' for t in texts)}</ul>")
    if plan.refusals:
        texts = "\n".join(f"{type(error).__name__}: {error}" for error in plan.refusals)
        parts.append(f'<p><b>refused:</b></p><pre style="{_REFUSED}">{escape(texts)}</pre>')
    if svg is not None:
        parts.append(f'<div style="overflow-x: auto">{svg}</div>')
    return f"<div>{''.join(parts)}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        inner = "".join(f'<{tag} style="{_CELL}">{escape(c)}</{tag}>' for c in cells)
        return f"<tr>{inner}</tr>"

    top = f"<thead>{line('th', head)}</thead>" if head else ""
    return f"<table>{top}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"
