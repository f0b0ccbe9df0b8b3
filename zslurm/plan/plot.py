"""Draw a plan: goodput over the interval between saves, over spares, and the use of the time.

matplotlib is the extra `plots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.plan.simulate import PARTS
from zslurm.plan.study import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Drawn = tuple[Prediction, Sequence[Prediction], Sequence[Prediction]]
"""The run as it is, the intervals that were tried, and the numbers of spares."""

_COLOURS = ("#2a7f62", "#7fb8a4", "#c0392b", "#e67e22", "#f1c40f", "#d35400", "#7f8c8d", "#95a5a6")
_ENDINGS = (".png", ".svg", ".pdf")


class NoPlot(ZslurmError):
    """matplotlib is not installed."""


def draw(path: Path, plans: Sequence[Drawn], source: str) -> None:
    """Draw the plans of one run on one or more numbers of nodes into a file.

    Raises:
        NoPlot: matplotlib is not installed.
        ConfigError: the name of the file has another ending than those that can be drawn.
        ZslurmError: the file cannot be written.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError(
            f"--plot {path}: the file's name must end in {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"
        )
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        why = "matplotlib is not installed; pip install 'zslurm-train[plots]'"
        raise NoPlot(f"{path} is not drawn: {why}") from None
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        FigureCanvasAgg(figure)
        left_axes, middle, right = figure.subplots(1, 3)
        for shown, intervals, spares in plans:
            name = counted(shown.scenario.nodes, "node")
            _line(left_axes, [prediction.scenario.every for prediction in intervals], intervals, name)
            left_axes.plot([shown.scenario.every], [100 * shown.goodput.mean], "o", color="black")
            _line(middle, [prediction.scenario.spares for prediction in spares], spares, name)
        left_axes.set(xscale="log", xlabel="steps between saves (dot: as configured)", ylabel="goodput, %")
        middle.set(xlabel="spare nodes, at the advised interval", ylabel="goodput, %")
        left_axes.legend()
        _shares(right, [shown for shown, _, _ in plans])
        figure.suptitle(f"simulated; faults: {source}", fontsize=9)
        try:
            figure.savefig(path, dpi=160)
        except OSError as error:
            raise ZslurmError(f"{path}: the plot cannot be written: {error.strerror}") from error


def _line(axes: Axes, places: Sequence[int], tried: Sequence[Prediction], name: str) -> None:
    """Draw the means with their confidence intervals."""
    means = [100 * prediction.goodput.mean for prediction in tried]
    errors = [100 * prediction.goodput.error for prediction in tried]
    axes.errorbar(places, means, yerr=errors, marker=".", capsize=2, label=name)
    axes.grid(color="#e0e0e0", linewidth=0.6)


def _shares(axes: Axes, shown: Sequence[Prediction]) -> None:
    """Draw what is lost of each run's time, by cause."""
    names = [str(prediction.scenario.nodes) for prediction in shown]
    bottoms = [0.0] * len(shown)
    for time_part, colour in zip(PARTS[1:], _COLOURS[1:], strict=True):
        heights = [100 * prediction.parts[time_part] for prediction in shown]
        if max(heights) < 0.005:
            continue
        axes.bar(names, heights, bottom=bottoms, color=colour, label=time_part, width=0.5)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(xlabel="nodes", ylabel="share of the time that is lost, %")
    if any(bottoms):
        axes.legend()
