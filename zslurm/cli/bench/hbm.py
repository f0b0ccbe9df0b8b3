"""`zslurm bench hbm`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from zslurm.cli.bench.choices import chosen, format_of, sizes_between
from zslurm.cli.bench.options import Apply, Minutes, Nodelist, Nodes, Out, Plot, Quick, Ranks
from zslurm.cli.bench.run import Common, run_benchmark
from zslurm.cli.options import Cluster, Json

PATTERNS = ("copy", "scale", "add", "triad", "dot")
FORMATS = ("fp64", "fp32")


def hbm(
    cluster: Cluster = None,
    nodes: Nodes = None,
    nodelist: Nodelist = None,
    ranks: Ranks = None,
    pattern: Annotated[
        list[str] | None,
        Option(metavar="NAME", help=f"One of {', '.join(PATTERNS)} (repeatable); default: all."),
    ] = None,
    smallest: Annotated[str, Option("--min", metavar="SIZE", help="Bytes of each array, the smallest.")] = "1MiB",
    largest: Annotated[str, Option("--max", metavar="SIZE", help="The largest.")] = "8GiB",
    dtype: Annotated[str, Option(metavar="NAME", help=f"Format: {' or '.join(FORMATS)}.")] = "fp64",
    quick: Quick = False,
    minutes: Minutes = None,
    out: Out = None,
    plot: Plot = None,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Measure the memory of GPUs, or of this machine's CPUs, with BabelStream's patterns.

    Example: zslurm bench hbm --max 1GiB
    """
    run_benchmark(
        "hbm",
        {
            "patterns": chosen("--pattern", pattern, PATTERNS),
            "sizes": sizes_between(smallest, largest, factor=16 if quick else 2),
            "dtype": format_of(dtype, FORMATS),
        },
        Common(cluster, nodes, nodelist, ranks, minutes, out, plot, json, apply),
    )
