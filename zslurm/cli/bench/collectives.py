"""`zslurm bench collectives`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from zslurm.cli.bench.choices import chosen, sizes_between
from zslurm.cli.bench.environments import environments
from zslurm.cli.bench.options import Apply, Minutes, Nodelist, Nodes, Out, Plot, Quick, Ranks
from zslurm.cli.bench.run import Common, run_benchmark
from zslurm.cli.options import Cluster, Json

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")
SCOPES = ("node", "all", "rail", "gpu_pair", "node_pair")


def collectives(
    cluster: Cluster = None,
    nodes: Nodes = None,
    nodelist: Nodelist = None,
    ranks: Ranks = None,
    operation: Annotated[
        list[str] | None,
        Option(metavar="NAME", help=f"One of {', '.join(OPERATIONS)} (repeatable); default: all."),
    ] = None,
    scope: Annotated[
        list[str] | None, Option(metavar="NAME", help=f"One of {', '.join(SCOPES)} (repeatable); default: all.")
    ] = None,
    smallest: Annotated[str, Option("--min", metavar="SIZE", help="Smallest message.")] = "1KiB",
    largest: Annotated[
        str | None,
        Option("--max", metavar="SIZE", help="Largest message; default: 16GiB, with --quick on CPUs 64MiB."),
    ] = None,
    env: Annotated[
        str | None,
        Option(metavar="NAME=A,B", help="Measure under both values of a variable, and show them side by side."),
    ] = None,
    quick: Quick = False,
    minutes: Minutes = None,
    out: Out = None,
    plot: Plot = None,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Measure collectives between GPUs: bandwidth, latency, and whether the data is right.

    Example: zslurm bench collectives --nodes 2 --minutes 10
    """
    run_benchmark(
        "collectives",
        {
            "operations": chosen("--operation", operation, OPERATIONS),
            "scopes": chosen("--scope", scope, SCOPES),
            "levels": ["flat", "two_level"],
            "sizes": sizes_between(smallest, largest or "16GiB", factor=16 if quick else 2),
            "quick": quick and largest is None,
        },
        Common(cluster, nodes, nodelist, ranks, minutes, out, plot, json, apply),
        environments=environments(env),
    )
