"""Plots of a result, as SVG and PNG: lines over size, a heat map for each K, and peers side by side.

matplotlib is the extra `plots`. Without it there are tables only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zslurm.bench.result import BenchResult
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.core.errors import ZslurmError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; yellow, too light on white, is left out."""
_MARKERS = "osD^vPX"
_MOST_LINES = len(_COLORS)
_MOST_PEERS = 128
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.6,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


class NoPlots(ZslurmError):
    """matplotlib is not installed."""


def draw(result: BenchResult, folder: Path) -> list[Path]:
    """Draw what a result has, into a folder that is made; returns the files.

    Raises:
        NoPlots: matplotlib is not installed.
        ZslurmError: the folder cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NoPlots("no plots: matplotlib is not installed; pip install 'zslurm-train[plots]'") from None
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_STYLE):
            for name, draw_one in _plots(result):
                figure = Figure(figsize=(7.2, 4.4), layout="constrained")
                FigureCanvasAgg(figure)
                draw_one(figure)
                for ending in ("svg", "png"):
                    path = folder / f"{name}.{ending}"
                    figure.savefig(path, dpi=160)
                    written.append(path)
    except OSError as error:
        raise ZslurmError(f"{folder}: plots cannot be written: {error.strerror}") from error
    return written


def _plots(result: BenchResult) -> Iterable[tuple[str, Callable[[Figure], None]]]:
    """Return the plots of a result, by the name of their file."""
    rows: list[Row] = list(result.rows)
    if result.benchmark == "collectives":
        for operation in _values(rows, "operation"):
            plotted = [row for row in rows if row["operation"] == operation and "pair" not in row]
            if plotted := [row for row in plotted if row.get("busbw_gb_s")]:
                yield f"collectives-{operation}", _collective(result, operation, plotted)
        for scope in _values((row for row in rows if "pair" in row), "scope"):
            pairs = [(str(row["where"]), row["busbw_gb_s"]) for row in rows if row["scope"] == scope]
            yield f"collectives-{scope}", _bars(result, pairs, "GB/s between two", of_peers=True)
    elif result.benchmark == "hbm" and any(row.get("gb_s") for row in rows):
        yield "hbm", _hbm(result, [row for row in rows if row.get("gb_s")])
    elif result.benchmark == "gemm":
        swept = [row for row in rows if row.get("product") in (None, "") and row.get("tflops")]
        if swept:
            yield "gemm", _heat_maps(result, swept)
        named = [row for row in rows if row not in swept and row.get("tflops")]
        if named:
            yield "gemm-products", _bars(result, [(_product(row), row["tflops"]) for row in named], "TFLOPS")
    peers = _peers(result)
    if len(peers) > 1:
        unit = "TFLOPS" if result.benchmark == "mlp" else "GB/s of bus bandwidth"
        yield f"{result.benchmark}-peers", _bars(result, peers, unit, of_peers=True)


def _values(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _title(result: BenchResult, what: str) -> str:
    machine = result.machine
    ranks = f"{counted(len(machine.nodes), 'node')} x {counted(machine.ranks_per_node, 'rank')}"
    return f"{what}\n{machine.gpu or machine.cpu}, {ranks}, {result.date[:10]}"


def _size_axis(axes: Axes, sizes: list[int]) -> None:
    """Label a logarithmic axis of bytes with at most eight powers of two."""
    axes.set_xscale("log", base=2)
    step = math.ceil(len(sizes) / 8)
    axes.set_xticks(
        sizes[::step], [show_bytes(size).replace(".00", "").replace(".0", "") for size in sizes[::step]]
    )
    axes.tick_params(axis="x", which="minor", bottom=False)


def _lines(axes: Axes, curves: Mapping[str, list[tuple[int, float]]]) -> None:
    """Draw curves over sizes; of more than there are colours the highest ones."""
    order = sorted(curves, key=lambda name: -max(value for _, value in curves[name]))
    shown = order[:_MOST_LINES]
    for name, color, marker in zip(shown, _COLORS, _MARKERS, strict=False):
        points = sorted(curves[name])
        axes.plot(
            *zip(*points, strict=True), label=name, color=color, marker=marker, markersize=3.5, linewidth=1.4
        )
    title = f"the {len(shown)} highest of {len(order)}" if len(shown) < len(order) else None
    axes.legend(loc="upper left", fontsize=8, title=title)
    axes.set_ylim(bottom=0)
    _size_axis(axes, sorted({size for points in curves.values() for size, _ in points}))


def _collective(result: BenchResult, operation: str, rows: list[Row]) -> Callable[[Figure], None]:
    def draw_one(figure: Figure) -> None:
        curves: dict[str, dict[int, list[float]]] = {}
        for row in rows:
            name = _group(row)
            curves.setdefault(name, {}).setdefault(row["bytes"], []).append(row["busbw_gb_s"])
        axes = figure.add_subplot()
        means = {
            name: [(size, min(durations)) for size, durations in points.items()] for name, points in curves.items()
        }
        _lines(axes, means)
        axes.set_xlabel("message of a rank")
        axes.set_ylabel("bus bandwidth in GB/s, the slowest group's")
        axes.set_title(_title(result, operation), loc="left", fontsize=10)

    return draw_one


def _group(row: Row) -> str:
    """Return what ranks took part, as a legend shows it."""
    ranks = counted(row["ranks"], "rank")
    where = {
        "node": f"{ranks} of a node",
        "all": f"{counted(row['nodes'], 'node')}, {ranks}",
        "rail": f"a rail of {counted(row['nodes'], 'node')}",
    }.get(row["scope"], row["scope"])
    levels = ", two levels" if row.get("levels") == "two_level" else ""
    environment = f", {row['environment']}" if row.get("environment") else ""
    return f"{where}{levels}{environment}"


def _hbm(result: BenchResult, rows: list[Row]) -> Callable[[Figure], None]:
    def draw_one(figure: Figure) -> None:
        curves = {
            pattern: [(row["bytes"], row["gb_s"]) for row in rows if row["pattern"] == pattern]
            for pattern in _values(rows, "pattern")
        }
        axes = figure.add_subplot()
        _lines(axes, curves)
        axes.set_xlabel("bytes of each array")
        axes.set_ylabel("GB/s")
        axes.set_title(_title(result, "memory bandwidth"), loc="left", fontsize=10)

    return draw_one


def _heat_maps(result: BenchResult, rows: list[Row]) -> Callable[[Figure], None]:
    def draw_one(figure: Figure) -> None:
        depths = sorted(_values(rows, "k"))
        columns = min(3, len(depths))
        lines = math.ceil(len(depths) / columns)
        figure.set_size_inches(2.6 * columns + 1.2, 2.7 * lines + 0.6)
        ms, ns = (sorted(_values(rows, key)) for key in ("m", "n"))
        table = {(row["m"], row["n"], row["k"]): row["tflops"] for row in rows}
        highest = max(table.values())
        grid = figure.subplots(lines, columns, squeeze=False)
        image = None
        for number, k in enumerate(depths):
            axes = grid[number // columns][number % columns]
            values = [[table.get((m, n, k), math.nan) for n in ns] for m in ms]
            image = axes.imshow(values, origin="lower", cmap="viridis", vmin=0, vmax=highest, aspect="auto")
            axes.grid(visible=False)
            _write_values(axes, values, highest)
            axes.set_xticks(range(len(ns)), [str(n) for n in ns], rotation=60, fontsize=7)
            axes.set_yticks(range(len(ms)), [str(m) for m in ms], fontsize=7)
            axes.set_title(f"K = {k}", fontsize=9)
            axes.set_xlabel("N", fontsize=8)
            axes.set_ylabel("M", fontsize=8)
        for number in range(len(depths), lines * columns):
            grid[number // columns][number % columns].set_axis_off()
        assert image is not None
        figure.colorbar(image, ax=grid, label="TFLOPS", shrink=0.9)
        dtype = rows[0].get("dtype", "")
        figure.suptitle(_title(result, f"matrix products in {dtype}"), x=0.01, ha="left", fontsize=10)

    return draw_one


def _write_values(axes: Axes, values: list[list[float]], highest: float) -> None:
    """Write each value into its cell, dark on light colours."""
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if not math.isnan(value):
                color = "#000000" if value > 0.6 * highest else "#ffffff"
                axes.text(x, y, f"{value:.3g}", ha="center", va="center", fontsize=5.5, color=color)


def _product(row: Row) -> str:
    passed = row.get("pass", "forward")
    return str(row["product"]) + ("" if passed == "forward" else f", {passed}")


def _peers(result: BenchResult) -> list[tuple[str, float]]:
    """Return the figure of each peer: ranks of an mlp, nodes of a collective at the largest size inside them."""
    rows = [row for row in result.rows if row.get("where")]
    if result.benchmark == "mlp":
        return [(str(row["where"]), row["tflops"]) for row in rows if row.get("tflops")]
    if result.benchmark != "collectives":
        return []
    inside = [row for row in rows if row.get("scope") == "node" and row["ranks"] == result.machine.ranks_per_node]
    inside = [row for row in inside if row["operation"] == "all_reduce" and not row.get("environment")]
    largest = max((row["bytes"] for row in inside), default=0)
    return [(str(row["where"]), row["busbw_gb_s"]) for row in inside if row["bytes"] == largest]


def _bars(
    result: BenchResult, values: list[tuple[str, float]], unit: str, *, of_peers: bool = False
) -> Callable[[Figure], None]:
    """Draw a bar for each; of peers the slowest ones if there are many, and the median as a line."""

    def draw_one(figure: Figure) -> None:
        shown = sorted(values, key=lambda pair: pair[1])[:_MOST_PEERS] if of_peers else values[:_MOST_PEERS]
        figure.set_size_inches(7.2, max(2.0, 0.9 + 0.2 * len(shown)))
        axes = figure.add_subplot()
        ordered = sorted(values, key=lambda pair: pair[1])
        median = ordered[len(ordered) // 2][1]
        slow = [of_peers and value < 0.9 * median for _, value in shown]
        colors = [_COLORS[1] if is_slow else _COLORS[0] for is_slow in slow]
        axes.barh([name for name, _ in shown], [value for _, value in shown], color=colors, height=0.7)
        for position, (_, value) in enumerate(shown):
            axes.text(value, position, f" {value:.4g}", va="center", fontsize=7)
        if of_peers:
            axes.axvline(median, color="#555555", linewidth=1, linestyle="--")
            axes.text(median, -0.9, "median", fontsize=7, ha="right", color="#555555")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", labelsize=7)
        axes.set_xlim(0, 1.12 * max(value for _, value in shown))
        axes.set_xlabel(unit)
        what = f"{result.benchmark}: peers, the slowest first" if of_peers else "products of the run"
        axes.set_title(_title(result, what), loc="left", fontsize=10)

    return draw_one
