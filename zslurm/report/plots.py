"""Curves, bands and heat maps as HTML with inline SVG: no script, no font and no picture from elsewhere.

A plot is as wide as its place on the page, from a phone to a sheet of paper. So the drawing is an SVG that is
stretched (`preserveAspectRatio="none"`, with lines that keep their width), and all text is HTML next to it, placed
by percentages. Coordinates are whole numbers from 0 to SIZE; the `data-` attributes of a plot have the ranges that
these stand for, by which the page's script shows the values under the pointer.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from zslurm.checkpoint_tools.quantities import show_count
from zslurm.report.thinning import keep_extremes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SIZE = 10_000
"""Units of a drawing, in both directions."""


@dataclass(frozen=True)
class Curve:
    """A line of a plot, or dots.

    Attributes:
        name: in the legend.
        x, y: points, by rising x; what is not finite is left out.
        color: number of a colour of the page.
        faint: drawn in the background.
        dots: points that no line connects.
        area: filled from the line down.
    """

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    color: int = 1
    faint: bool = False
    dots: bool = False
    area: bool = False


@dataclass(frozen=True)
class Marker:
    """A vertical line at `x`, with what happened there."""

    x: float
    text: str


@dataclass(frozen=True)
class Plot:
    """A plot of curves.

    Attributes:
        name: a title.
        unit: of y.
        curves: at least one.
        x_name: what x is.
        markers: vertical lines.
        from_zero: y begins at 0.
        percent: y are shares, shown as percentages.
        cut: the highest y that is shown, if some points are far above all others; the plot's note names them.
    """

    name: str
    unit: str
    curves: Sequence[Curve]
    x_name: str = "step"
    markers: Sequence[Marker] = ()
    from_zero: bool = False
    percent: bool = False
    cut: float | None = None
    note: str = ""


def draw(plot: Plot) -> Markup:
    """Return a plot as HTML; empty if no curve has two points to connect, or a dot."""
    curves = [curve for curve in plot.curves if _finite(curve)]
    if not curves:
        return Markup("")
    x0, x1 = _range([curve.x for curve in curves])
    y0, y1 = _range([curve.y for curve in curves])
    y1 = y1 if plot.cut is None else min(y1, plot.cut)
    y0 = min(0.0, y0) if plot.from_zero else y0
    x1 = x1 if x1 > x0 else x0 + 1
    y0, y1 = _with_margin(y0, y1, at_zero=plot.from_zero)
    show = (lambda value: f"{100 * value:.3g} %") if plot.percent else show_number
    across, up = _ticks(x0, x1, 5, whole=True), _ticks(y0, y1, 4)

    def place(x: float, y: float) -> str:
        return f"{_unit(x, x0, x1)} {_unit(max(y0, min(y1, y)), y1, y0)}"

    lines = "".join(f"M0 {_unit(y, y1, y0)}h{SIZE}" for y in up)
    drawing = [f'<path class="grid" d="{lines}"/>']
    for marker in plot.markers:
        if x0 <= marker.x <= x1:
            at = _unit(marker.x, x0, x1)
            drawing.append(f'<path class="mark" d="M{at} 0v{SIZE}"><title>{escape(marker.text)}</title></path>')
    for curve in reversed(curves) if any(curve.area for curve in curves) else curves:
        x, y = keep_extremes(curve.x, curve.y)
        points = [place(float(a), float(b)) for a, b in zip(x, y, strict=True)]
        path = "".join(f"M{point}h0" for point in points) if curve.dots else "M" + "L".join(points)
        if curve.area:
            path += f"V{SIZE}H{_unit(float(x[0]), x0, x1)}Z"
        kinds = [name for name in ("faint", "dots", "area") if getattr(curve, name)]
        look = " ".join([f"c{curve.color}", *kinds])
        drawing.append(f'<path class="{look}" data-name="{escape(curve.name)}" d="{path}"/>')
    legend = "".join(
        f'<span class="key c{curve.color}{" faint" if curve.faint else ""}">{escape(curve.name)}</span>'
        for curve in curves
        if len(curves) > 1
    )
    data = f'data-x0="{x0:.9g}" data-x1="{x1:.9g}" data-y0="{y0:.9g}" data-y1="{y1:.9g}"'
    note = f'<p class="note">{escape(plot.note)}</p>' if plot.note else ""
    return Markup(
        f'<figure class="plot" {data}{" data-percent" if plot.percent else ""} data-x="{escape(plot.x_name)}">'
        f'<figcaption><b>{escape(plot.name)}</b> <span class="unit">{escape(plot.unit)}</span>{legend}'
        f'<output></output></figcaption><div class="frame">'
        f'<div class="y">{_labels(up, y1, y0, show, "top")}</div>'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(plot.name)}">{"".join(drawing)}</svg>'
        f'<div class="x">{_labels(across, x0, x1, show_number, "left")}</div></div>{note}</figure>'
    )


def show_number(value: float) -> str:
    """Show a number on an axis, in few characters."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return show_count(value)
    return f"{value:.4g}" if abs(value) >= 0.01 else f"{value:.2g}"


def _finite(curve: Curve) -> int:
    import numpy as np

    return int((np.isfinite(curve.x) & np.isfinite(curve.y)).sum())


def _range(values: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    import numpy as np

    together = np.concatenate(values)
    together = together[np.isfinite(together)]
    return float(together.min()), float(together.max())


def _with_margin(low: float, high: float, *, at_zero: bool) -> tuple[float, float]:
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return (low if at_zero and low == 0 else low - margin), high + margin


def _unit(value: float, low: float, high: float) -> int:
    return round(SIZE * (value - low) / (high - low))


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return round numbers from `low` to `high`, about `most` of them."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _labels(values: Sequence[float], low: float, high: float, show: Callable[[float], str], side: str) -> str:
    parts = [(100 * (value - low) / (high - low), show(value)) for value in values]
    return "".join(f'<i style="{side}:{percent:.4g}%">{escape(text)}</i>' for percent, text in parts)


@dataclass(frozen=True)
class PlotBlock:
    """A part of a band, in the unit of the band; `look` is a class of the page's style."""

    begin: float
    end: float
    look: str
    text: str


def band(
    rows: Sequence[tuple[str, Sequence[PlotBlock]]], begin: float, end: float, ticks: Sequence[Marker]
) -> Markup:
    """Return rows of blocks over one axis, each with its name before it, as HTML; empty without rows."""
    if not rows or end <= begin:
        return Markup("")
    lines = []
    for name, blocks in rows:
        parts = "".join(
            f'<rect class="{block.look}" x="{_unit(block.begin, begin, end)}" y="0" height="{SIZE}" '
            f'width="{max(12, _unit(block.end, begin, end) - _unit(block.begin, begin, end))}">'
            f"<title>{escape(block.text)}</title></rect>"
            for block in blocks
        )
        svg = f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none">{parts}</svg>'
        lines.append(f'<div class="row"><span>{escape(name)}</span>{svg}</div>')
    axis = "".join(
        f'<i style="left:{100 * (tick.x - begin) / (end - begin):.4g}%">{escape(tick.text)}</i>' for tick in ticks
    )
    return Markup(
        f'<div class="band">{"".join(lines)}<div class="row"><span></span><div class="x">{axis}</div></div></div>'
    )


_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis, by its colours at 0, 1/4, ... 1: readable in print and for people who see no red or green."""


def heat_map(
    name: str, values: NDArray[np.float64], low: float, high: float, *, x: tuple[str, str], y: str, unit: str
) -> Markup:
    """Return a matrix as a picture: one pixel a value, row 0 at the top.

    Args:
        name: a title.
        values: [rows, columns]; NaN is left transparent.
        low: the value that has the first colour.
        high: the value that has the last one.
        x: what is written below the first and the last column.
        y: what the rows are.
        unit: of the values.
    """
    source = base64.b64encode(_png(values, low, high)).decode()
    stops = ",".join(f"rgb{color}" for color in _RAMP)
    return Markup(
        f'<figure class="heat"><figcaption><b>{escape(name)}</b> <span class="unit">{escape(unit)}</span>'
        f'<span class="scale">{escape(show_number(low))}<i style="background:linear-gradient(90deg,{stops})"></i>'
        f'{escape(show_number(high))}</span></figcaption><div class="frame"><div class="rows">{escape(y)}</div>'
        f'<img alt="{escape(name)}" src="data:image/png;base64,{source}"><div class="ends">'
        f"<span>{escape(x[0])}</span><span>{escape(x[1])}</span></div></div></figure>"
    )


def _png(values: NDArray[np.float64], low: float, high: float) -> bytes:
    """Return a PNG picture, 8-bit RGBA (https://www.w3.org/TR/png/)."""
    import numpy as np

    share = np.clip((values - low) / ((high - low) or 1.0), 0, 1)
    stops = np.linspace(0, 1, len(_RAMP))
    pixels = np.zeros((*values.shape, 4), np.uint8)
    for channel in range(3):
        pixels[..., channel] = np.interp(np.nan_to_num(share), stops, [color[channel] for color in _RAMP])
    pixels[..., 3] = np.where(np.isnan(values), 0, 255)
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    height, width = values.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(y: NDArray[np.float64], width: int = 48) -> str:
    """Return a curve as a line of blocks, for text; empty without two points."""
    import numpy as np

    y = y[np.isfinite(y)]
    if len(y) < 2:
        return ""
    means = [float(chunk.mean()) for chunk in np.array_split(y, min(width, len(y)))]
    low, high = min(means), max(means)
    return "".join(_BLOCKS[min(7, int(8 * (value - low) / ((high - low) or 1)))] for value in means)
