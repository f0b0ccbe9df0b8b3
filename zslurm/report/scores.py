"""The scores of a run on tasks: curves while it trained, and a table of the newest ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zslurm.report.page_parts import Item, PageSection, PageTable, Text
from zslurm.report.plots import Curve, Plot
from zslurm.report.run_facts import RunFacts

_MOST_CURVES = 12


class _Scored(NamedTuple):
    """Scores of one step: by TASK/METRIC, with standard errors, and who made them."""

    step: int
    scores: Mapping[str, Any]
    stderr: Mapping[str, Any]
    by: str


def score_sections(facts: RunFacts) -> Iterator[PageSection]:
    """Yield the section of a run's scores, if it has any."""
    while_training = [
        _Scored(row["step"], row["scores"], _mapping(row.get("stderr")), "the run")
        for row in facts.metrics.rows("tasks")
        if isinstance(row.get("step"), int) and isinstance(row.get("scores"), dict)
    ]
    by_hand = [
        _Scored(event.step, event.scores, event.stderr, "zslurm eval")
        for event in facts.scored
        if event.step is not None
    ]
    rows = list(_newest([*while_training, *by_hand]))
    if not rows:
        return
    items: list[Item] = list(_curves(while_training))
    items.append(Text("The newest score of each:"))
    items.append(PageTable(("task and metric", "score", "standard error", "step", "by"), rows, numbers=_NUMBERS))
    yield PageSection("Scores on tasks", items)


_NUMBERS = ("score", "standard error", "step")


def _curves(scored: list[_Scored]) -> Iterator[Item]:
    """Yield a plot for each score that was made at several steps; a step that was taken again counts once."""
    import numpy as np

    from zslurm.report.curves import drawing

    names = list(dict.fromkeys(name for evaluation in scored for name in evaluation.scores))
    for name in names[:_MOST_CURVES]:
        points = {evaluation.step: evaluation.scores.get(name) for evaluation in scored}
        sound = {step: float(y) for step, y in sorted(points.items()) if isinstance(y, float | int)}
        if len(sound) > 1:
            curve = Curve(name, np.array(list(sound), float), np.array(list(sound.values())), 4)
            yield drawing(Plot(name, "", [curve]))


def _newest(scored: list[_Scored]) -> Iterator[tuple[str, ...]]:
    newest: dict[str, _Scored] = {}
    for evaluation in scored:
        for name in evaluation.scores:
            if name not in newest or newest[name].step <= evaluation.step:
                newest[name] = evaluation
    for name, evaluation in sorted(newest.items()):
        yield (
            name,
            _number(evaluation.scores[name]),
            _number(evaluation.stderr.get(name)),
            f"{evaluation.step:,}",
            evaluation.by,
        )


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float | int) else "-"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
