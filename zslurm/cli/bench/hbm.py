"""`zslurm bench hbm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from zslurm.cli.bench.choices import chosen, format_of, sizes_between
from zslurm.cli.bench.options import MeasureForProfile
from zslurm.cli.bench.run import run_benchmark
from zslurm.cli.options import command_of

PATTERNS = ("copy", "scale", "add", "triad", "dot")
FORMATS = ("fp64", "fp32")


@dataclass(frozen=True, kw_only=True)
class Hbm(MeasureForProfile):
    """What `zslurm bench hbm` takes on its command line."""

    pattern: Annotated[
        list[str] | None,
        Option(metavar="NAME", help=f"One of {', '.join(PATTERNS)} (repeatable); default: all."),
    ] = None
    smallest: Annotated[str, Option("--min", metavar="SIZE", help="Bytes of each array, the smallest.")] = "1MiB"
    largest: Annotated[str, Option("--max", metavar="SIZE", help="The largest.")] = "8GiB"
    dtype: Annotated[str, Option(metavar="NAME", help=f"Format: {' or '.join(FORMATS)}.")] = "fp64"


def _hbm(given: Hbm) -> None:
    """Measure the memory of GPUs, or of this machine's CPUs, with BabelStream's patterns.

    Example: zslurm bench hbm --max 1GiB
    """
    run_benchmark(
        "hbm",
        {
            "patterns": chosen("--pattern", given.pattern, PATTERNS),
            "sizes": sizes_between(given.smallest, given.largest, factor=16 if given.quick else 2),
            "dtype": format_of(given.dtype, FORMATS),
        },
        given,
    )


hbm = command_of(Hbm, _hbm)
