"""Compare two results of one benchmark, row by row, and tell a change from noise.

Rows are compared if the benchmark's keys are equal. A row has the median of its repetitions; the median of n
values that scatter by s has a standard error of 1.25 s / sqrt(n). A change counts if it is larger than

    max(FLOOR, 3 sqrt(a^2 + b^2))     a, b: standard errors of the two rows, relative to their medians

FLOOR is what two runs of the same thing differ by although neither scatters: clocks, placement, other jobs. Rows
with fewer than three repetitions have no known noise: they are unclear unless they differ by more than a factor of
two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from zslurm.bench.measurement import BENCHMARKS, Benchmark
from zslurm.bench.result import BenchResult
from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import ConfigError

FLOOR = 0.03
_ERRORS, _MEDIAN_ERROR = 3.0, 1.25
_FEWEST_SAMPLES = 3
_CERTAIN = 1.0

Outcome = Literal["better", "worse", "same", "unclear"]
OUTCOMES: tuple[Outcome, ...] = ("better", "worse", "same", "unclear")
Key = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class FigureChange:
    """A row of both results.

    Attributes:
        key: columns that identify it, with their values.
        before, after: the benchmark's value in the first and the second result.
        noise: the largest relative change that counts as none; None if unknown.
        outcome: of the second result against the first.
    """

    key: Key
    before: float
    after: float
    noise: float | None
    outcome: Outcome

    @property
    def ratio(self) -> float:
        """Return the second value over the first."""
        return self.after / self.before


@dataclass(frozen=True)
class ResultComparison:
    """Two results of one benchmark.

    Attributes:
        changes: rows of both.
        only_first, only_second: how many rows the other has not.
        warnings: in what the results are not alike, a line each.
    """

    changes: list[FigureChange]
    only_first: int
    only_second: int
    warnings: list[str]

    def count(self, outcome: Outcome) -> int:
        """Return how many rows have this outcome."""
        return sum(change.outcome == outcome for change in self.changes)

    @property
    def summary(self) -> str:
        """Return the whole in one line."""
        counts = {outcome: self.count(outcome) for outcome in OUTCOMES}
        parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        middle = statistics.median(change.ratio for change in self.changes)
        rows = counted(len(self.changes), "row")
        return f"{rows}: {parts}; the median row has {middle:.3f} times the first result's value"


def compare(first: BenchResult, second: BenchResult) -> ResultComparison:
    """Compare two results.

    Raises:
        ConfigError: they are of different benchmarks, of one that is not known, or have no row in common.
    """
    if first.benchmark != second.benchmark:
        raise ConfigError(
            f"a result of {first.benchmark} and one of {second.benchmark} cannot be compared; give two of one "
            "benchmark"
        )
    benchmark = BENCHMARKS.get(first.benchmark)
    if benchmark is None:
        raise ConfigError(f"{first.benchmark}: this zslurm knows no such benchmark: {', '.join(BENCHMARKS)}")
    before, after = (_rows(result, benchmark) for result in (first, second))
    changes = [_change(key, before[key], after[key], benchmark) for key in before if key in after]
    if not changes:
        raise ConfigError("the results have no row in common: measure the same points with both")
    shared = len(changes)
    warnings = list(_warnings(first, second))
    return ResultComparison(changes, len(before) - shared, len(after) - shared, warnings)


def _rows(result: BenchResult, benchmark: Benchmark) -> dict[Key, dict[str, Any]]:
    """Return rows by what identifies them; those without a usable value are left out."""
    rows_by_key = {}
    for row in result.rows:
        value = row.get(benchmark.value)
        if isinstance(value, int | float) and math.isfinite(value) and value > 0:
            keys = ("environment", *benchmark.keys)
            rows_by_key[tuple((key, row[key]) for key in keys if row.get(key) not in (None, ""))] = row
    return rows_by_key


def _change(key: Key, before: dict[str, Any], after: dict[str, Any], benchmark: Benchmark) -> FigureChange:
    old, new = float(before[benchmark.value]), float(after[benchmark.value])
    gain = new / old if benchmark.better == "higher" else old / new
    size = max(gain, 1 / gain) - 1
    errors = [_standard_error(row) for row in (before, after)]
    if None in errors:
        outcome: Outcome = "unclear" if size < _CERTAIN else "better" if gain > 1 else "worse"
        return FigureChange(key, old, new, None, outcome)
    noise = max(FLOOR, _ERRORS * math.hypot(*(error for error in errors if error is not None)))
    return FigureChange(key, old, new, noise, "same" if size <= noise else "better" if gain > 1 else "worse")


def _standard_error(row: dict[str, Any]) -> float | None:
    spread, samples = row.get("spread"), row.get("samples")
    if not isinstance(spread, int | float) or not isinstance(samples, int) or samples < _FEWEST_SAMPLES:
        return None
    return _MEDIAN_ERROR * spread / math.sqrt(samples)


def _warnings(first: BenchResult, second: BenchResult) -> Iterator[str]:
    """Return in what the circumstances of two results differ."""
    a, b = first.machine, second.machine
    for what, first_value, second_value in (
        ("machines", a.gpu or a.cpu, b.gpu or b.cpu),
        ("clusters", a.cluster, b.cluster),
        ("numbers of nodes", len(a.nodes), len(b.nodes)),
        ("numbers of ranks on each node", a.ranks_per_node, b.ranks_per_node),
    ):
        if first_value != second_value:
            yield f"different {what}: {first_value} and {second_value}; a change may be theirs"
    for what, first_values, theirs in (
        ("versions", first.versions, second.versions),
        ("environment", first.environment, second.environment),
    ):
        apart = sorted(key for key in {*first_values, *theirs} if first_values.get(key) != theirs.get(key))
        if apart:
            shown = ", ".join(
                f"{key} {first_values.get(key) or 'none'} -> {theirs.get(key) or 'none'}" for key in apart
            )
            yield f"{what}: {shown}"
    for name, result in (("first", first), ("second", second)):
        if not result.complete:
            yield f"the {name} result is partial: {counted(len(result.rows), 'row')}"
