"""`zslurm compare`: how two runs differ."""

from __future__ import annotations

from collections.abc import Iterator

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Json, Run
from zslurm.cli.terminal.screen import print_styled
from zslurm.cli.terminal.table import Column, print_table
from zslurm.core.console import print_json, say
from zslurm.core.units import show_value
from zslurm.report.comparison import CurveDifference, FigureDifference, RunComparison
from zslurm.run.find import find

_MOST_FAULTS = 10


def compare(first: Run, second: Run, json: Json = False) -> None:
    """Show how two runs differ.

    In configuration, curves, throughput and faults. Curves are compared at the steps that both runs kept, or by
    tokens where their batches differ.

    Example: zslurm compare my-run other-run
    """
    from zslurm.report import comparison
    from zslurm.report.run_facts import read_runs

    runs = [find(first), find(second)]
    facts = read_runs(runs)
    found = comparison.compare(*facts)
    if json:
        print_json(found.to_json())
        return
    names = [_distinct(runs[0].name, runs[1].name, index) for index in (0, 1)]
    if found.config:
        rows = [[row.key, show_value(row.first), show_value(row.second)] for row in found.config]
        print_table([Column("configuration"), *(Column(name, "text") for name in names)], rows)
        print()
    else:
        say("the configurations are the same")
    print_table(["figure", *names, "ratio"], [_figure_row(row) for row in found.figures])
    print()
    print_styled([(line, "")] for line in (*_curve_lines(found), *_fault_lines(found, names)))
    for each in facts:
        if each.metrics.damaged:
            damaged = counted(each.metrics.damaged, "damaged line was", "damaged lines were")
            say(f"{each.metrics.path}: {damaged} left out")


def _distinct(first: str, second: str, index: int) -> str:
    """Return a column's name: two runs may have the same one, in other directories."""
    return (first, second)[index] if first != second else f"{first} ({index + 1})"


def _figure_row(row: FigureDifference) -> list[str]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.3g}"
    return [row.name, *("-" if value is None else f"{value:.5g}" for value in (row.first, row.second)), ratio]


def _curve_lines(found: RunComparison) -> Iterator[str]:
    if not found.curves:
        yield "no step is in both runs, so no curve can be compared"
    for curve in found.curves:
        yield f"{curve.name}: {describe(curve)}"


def describe(curve: CurveDifference) -> str:
    """Return how a curve differs, in one sentence."""
    unit = curve.by if curve.by == "step" else "token"
    at = f"{unit} {curve.at}"
    if curve.is_same:
        return f"the same bit for bit up to {at}"
    same = "" if curve.same_until is None else f"the same up to {unit} {curve.same_until}, then "
    return (
        f"{same}{curve.first:.5g} and {curve.second:.5g} at {at} (smoothed), "
        f"largest difference {curve.largest:+.3g} at {unit} {curve.largest_at}"
    )


def _fault_lines(found: RunComparison, names: list[str]) -> Iterator[str]:
    for name, faults in zip(names, found.faults, strict=True):
        if not faults:
            yield f"faults of {name}: none"
            continue
        yield f"faults of {name}: {len(faults)}"
        yield from (f"  {text}" for text in faults[-_MOST_FAULTS:])
        if len(faults) > _MOST_FAULTS:
            yield f"  and {len(faults) - _MOST_FAULTS} earlier; `zslurm events` shows all"
