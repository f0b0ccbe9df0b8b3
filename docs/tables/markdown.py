"""A table as Markdown, and where the documents and the results are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    rule = f"|{'---|' * len(head)}"
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (head, *rows)]
    first, *others = (f"| {line} |" for line in lines)
    return "\n".join([first, rule, *others, ""])
