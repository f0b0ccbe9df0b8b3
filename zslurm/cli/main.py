"""`zslurm`: the program, its commands, and what its errors look like."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from zslurm import __version__
from zslurm.cli.commands import SETTINGS, ClosedPipe, LazyGroup
from zslurm.core.errors import Exit, ZslurmError

app = typer.Typer(
    name="zslurm",
    cls=LazyGroup,
    help="Train ZAYA1-class models on Slurm clusters, and keep the run alive.",
    epilog="`zslurm help --all` lists all commands, `zslurm help COMMAND` explains one. "
    "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 not found, 4 Slurm unavailable, "
    "5 check failed, 75 interrupted after saving, 93 stopped for good.",
    no_args_is_help=True,
    **SETTINGS,
)


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
    """Run the command line and leave with its exit code."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale that lacks a character gets `?`, and no traceback
    try:
        code = _run()
        sys.stdout.flush()
    except (BrokenPipeError, ClosedPipe):
        # Python would complain of the closed pipe when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = CLOSED_PIPE
    sys.exit(code)


CLOSED_PIPE = 128 + signal.SIGPIPE
"""Exit code if the reader of the output has gone: as of any program that SIGPIPE ends."""


def _open_closed_streams() -> None:
    """Open the null device for a standard stream that the caller closed, as in `zslurm status >&-`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _run() -> int:
    """Run the command. A user's mistake is one line and the documented exit code, never a traceback."""
    try:
        return app(prog_name="zslurm", standalone_mode=False) or Exit.DONE
    except ZslurmError as error:
        _complain(str(error))
        return error.exit_code
    except TyperException as error:
        message = error.format_message()
        if message.startswith("Usage: "):  # there were no arguments at all: the help itself
            print(message, file=sys.stderr)
        else:
            plain = " ".join(message.replace("Value error, ", "").split()).rstrip(".")  # pydantic's prefix
            context = getattr(error, "ctx", None)
            _complain(f"{plain} (see {context.command_path if context else 'zslurm'} --help)")
        return error.exit_code
    except typer.Abort:
        _complain("stopped")
    except ModuleNotFoundError as error:
        from zslurm.core.extras import missing_extra

        missing = missing_extra(error)
        if missing is None:
            raise
        _complain(str(missing))
        return missing.exit_code
    except OSError as error:
        from zslurm.checkpoint_tools.plain import reason_of

        _complain(reason_of(error))
    return Exit.FAILED


def _complain(text: str) -> None:
    from zslurm.core.console import say
    from zslurm.core.redact import redact

    for line in redact(text).splitlines():
        say(f"zslurm: {line}")
