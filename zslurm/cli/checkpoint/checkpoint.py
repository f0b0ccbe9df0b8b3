"""`zslurm checkpoint`: the group of its commands."""

from __future__ import annotations

import typer

from zslurm.cli.checkpoint.convert import export, import_
from zslurm.cli.checkpoint.inspect import diff, list_, show, verify
from zslurm.cli.checkpoint.rewrite import prune, reshape

app = typer.Typer(help="Checkpoints: list, show, verify, compare, reshape, convert.", no_args_is_help=True)
app.command("ls")(list_)
for command in (show, verify, diff, reshape, prune, export):
    app.command()(command)
app.command("import")(import_)
