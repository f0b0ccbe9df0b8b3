"""Values of a configuration with their origins, as `config show`, `cluster show` and a dry run print them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zslurm.cli.terminal.table import Column, print_table
from zslurm.config.layers import Origin, show_path
from zslurm.config.yaml12 import KeyPath
from zslurm.core.console import print_json
from zslurm.core.redact import redact_value
from zslurm.core.units import show_value


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
