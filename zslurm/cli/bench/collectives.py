"""`zslurm bench collectives`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from zslurm.cli.bench.choices import chosen, sizes_between
from zslurm.cli.bench.environments import environments
from zslurm.cli.bench.options import MeasureForProfile
from zslurm.cli.bench.run import run_benchmark
from zslurm.cli.options import command_of

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")
SCOPES = ("node", "all", "rail", "gpu_pair", "node_pair")


@dataclass(frozen=True, kw_only=True)
class Collectives(MeasureForProfile):
    """What `zslurm bench collectives` takes on its command line."""

    operation: Annotated[
        list[str] | None,
        Option(metavar="NAME", help=f"One of {', '.join(OPERATIONS)} (repeatable); default: all."),
    ] = None
    scope: Annotated[
        list[str] | None, Option(metavar="NAME", help=f"One of {', '.join(SCOPES)} (repeatable); default: all.")
    ] = None
    smallest: Annotated[str, Option("--min", metavar="SIZE", help="Smallest message.")] = "1KiB"
    largest: Annotated[
        str | None,
        Option("--max", metavar="SIZE", help="Largest message; default: 16GiB, with --quick on CPUs 64MiB."),
    ] = None
    env: Annotated[
        str | None,
        Option(metavar="NAME=A,B", help="Measure under both values of a variable, and show them side by side."),
    ] = None


def _collectives(given: Collectives) -> None:
    """Measure collectives between GPUs: bandwidth, latency, and whether the data is right.

    Example: zslurm bench collectives --nodes 2 --minutes 10
    """
    run_benchmark(
        "collectives",
        {
            "operations": chosen("--operation", given.operation, OPERATIONS),
            "scopes": chosen("--scope", given.scope, SCOPES),
            "levels": ["flat", "two_level"],
            "sizes": sizes_between(given.smallest, given.largest or "16GiB", factor=16 if given.quick else 2),
            "quick": given.quick and given.largest is None,
        },
        given,
        environments=environments(given.env),
    )


collectives = command_of(Collectives, _collectives)
