"""`zslurm bench`: the group of its commands."""

from __future__ import annotations

import typer

from zslurm.cli.bench.collectives import collectives
from zslurm.cli.bench.gemm import gemm
from zslurm.cli.bench.hbm import hbm
from zslurm.cli.bench.mlp import mlp
from zslurm.cli.bench.results import apply, compare_results, plot
from zslurm.cli.bench.storage import storage
from zslurm.cli.bench.train import train
from zslurm.cli.commands import SETTINGS

app = typer.Typer(
    help="Measure links, memory, matrix products and storage.",
    no_args_is_help=True,
    **SETTINGS,
)
app.command("collectives")(collectives)
app.command("hbm")(hbm)
app.command("gemm")(gemm)
app.command("mlp")(mlp)
app.command("train")(train)
app.command("storage")(storage)
app.command("compare")(compare_results)
app.command()(plot)
app.command()(apply)
