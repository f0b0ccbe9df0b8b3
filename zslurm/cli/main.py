"""`zslurm`: the program, its commands, and what its errors look like."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from zslurm import __version__
from zslurm.cli import (
    aegis,
    cancel,
    checkpoint,
    config,
    data,
    demo,
    generate,
    init,
    logs,
    requeue,
    status,
    submit,
    template,
)
from zslurm.errors import Exit, ZslurmError

app = typer.Typer(
    name="zslurm",
    help="Train ZAYA1-class models on Slurm clusters, and keep the run alive.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 not found, 4 Slurm unavailable, "
    "5 check failed, 75 interrupted after saving, 93 stopped for good.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (init, submit, status, logs, cancel, requeue, generate):
    app.command()(getattr(module, module.__name__.rsplit(".", 1)[1]))
app.add_typer(config.app, name="config")
app.add_typer(template.app, name="template")
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(aegis.app, name="aegis")
app.command()(demo.demo)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"zslurm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


def main() -> NoReturn:
    """Run the command line. A user's mistake is one line and the documented exit code, never a traceback."""
    try:
        app()
    except ZslurmError as error:
        for line in str(error).splitlines():
            print(f"zslurm: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(Exit.DONE)
