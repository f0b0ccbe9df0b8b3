"""The heat map of a sweep of matrix products on a terminal: one for each K, N to the right and M downwards."""

from __future__ import annotations

import sys

from zslurm.bench.result import BenchResult
from zslurm.cli.bench.run import show_table

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
    ks, ms, ns = (sorted({key[place] for key in rates}) for place in range(3))
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
