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
for command in (collectives, hbm, gemm, mlp, train, storage):
    app.command()(command)
app.command("compare")(compare_results)
app.command()(plot)
app.command()(apply)
