"""Cells below each other, for output that is no table of its own."""

from __future__ import annotations


def columns(rows: list[list[str]]) -> list[str]:
    """Return rows with their cells below each other, indented."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
