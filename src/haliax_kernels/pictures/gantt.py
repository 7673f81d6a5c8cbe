# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Draw the steps of a ring as a Gantt chart: a row for each shard, time from left to right."""

from haliax_kernels.pictures.schedule import RingSchedule, both_layouts, ring_schedule
from haliax_kernels.pictures.sheet import EMPTY, FAINT, NORMAL, SMALL, Sheet, fitting, shade, shortened, text_width
from haliax_kernels.pictures.slices import MeshSizes, numbering
from haliax_kernels.ring_plan import RingPlan

_RULER, _ROW, _MOST_ROWS = 58, 14, 24


def draw_ring(sheet: Sheet, ring: RingPlan, mesh_sizes: MeshSizes, x: float, width: float) -> None:
    """Draw the contiguous and the zigzag ring below what is there already, on one time scale."""
    schedules = [ring_schedule(layout) for layout in both_layouts(ring)]
    over = " + ".join(ring.mesh_axes)
    sheet.text(x, sheet.y + 7, shortened(f"ring over {over}: {ring.shards} shards", width, NORMAL), bold=True)
    sheet.y += 20
    # A mask may leave nothing at all.
    point = (width - _RULER) / (max(s.critical_path for s in schedules) or 1.0)
    for schedule in schedules:
        _draw_schedule(sheet, schedule, schedule.zigzag == ring.zigzag, (x, width), point)
    places = numbering([(m, dict(mesh_sizes)[m]) for m in ring.mesh_axes])
    text = (
        f"Shard i is the devices where {places} = i. Time runs to the right; its unit is one block, the queries of "
        "one shard by the keys of one shard. The number in a bar is the shard whose keys are there. Hatched: the mask "
        "leaves a part of the block; it counts whole. Grey: idle. A step lasts as long as its slowest shard. "
        "Transfers, which run beside the blocks, and the exchange of halves before and after zigzag are not drawn. "
        "The backward has the same blocks."
    )
    if ring.q_offset is None:
        text += " The position of the first query is known on the device only: drawn as if no block were left out."
    sheet.paragraph(x, width, text)


def _draw_schedule(
    sheet: Sheet, schedule: RingSchedule, taken: bool, place: tuple[float, float], point: float
) -> None:
    x, width = place
    name = ("zigzag" if schedule.zigzag else "contiguous") + (" (this plan)" if taken else "")
    title = f"{name}: critical path {schedule.critical_path:g} blocks, devices idle {schedule.idle:.0%} of the time"
    sheet.text(x, sheet.y + 6, shortened(title, width, NORMAL))
    sheet.y += 26
    left, n = x + _RULER, schedule.shards
    rows = [*range(n)] if n <= _MOST_ROWS else [*range(_MOST_ROWS // 2), None, *range(n - _MOST_ROWS // 2, n)]
    height = _ROW * len(rows)
    for r, shard in enumerate(rows):
        middle = sheet.y + _ROW * (r + 0.5)
        sheet.text(left - 5, middle, "..." if shard is None else f"shard {shard}", SMALL, FAINT, "right")
    begin, widest = left, text_width(str(n - 1), SMALL)
    for s, step in enumerate(schedule.steps):
        end = begin + step.lasts * point
        for r, shard in enumerate(rows):
            if shard is None:
                continue
            y, at, source = sheet.y + _ROW * r, begin, (shard - step.hop) % n
            fill = shade(source / (n - 1))
            for blocks, hatched in ((step.whole[shard], False), (step.cut[shard], True)):
                if blocks:
                    sheet.rectangle(at, y, blocks * point, _ROW, fill, hatched)
                    at += blocks * point
            if step.busy[shard] < step.lasts:
                sheet.rectangle(at, y, end - at, _ROW, EMPTY)
            if widest <= at - begin - 2:
                sheet.text((begin + at) / 2, y + _ROW / 2, str(source), SMALL, align="center", halo=fill)
        if widest <= end - begin - 2:
            name = fitting((f"step {s}", str(s)), end - begin - 2, SMALL)
            sheet.text((begin + end) / 2, sheet.y - 6, name, SMALL, FAINT, "center")
        begin = end
        sheet.line(begin, sheet.y - 10, begin, sheet.y + height)
    sheet.line(left, sheet.y - 10, left, sheet.y + height)
    sheet.y += height + 12
