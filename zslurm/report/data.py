"""The section of a report on the data: what was trained on of each source, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zslurm.checkpoint_tools.quantities import show_count
from zslurm.report.page_parts import Drawing, Item, PageSection, PageTable
from zslurm.report.plots import Curve, Plot, draw
from zslurm.report.run_facts import RunFacts

_MOST_POINTS = 400


def data_sections(facts: RunFacts) -> Iterator[PageSection]:
    """Yield the section, if the run recorded its sources."""
    rows = [row for row in facts.metrics.rows("sources") if _is_sound(row)]
    if rows:
        yield PageSection("Data", list(_items(rows)))


def _items(rows: list[dict[str, Any]]) -> Iterator[Item]:
    import numpy as np

    last = {row["step"]: row["sources"] for row in rows}  # a step that a restart took again counts once
    steps = [step for step in sorted(last) if step <= rows[-1]["step"]]
    sources = last[steps[-1]]
    total = sum(taken["tokens"] for taken in sources.values()) or 1
    table = [
        (name, show_count(taken["tokens"]), f"{100 * taken['tokens'] / total:.1f} %", f"{taken['epochs']:.3g}")
        for name, taken in sources.items()
    ]
    yield PageTable(("source", "tokens", "share", "epochs"), table, numbers=("tokens", "share", "epochs"))
    if len(sources) < 2 or len(steps) < 2:
        return
    shown = steps[:: -(-len(steps) // _MOST_POINTS)]
    curves = []
    for color, name in enumerate(sources):
        epochs = [last[step].get(name, {}).get("epochs", 0.0) for step in shown]
        curves.append(Curve(name, np.array(shown, float), np.array(epochs, float), color % 8 + 1))
    yield Drawing(draw(Plot("Epochs of each source", "times that it was gone through", curves, from_zero=True)))


def _is_sound(row: dict[str, Any]) -> bool:
    """Return whether a line has what is shown."""
    sources = row.get("sources")
    return (
        isinstance(row.get("step"), int)
        and isinstance(sources, dict)
        and bool(sources)
        and all(
            isinstance(taken, dict)
            and isinstance(taken.get("tokens"), int)
            and isinstance(taken.get("epochs"), float | int)
            for taken in sources.values()
        )
    )
