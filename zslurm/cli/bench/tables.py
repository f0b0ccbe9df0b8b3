"""Results of measurements as tables: rows, heat maps of matrix products, and two environments side by side.

`--env NAME=A,B` measures the same points under two values of a variable. Each value is measured twice, in
the order A B B A, in fresh processes each time: what drifts during the measurement (temperature, other jobs) does
not favour one of them. A value is called faster only if both its runs are faster than both of the other's.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from zslurm.bench.measurement import BENCHMARKS
from zslurm.bench.result import BenchResult
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.cli.terminal.table import print_table
from zslurm.core.console import say
from zslurm.core.errors import ConfigError

_TITLES = {
    "algbw_gb_s": "alg GB/s", "busbw_gb_s": "bus GB/s", "bytes": "size", "from_storage": "disk",
    "gb_s": "GB/s", "least_gb_s": "least", "total_gb_s": "all GB/s", "mb_s": "MB/s", "p99_us": "p99 us",
    "per_s": "1/s", "pages_per_s": "pages/s", "seconds": "s", "tflops": "TFLOPS", "least_tflops": "least",
    "least_rate": "least", "default_tflops": "default TFLOPS", "of_reference": "of the reference's",
    "tflops_per_rank": "TFLOPS each", "tokens_per_s": "tokens/s",
}  # fmt: skip

_LEAST_NEEDED = (
    "algbw_gb_s",
    "nodes",
    "least_gb_s",
    "least_tflops",
    "least_rate",
    "slowest",
    "spread",
    "us",
    "other_s",
    "data_s",
)
"""Columns that a narrow terminal leaves out, in this order."""


def title(name: str) -> str:
    """Return what a column is called in a table."""
    return _TITLES.get(name, name.removesuffix("_s") + " s" if name.endswith("_s") else name)


def cell(name: str, value: Any) -> str:
    """Return a value of a column as a table shows it."""
    if value is None:
        return "-"
    if name == "bytes":
        return show_bytes(value).replace(".00 ", " ").replace(".0 ", " ")
    if name == "spread":
        return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.1f} %"
    if isinstance(value, float):
        if not sys.stdout.isatty():  # for programs
            return f"{value:.4g}"
        return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}" if value < 1e5 else f"{value / 1e3:,.0f}k"
    return str(value)


def cell_of(row: Mapping[str, Any], name: str) -> str:
    """Return a row's value of a column as a table shows it; a single measurement shows no spread."""
    return "-" if name == "spread" and row.get("samples") == 1 else cell(name, row.get(name))


def split_columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the columns that differ between rows, and those that have one value in all of several rows.

    A terminal is narrow: what is the same everywhere is shown once.
    """
    same = [name for name in names if len(rows) > 1 and len({str(row.get(name)) for row in rows}) == 1]
    return [name for name in names if name not in same], same


def fit_columns(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]], width: int
) -> tuple[list[str], list[str]]:
    """Return the columns that fit next to each other, and those that are left out, the least needed ones."""

    def needed(name: str) -> int:
        return 2 + max(len(title(name)), *(len(cell_of(row, name)) for row in rows))

    shown = list(names)
    for name in _LEAST_NEEDED:
        if sum(map(needed, shown)) - 2 <= width:
            break
        if name in shown:
            shown.remove(name)
    return shown, [name for name in names if name not in shown]


def show_table(result: BenchResult) -> None:
    """Print the rows."""
    columns = [
        name
        for name in BENCHMARKS[result.benchmark].columns
        if any(row.get(name) not in (None, "") for row in result.rows)
    ]
    # Of a sweep of pairs only what it shows: it has a row for each pair.
    rows = [row for row in result.rows if "pair" not in row]
    if not rows:
        return
    if sys.stdout.isatty():
        if len(rows) == 1:  # it would be wider than the terminal
            print_table(["", ""], [[title(name), cell_of(rows[0], name)] for name in columns])
            return
        columns, same = split_columns(columns, rows)
        columns, left_out = fit_columns(columns, rows, shutil.get_terminal_size().columns)
        if left_out:
            names = ", ".join(title(name) for name in left_out)
            say(f"not shown, as the terminal is narrow: {names} (--json has all)")
        if same:
            print(", ".join(f"{title(name)} {cell_of(rows[0], name)}" for name in same))
    print_table(
        [title(name) for name in columns],
        [[cell_of(row, name) for name in columns] for row in rows],
    )


_COLORS = (17, 18, 24, 30, 36, 71, 107, 143, 179, 220)
"""Of the 256 of a terminal, from dark to light, as viridis goes."""
_BLACK, _WHITE = "color(16)", "color(231)"  # by number: `black` is what a theme makes of it, often grey
_BLACK_FROM = 4
"""From this colour on black digits have more contrast than white ones."""


def show_products(result: BenchResult) -> None:
    """Print a sweep as heat maps on a terminal; elsewhere, and for products of a run, the table of the rows."""
    swept = [row for row in result.rows if not row["product"]]
    if len(swept) < 2 or not sys.stdout.isatty():
        show_table(result)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rates = {(row["k"], row["m"], row["n"]): row["tflops"] for row in swept}
    ks, ms, ns = (sorted({key[index] for key in rates}) for index in range(3))
    highest, console = max(rates.values()), Console(highlight=False)
    for k in ks:
        table = Table(box=None, pad_edge=False, padding=0, header_style="bold")
        table.add_column("M \\ N", justify="right")
        width = 1 + max(*(len(f"{rate:.3g}") for rate in rates.values()), *(len(str(n)) for n in ns))
        for n in ns:
            table.add_column(f"{n}", justify="right", no_wrap=True, min_width=width)
        for m in ms:
            cells = [Text(f"{m} ", style="bold")]
            for n in ns:
                rate = rates.get((k, m, n))
                share = 0.0 if rate is None else rate / highest
                level = min(len(_COLORS) - 1, int(share * len(_COLORS)))
                style = f"{_BLACK if level >= _BLACK_FROM else _WHITE} on color({_COLORS[level]})"
                # As wide as the column: a cell is coloured as far as its text goes.
                text = f"{'-' if rate is None else f'{rate:.3g}':>{width}}"
                cells.append(Text(text, style="" if rate is None else style))
            table.add_row(*cells)
        console.print(f"TFLOPS, {swept[0]['dtype']}, K = {k}")
        console.print(table, "")
    wrong = sum(bool(row["wrong"]) for row in swept)
    console.print(f"{len(swept)} products, {wrong} of them wrong; highest {highest:.4g} TFLOPS")


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
            f"--env {given}: expected NAME=A,B: a variable and two values (`NAME=A;B` if values have commas)"
        )
    first, second = ({name: value.strip()} for value in values)
    return (first, second, second, first)


def side_by_side(result: BenchResult) -> list[dict[str, Any]]:
    """Return a row for each point: its main figure under both values, the ratio, and which is faster."""
    benchmark = BENCHMARKS[result.benchmark]
    by_key: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in result.rows:
        if "pair" not in row:
            key = tuple(row.get(name) for name in benchmark.keys)
            by_key.setdefault(key, {}).setdefault(row["environment"], []).append(row[benchmark.value])
    names = list(dict.fromkeys(row["environment"] for row in result.rows))
    if len(names) < 2:
        return []
    a, b = names[:2]
    rows = []
    for key, figures in by_key.items():
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
        of_a, of_b = [-rate for rate in of_a], [-rate for rate in of_b]
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
