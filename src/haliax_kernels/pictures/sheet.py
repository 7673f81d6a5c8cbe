# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""A sheet to draw on, from above to below, in points; the one place that knows matplotlib."""

import contextlib
import functools
import html
import io
import re
from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path

# Browsers show a point as 4/3 pixels: no text is smaller than 10 pixels.
SMALL, NORMAL, LARGE = 7.5, 8.5, 11.0
INK, FAINT, EMPTY, PAPER = "#1b1b1b", "#5a5a5a", "#ececec", "#ffffff"
_POINTS_PER_INCH = 72


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """What is drawn in the `with` block looks the same whatever the caller's matplotlib settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        fonts = ["DejaVu Sans", "Verdana", "Arial"]
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "haliax_kernels", "font.sans-serif": fonts}
        )
        yield


@functools.lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """How wide a line is in points, were it bold, so that there is room in other fonts, too."""
    font = FontProperties(family="DejaVu Sans", weight="bold", size=size)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]


def fitting(texts: Sequence[str], width: float, size: float) -> str:
    """The first of `texts` that is not wider than `width`; nothing where none is."""
    return next((text for text in texts if text_width(text, size) <= width), "")


def shortened(text: str, width: float, size: float) -> str:
    """A text, or as much of its beginning as `width` has room for."""
    beginnings = (f"{text[:n]}..." for n in range(len(text) - 1, 0, -1))
    return text if text_width(text, size) <= width else fitting(list(beginnings), width, size)


def wrapped(text: str, width: float, size: float) -> list[str]:
    """The lines of a text."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if text_width(joined, size) <= width:
            lines[-1] = joined
        else:
            lines.append(shortened(word, width, size))
    return [line for line in lines if line]


def shade(part: float) -> str:
    """A colour for a number from 0 to 1, which stands out from its neighbours for the colour-blind, too."""
    red, green, blue, _ = matplotlib.colormaps["viridis"](part)
    # So light that dark text can be read on it.
    return to_hex((0.5 + 0.5 * red, 0.5 + 0.5 * green, 0.5 + 0.5 * blue))


class Sheet:
    """A light sheet of a fixed width that grows as it is drawn on; `y` is where the next thing goes."""

    def __init__(self, width: float):
        self.width, self.y = width, 0.0
        self._figure = Figure(facecolor=PAPER)
        self._axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = NORMAL,
        colour: str = INK,
        align: str = "left",
        bold: bool = False,
        halo: str | None = None,
    ) -> None:
        """One line of text with its middle at the height `y`; `halo` is a colour to put behind it."""
        if not text:
            return
        self._axes.text(
            x,
            y,
            text,
            size=size,
            color=colour,
            ha=align,
            va="center_baseline",
            weight="bold" if bold else "normal",
            parse_math=False,
            bbox=None if halo is None else {"facecolor": halo, "edgecolor": "none", "pad": 1.0},
        )

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, hatched: bool = False) -> None:
        """A rectangle with a thin light edge."""
        # Hatches have the colour of the edge, so that a second rectangle draws the edge.
        self._axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=PAPER, linewidth=0.8))
        if hatched:
            lines = Rectangle((x, y), width, height, fill=False, edgecolor=FAINT, linewidth=0, hatch="/////")
            self._axes.add_patch(lines)

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str = FAINT, width: float = 0.6) -> None:
        self._axes.add_line(Line2D([x, to_x], [y, to_y], color=colour, linewidth=width))

    def paragraph(self, x: float, width: float, text: str, size: float = SMALL, colour: str = FAINT) -> None:
        """A text in lines no wider than `width`, below what is drawn already."""
        for line in wrapped(text, width, size):
            self.text(x, self.y + 0.7 * size, line, size, colour)
            self.y += 1.4 * size

    def figure(self) -> Figure:
        """The sheet as it is now."""
        self._figure.set_size_inches(self.width / _POINTS_PER_INCH, self.y / _POINTS_PER_INCH)
        self._axes.set(xlim=(0, self.width), ylim=(self.y, 0))
        return self._figure

    def svg(self, title: str) -> str:
        """The sheet as an `<svg>` element, the same each time; `title` is what screen readers say."""
        out = io.StringIO()
        self.figure().savefig(
            out, format="svg", metadata={"Date": None, "Creator": None, "Title": title}, facecolor=PAPER
        )
        # In an HTML page the XML declaration has no place, and a style sheet would hold for all of the page.
        element = out.getvalue()[out.getvalue().index("<svg") :]
        style = re.search(r"<style[^>]*>\*\{([^}]*)\}</style>", element)
        inherited = ""
        if style is not None:
            element = element.replace(style[0], "", 1)
            inherited = f' style="{style[1]}"'
        return element.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"{inherited}', 1)
