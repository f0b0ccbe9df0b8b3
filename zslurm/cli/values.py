"""Values of a configuration with their origins, and measured ones with their conditions, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zslurm.cli.terminal.table import Column, print_table
from zslurm.cluster.measurements import StoredValue
from zslurm.config.layers import Origin, show_path
from zslurm.config.measured import MeasuredVariable
from zslurm.config.yaml12 import KeyPath
from zslurm.core.console import print_json
from zslurm.core.redact import redact_value
from zslurm.core.units import show_value

_MEASURED = (
    Column("key below cluster"),
    Column("value", "text"),
    Column("spread"),
    Column("date"),
    Column("nodes"),
    Column("ranks on each", drop=2),
    Column("device", drop=3),
    Column("command", drop=1),
)


def without_secrets(rows: Iterable[tuple[KeyPath, Any, Origin]]) -> list[tuple[str, Any, str]]:
    """Return key, value and origin of each row."""
    return [(show_path(path), redact_value(str(path[-1]), value), str(origin)) for path, value, origin in rows]


def print_values(rows: Iterable[tuple[KeyPath, Any, Origin]], *, as_json: bool) -> None:
    """Print every value with its origin, without secrets."""
    shown = without_secrets(rows)
    if as_json:
        print_json({key: {"value": value, "origin": origin} for key, value, origin in shown})
    else:
        columns: list[str | Column] = ["key", Column("value", "text"), Column("origin", "text")]
        print_table(columns, [[key, show_value(value), origin] for key, value, origin in shown])


def print_measurements(values: Mapping[str, StoredValue]) -> None:
    """Print measured values in a table, each with its spread, date, nodes and command."""
    rows = [
        [
            key,
            _shown(stored.value),
            "not known" if stored.spread is None else f"{100 * stored.spread:.3g} %",
            stored.date[:10],
            stored.nodes,
            str(stored.ranks_per_node),
            stored.device,
            stored.command,
        ]
        for key, stored in sorted(values.items())
    ]
    print_table(_MEASURED, rows)


def _shown(value: float | str | MeasuredVariable) -> str:
    """Return a measured value in a line: of a variable the best value, and the factors over the others."""
    if isinstance(value, MeasuredVariable):
        others = ", ".join(f"{ratio:.2f} times {other}" for other, ratio in value.others.items())
        return f"{value.best}: {others}"
    return value if isinstance(value, str) else f"{value:,.6g}"
