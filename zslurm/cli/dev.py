"""`zslurm dev`: commands for developers of zslurm and of its kernels."""

from __future__ import annotations

import typer

from zslurm.cli import kernels, tune
from zslurm.cli.replay import replay

app = typer.Typer(help="For developers: kernels, tuning, and replay of Aegis's decisions.", no_args_is_help=True)
app.add_typer(kernels.app, name="kernels")
app.add_typer(tune.app, name="tune")
app.command()(replay)
