"""The curves of a report: loss, learning rate, throughput, the parts of a step, the load of the experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.report.page_parts import Drawing, Item, PageSection, PageTable, Text
from zslurm.report.plots import Curve, Marker, Plot, draw, heat_map, show_number, sparkline
from zslurm.report.routing import load_over_time, routing_items
from zslurm.report.run_facts import RunFacts
from zslurm.report.thinning import column_means, smooth
from zslurm.run.metrics.columns import Metrics
from zslurm.run.program_signals import NO_STEPS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PARTS = ("forward", "backward", "reduce", "optimizer", "gather", "data", "checkpoint", "other")
_FIGURES = (
    ("loss", "Loss", "nats"),
    ("lr", "Learning rate", ""),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("tokens_per_s", "Throughput", "tokens/s"),
    ("mfu", "MFU", "share of the peak"),
)
"""Columns of the metrics that several runs are compared by, with their titles and units."""


def drawing(plot: Plot, of: NDArray[np.float64] | None = None) -> Drawing:
    """Return a plot for the page, and for text a sparkline of a column with its range."""
    if of is None:
        of = plot.curves[0].y
    line = sparkline(of)
    if not line:
        return Drawing(draw(plot))
    import numpy as np

    ends = [show_number(float(value)) for value in (np.nanmin(of), np.nanmax(of))]
    unit = f" {plot.unit}" if plot.unit else ""
    return Drawing(draw(plot), f"{plot.name}: `{line}` {ends[0]} to {ends[1]}{unit}")


def curve_sections(facts: RunFacts) -> Iterator[PageSection]:
    """Yield the sections of one run's curves."""
    metrics = facts.metrics
    if "step" not in metrics.steps or not len(metrics.steps["step"]):
        hidden = any(clause.startswith(NO_STEPS) for clause in facts.state.not_shown)
        why = "The program shows no steps" if hidden else "The run has taken no step yet, or its metrics are gone"
        yield PageSection("Training", [Text(f"{why}.")])
        return
    marks = restarts(facts)
    items: list[Item] = [drawing(plot, metrics.steps.get(name)) for name, plot in _of_training(metrics, marks)]
    if marks:
        items.append(Text("Dashed lines are the steps at which an attempt began."))
    yield PageSection("Training", items)
    yield PageSection("Throughput", list(_throughput(metrics, marks)))
    if routing := [*_routing(metrics, marks), *routing_items(metrics, facts.routing)]:
        yield PageSection("Router", routing)


def restarts(facts: RunFacts) -> list[Marker]:
    """Return the steps at which attempts after the first one began."""
    return [
        Marker(attempt.first_step, f"attempt {attempt.number} began at step {attempt.first_step}")
        for attempt in facts.timeline.attempts[1:]
        if attempt.first_step is not None
    ]


def _of_training(metrics: Metrics, marks: Sequence[Marker]) -> Iterator[tuple[str, Plot]]:
    steps = metrics.steps["step"]
    if "loss" in metrics.steps:
        loss = metrics.steps["loss"]
        curves = [
            Curve("each step", steps, loss, 1, faint=True),
            Curve("smoothed", steps, smooth(loss, _span(steps))),
        ]
        curves += _evaluations(metrics)
        cut, note = _cut(loss)
        yield "loss", Plot("Loss", "nats", curves, markers=marks, cut=cut, note=note)
    if "lr" in metrics.steps:
        curve = Curve("learning rate", steps, metrics.steps["lr"], 2)
        yield "lr", Plot("Learning rate", "", [curve], markers=marks, from_zero=True)
    if "grad_norm" in metrics.steps:
        norm = metrics.steps["grad_norm"]
        cut, note = _cut(norm)
        curve = Curve("gradient norm", steps, norm, 3)
        yield (
            "grad_norm",
            Plot("Gradient norm", "before clipping", [curve], markers=marks, from_zero=True, cut=cut, note=note),
        )


def _span(steps: NDArray[np.float64]) -> float:
    return max(5.0, min(200.0, len(steps) / 50))


def _evaluations(metrics: Metrics) -> list[Curve]:
    import numpy as np

    rows = [row for row in metrics.rows("evaluation") if isinstance(row.get("loss"), float | int)]
    rows = [row for row in rows if isinstance(row.get("step"), int)]
    if not rows:
        return []
    last = {row["step"]: float(row["loss"]) for row in rows}
    x = sorted(last)
    return [Curve("validation", np.array(x, float), np.array([last[step] for step in x]), 4, dots=True)]


def _cut(values: NDArray[np.float64]) -> tuple[float | None, str]:
    """Return the upper end of a plot, and a note if a few high points would flatten the rest."""
    import numpy as np

    sound = values[np.isfinite(values)]
    if len(sound) < 50:
        return None, ""
    low, usual, highest = float(sound.min()), float(np.quantile(sound, 0.97)), float(sound.max())
    cut = usual + 0.35 * (usual - low)
    if highest <= cut or usual == low:
        return None, ""
    above = int((sound > cut).sum())
    return cut, f"{counted(above, 'step is', 'steps are')} above the frame, the highest at {show_number(highest)}."


def _throughput(metrics: Metrics, marks: Sequence[Marker]) -> Iterator[Item]:
    steps = metrics.steps["step"]
    if "tokens_per_s" in metrics.steps:
        rate = metrics.steps["tokens_per_s"]
        curve = Curve("tokens/s", steps, rate, 1)
        yield drawing(Plot("Throughput", "tokens/s", [curve], markers=marks, from_zero=True), rate)
    if "mfu" in metrics.steps and _any(metrics.steps["mfu"]):
        mfu = metrics.steps["mfu"]
        curve = Curve("MFU", steps, mfu, 2)
        yield drawing(Plot("MFU", "share of the peak", [curve], markers=marks, from_zero=True, percent=True), mfu)
    split = [name for name in _PARTS if f"time_split_s.{name}" in metrics.steps]
    if not split:
        return
    curves, rows, below = [], [], None
    total = metrics.steps.get("step_time_s")
    sums = {name: _sum(metrics.steps[f"time_split_s.{name}"]) for name in split}
    all_seconds = sum(sums.values()) or 1.0
    for index, name in enumerate(split):
        values = metrics.steps[f"time_split_s.{name}"]
        below = values if below is None else below + values
        x, y = column_means(steps, below, 150)
        curves.append(Curve(name, x, y, index % 8 + 1, area=True))
        rows.append((name, f"{sums[name] / len(steps):.4g}", f"{100 * sums[name] / all_seconds:.1f} %"))
    plot = Plot("Time of a step", "s, parts on top of each other", curves, markers=marks, from_zero=True)
    yield drawing(plot, total)
    yield PageTable(("part", "s in a step", "share"), rows, numbers=("s in a step", "share"))


def _any(values: NDArray[np.float64]) -> bool:
    import numpy as np

    return bool(np.isfinite(values).any())


def _sum(values: NDArray[np.float64]) -> float:
    import numpy as np

    return float(np.nansum(values))


def _routing(metrics: Metrics, marks: Sequence[Marker]) -> Iterator[Item]:
    import numpy as np

    steps = metrics.steps["step"]
    curves = [
        Curve(name, steps, metrics.steps[column], color)
        for column, name, color in (("load_entropy", "evenness of the load", 1), ("skip_share", "skipped", 4))
        if column in metrics.steps
    ]
    if not curves:
        return
    plot = Plot("Load of the experts", "1 is even, of the least even layer", curves, markers=marks, percent=False)
    yield drawing(plot, curves[0].y)
    by_step = {row.step: row for row in metrics.load}
    rows = [by_step[step] for step in sorted(by_step)]
    rows = [row for row in rows if len(row.entropy) == len(rows[-1].entropy)]
    if len(rows) < 2:
        return
    last = rows[-1]
    over_time = np.array([row.entropy for row in rows], float).T
    ends = (f"step {rows[0].step}", f"step {last.step}")
    low = float(np.floor(20 * np.nanmin(over_time)) / 20)
    yield Drawing(
        heat_map(
            "Evenness of the load",
            over_time,
            low,
            1.0,
            x=ends,
            y=counted(len(last.entropy), "layer"),
            unit="1 is even",
        )
    )
    if len({len(layer) for layer in last.shares}) != 1:
        return
    shares = np.array(last.shares, float)
    classes = shares.shape[1]
    yield Drawing(
        heat_map(
            f"Share of each expert at step {last.step}",
            shares,
            0.0,
            float(shares.max()),
            x=("expert 0", f"class {classes - 1}"),
            y=counted(len(shares), "layer"),
            unit="of the choices of a layer",
        )
    )
    yield from load_over_time(rows)


def curves_together(runs: Sequence[RunFacts]) -> Iterator[Item]:
    """Yield plots of several runs over each other."""
    for column, name, unit in _FIGURES:
        curves: list[Curve] = []
        cut: float | None = None
        for index, facts in enumerate(runs):
            steps: dict[str, Any] = facts.metrics.steps
            if column not in steps or not _any(steps[column]):
                continue
            y = smooth(steps[column], _span(steps["step"])) if column in ("loss", "grad_norm") else steps[column]
            curves.append(Curve(facts.run.name, steps["step"], y, index % 8 + 1))
            top = _cut(y)[0]
            cut = max(cut or 0.0, top) if top is not None else cut
        if not curves:
            continue
        smoothed = ", smoothed" if column in ("loss", "grad_norm") else ""
        plot = Plot(
            name, f"{unit}{smoothed}".strip(", "), curves, from_zero=column != "loss", percent=column == "mfu"
        )
        lines = [f"{curve.name} `{sparkline(curve.y, 32)}`" for curve in curves]
        yield Drawing(draw(plot), f"{name}: " + ", ".join(lines))
