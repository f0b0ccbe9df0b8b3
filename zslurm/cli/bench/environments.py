"""`--env NAME=A,B`: the same points under two values of a variable, side by side.

Each value is measured twice, in the order A B B A, in fresh processes each time: what drifts while it is measured
(temperature, other jobs) does not favour one of them. A value is called faster only where both its runs are faster
than both of the other's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from zslurm.bench.measurement import BENCHMARKS
from zslurm.bench.result import BenchResult
from zslurm.cli.bench.cells import cell_of, title
from zslurm.cli.terminal.table import print_table
from zslurm.core.errors import ConfigError

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_LEAST = 0.02
"""What differs by less than this is called the same."""


def environments(given: str | None) -> Sequence[Mapping[str, str]]:
    """Return the environments of the runs; a value that is empty takes the variable away.

    Raises:
        ConfigError: it is not a variable with two values.
    """
    if given is None:
        return ({},)
    name, equals, text = given.partition("=")
    values = text.split(";" if ";" in text else ",")
    if not equals or not _NAME.fullmatch(name) or len(values) != 2 or values[0] == values[1]:
        raise ConfigError(
            f"--env {given}: expected NAME=A,B: a variable and two values (`NAME=A;B` where values have commas)"
        )
    first, second = ({name: value.strip()} for value in values)
    return (first, second, second, first)


def side_by_side(result: BenchResult) -> list[dict[str, Any]]:
    """Return a row for each point: its main figure under both values, the ratio, and which is faster."""
    benchmark = BENCHMARKS[result.benchmark]
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in result.rows:
        if "pair" not in row:
            key = tuple(row.get(name) for name in benchmark.keys)
            found.setdefault(key, {}).setdefault(row["environment"], []).append(row[benchmark.value])
    names = list(dict.fromkeys(row["environment"] for row in result.rows))
    if len(names) < 2:
        return []
    a, b = names[:2]
    rows = []
    for key, figures in found.items():
        if len(figures) < 2:
            continue
        mean = {name: sum(figures[name]) / len(figures[name]) for name in (a, b)}
        ratio = mean[b] / mean[a]
        rows.append(
            {**dict(zip(benchmark.keys, key, strict=True)), a: mean[a], b: mean[b], "ratio": ratio,
             "faster": _faster(figures[a], figures[b], a, b, higher=benchmark.better == "higher")}
        )  # fmt: skip
    return rows


def _faster(of_a: list[float], of_b: list[float], a: str, b: str, *, higher: bool) -> str:
    if not higher:
        of_a, of_b = [-each for each in of_a], [-each for each in of_b]
    for name, better, worse in ((a, of_a, of_b), (b, of_b, of_a)):
        if min(better) > max(worse) and min(better) - max(worse) > _LEAST * abs(max(worse)):
            return name if len(better) > 1 and len(worse) > 1 else f"{name} (one run)"
    return "same"


def show_side_by_side(result: BenchResult) -> None:
    """Print it as a table."""
    rows = side_by_side(result)
    if not rows:
        return
    columns = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    print_table([title(name) for name in columns], [[cell_of(row, name) for name in columns] for row in rows])
