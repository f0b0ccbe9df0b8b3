"""`zslurm bench mlp`."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from zslurm.cli.bench.choices import format_of
from zslurm.cli.bench.options import Minutes, Nodelist, Nodes, Out, Plot, Quick, Ranks
from zslurm.cli.bench.run import Common, run_benchmark
from zslurm.cli.options import Cluster, Json

FORMATS = ("bf16", "fp32")


def mlp(
    cluster: Cluster = None,
    nodes: Nodes = None,
    nodelist: Nodelist = None,
    ranks: Ranks = None,
    layers: Annotated[
        int | None, Option(metavar="N", min=1, help="Layers of the stack; default: 8, on CPUs 2.")
    ] = None,
    hidden: Annotated[int | None, Option(metavar="N", min=1, help="Width; default: 8192, on CPUs 256.")] = None,
    inner: Annotated[
        int | None, Option(metavar="N", min=1, help="Inner width; default: 32768, on CPUs 1024.")
    ] = None,
    tokens: Annotated[
        int | None, Option(metavar="N", min=1, help="Tokens of each GPU; default: 16384, on CPUs 256.")
    ] = None,
    dtype: Annotated[
        str | None, Option(metavar="NAME", help=f"Format: {' or '.join(FORMATS)}; default: bf16, on CPUs fp32.")
    ] = None,
    quick: Quick = False,
    minutes: Minutes = None,
    out: Out = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Let all GPUs compute at once, forward and backward through MLPs, and name the slow ones.

    Example: zslurm bench mlp --nodes 16
    """
    options: dict[str, Any] = {"layers": layers, "hidden": hidden, "inner": inner, "tokens": tokens}
    options |= {"dtype": None if dtype is None else format_of(dtype, FORMATS), "moments": 20 if quick else None}
    run_benchmark("mlp", options, Common(cluster, nodes, nodelist, ranks, minutes, out, plot, json))
