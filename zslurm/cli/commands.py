"""The commands of `zslurm`, and a Typer group that imports a command's module only when the command is called.

`zslurm --help` and completion know every command from the table below, without importing any of them. So modules
import what they need at their top, and a user pays for one command only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand
from typer.main import get_group

from zslurm.cli.help import HelpCommand, HelpGroup, with_help

SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Of every Typer application here."""


class CommandLine(NamedTuple):
    """One command or command group.

    Attributes:
        name: as it is typed; the name of its function, too.
        module: in `zslurm.cli`; the module of a group has the `typer.Typer` called `app`.
        help: the first sentence of its help; a test compares the two.
    """

    name: str
    module: str
    help: str


_COMMANDS = (
    CommandLine("new", "new", "Write a commented run file from a recipe."),
    CommandLine("submit", "run.submit", "Submit a run, or continue it."),
    CommandLine("status", "run.status", "Show your runs, or everything about one."),
    CommandLine("watch", "run.watch", "Show your active runs, or those that are named until they rest."),
    CommandLine("logs", "logs.logs", "Print the output of ranks, or what happened to runs."),
    CommandLine("why", "run.why", "Explain why a run died, by its record or by log files."),
    CommandLine("report", "run.report", "Write one page about a run, or compare runs."),
    CommandLine("cancel", "run.control", "Let runs save and stop; `submit` continues them."),
    CommandLine("requeue", "run.control", "Put a run's job back into the queue, or move its ranks off nodes."),
    CommandLine("rm", "run.control", "Remove runs with their checkpoints, metrics and logs."),
    CommandLine("demo", "demo", "Train a tiny ZAYA1 on real text, on this machine."),
    CommandLine("init", "cluster.init", "Write a cluster profile from what Slurm and a node report."),
    CommandLine("doctor", "cluster.doctor", "Check this machine and the nodes."),
    CommandLine(
        "calibrate",
        "calibrate",
        "Measure a cluster in one job, for runs, plans and the doctor.",
    ),
    CommandLine("cluster", "cluster.cluster", "Cluster profiles, RCCL environment, rails and excluded nodes."),
    CommandLine("data", "data", "Token bundles: what runs are trained on."),
    CommandLine(
        "checkpoint", "checkpoint.checkpoint", "Checkpoints: list, show, verify, compare, reshape, convert."
    ),
    CommandLine("audit", "checkpoint.audit", "Show the chain of a run's checkpoints, with its gaps."),
    CommandLine("eval", "checkpoint.eval", "Score a model on tasks of lm-evaluation-harness."),
    CommandLine("generate", "checkpoint.generate", "Continue a text with a model."),
    CommandLine("plan", "plan", "What a run will take, before it is submitted."),
    CommandLine("config", "config", "A run's configuration, recipes, and templates of job scripts."),
    CommandLine("bench", "bench.measurements", "Measure links, memory, matrix products, kernels and storage."),
    CommandLine("exec", "run.control", "Run a command on each node of a running run."),
    CommandLine("aegis", "aegis", "The supervisor of a run: try its notifications."),
    CommandLine("completion", "completion", "Print the script for completion in your shell."),
    CommandLine("dev", "dev", "For developers: kernels, and replay of Aegis's decisions."),
    CommandLine("help", "help", "Show the help of a command, with --all everything."),
)
COMMANDS = {command.name: command for command in _COMMANDS}


HEADINGS = {
    "Runs": "new submit status watch logs why report cancel requeue rm demo",
    "Clusters": "init doctor calibrate cluster",
    "Data and models": "data checkpoint eval",
}
"""The commands in the order of `zslurm --help`."""

FURTHER_HEADINGS = {
    "Models": "generate audit",
    "Before a run": "plan config bench",
    "More": "exec aegis completion dev help",
}
"""Those that `zslurm help --all` adds; a command that is under no heading is under the last one."""


class ClosedPipe(Exception):
    """The reader of the output has gone, as in `zslurm ... | head`."""


@contextmanager
def _closed_pipes() -> Iterator[None]:
    """Raise ClosedPipe if the reader of a pipe has gone: Typer takes Python's error for a failure."""
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedPipe from error


class LazyGroup(HelpGroup):
    """A group whose commands are placeholders until one is called."""

    headings = HEADINGS
    further_headings = FURTHER_HEADINGS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in COMMANDS.values():
            self.add_command(TyperCommand(command.name, help=command.help))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command that is called or completed, and import it."""
        name, command, remaining = super().resolve_command(ctx, args)
        if name not in COMMANDS:
            return name, command, remaining
        loaded = load(name)
        if name == "submit":
            from zslurm.cli.run.submit import PROGRAM, take_program

            remaining, ctx.meta[PROGRAM] = take_program(remaining)
        return name, loaded, remaining

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parse the command line, and print help or the version if that is asked for."""
        with _closed_pipes():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is called."""
        with _closed_pipes():
            return super().invoke(ctx)


def load(name: str) -> Any:
    """Import a command's module; returns the click command of its function or its `typer.Typer`."""
    command = COMMANDS[name]
    module = import_module(f"zslurm.cli.{command.module}")
    loaded = getattr(module, "app", None) or getattr(module, name)
    holder = typer.Typer(add_completion=False, **SETTINGS)
    if isinstance(loaded, typer.Typer):
        holder.add_typer(with_help(loaded), name=name, cls=HelpGroup)
    else:
        holder.command(name, cls=HelpCommand)(loaded)
    return get_group(holder).commands[name]
