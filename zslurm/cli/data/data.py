"""`zslurm data`: the group of its commands."""

from __future__ import annotations

import typer

from zslurm.cli.data.build import build
from zslurm.cli.data.inspect import show, verify
from zslurm.cli.data.pack import pack

app = typer.Typer(help="Token bundles: what runs are trained on.", no_args_is_help=True)
for command in (build, pack, show, verify):
    app.command()(command)
