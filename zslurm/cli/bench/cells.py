"""How tables of results name their columns and show their values."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from zslurm.checkpoint_tools.quantities import show_bytes

_TITLES = {
    "algbw_gb_s": "alg GB/s", "busbw_gb_s": "bus GB/s", "bytes": "size", "from_storage": "disk",
    "gb_s": "GB/s", "least_gb_s": "least", "total_gb_s": "all GB/s", "mb_s": "MB/s", "p99_us": "p99 us",
    "per_s": "1/s", "pages_per_s": "pages/s", "seconds": "s", "tflops": "TFLOPS", "least_tflops": "least",
    "tflops_per_rank": "TFLOPS each", "tokens_per_s": "tokens/s",
}  # fmt: skip

_LEAST_NEEDED = (
    "algbw_gb_s",
    "nodes",
    "least_gb_s",
    "least_tflops",
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
    """Return a row's value of a column as a table shows it; one measurement alone shows no spread."""
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
    """Return the columns that fit beside each other, and those that are left out, the least needed ones."""

    def needed(name: str) -> int:
        return 2 + max(len(title(name)), *(len(cell_of(row, name)) for row in rows))

    shown = list(names)
    for name in _LEAST_NEEDED:
        if sum(map(needed, shown)) - 2 <= width:
            break
        if name in shown:
            shown.remove(name)
    return shown, [name for name in names if name not in shown]
