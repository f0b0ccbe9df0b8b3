"""`zslurm cancel`, `requeue`, `exec` and `rm`: act on runs that were submitted."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.cli.options import Run, Runs
from zslurm.core.console import say
from zslurm.core.errors import ConfigError, Exit, ZslurmError
from zslurm.job.exec_command import exec_on_nodes
from zslurm.run.find import OrphanJob, find, find_all, find_to_change
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look, look_all
from zslurm.submit import control
from zslurm.submit.move import answers_to, ask_to_move

if TYPE_CHECKING:
    from zslurm.run.run_dir import RunDir


def requeue(
    run: Run,
    now: Annotated[
        bool, typer.Option("--now", help="Do not sit out Slurm's pause of about two minutes before the start.")
    ] = False,
    exclude: Annotated[
        str | None,
        typer.Option(metavar="NODES", help="A hostlist of nodes that the job must not use from now on."),
    ] = None,
    off: Annotated[
        str | None,
        typer.Option(
            "--off",
            metavar="NODES",
            help="Requeue nothing: move the ranks off these nodes, onto spares of the job.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="With --off: return when the ranks have moved, or have not.")
    ] = True,
) -> None:
    """Put a run's job back into the queue, or move its ranks off nodes.

    The run saves, stops, and continues from that checkpoint when it starts again. With --exclude the nodes are on
    its list before it can start. A job that is held in the queue is released.

    With --off the ranks move at a step's boundary and without a restart: spares of the job take the places of the
    nodes, one after the other; no step is lost, and the run does not use these nodes any more. It needs recovery
    in memory (aegis.recovery: memory) and spares (slurm.spares). Ctrl-C ends the wait, not the move.

    Example: zslurm requeue my-run --exclude node[3,7]

    Example: zslurm requeue my-run --off node3
    """
    if off is not None:
        if now or exclude is not None:
            raise ConfigError("--off moves ranks without a requeue; leave --now and --exclude out")
        _move(run, off, wait=wait)
        return
    run_dir = find_to_change(run, "requeue")
    done = control.requeue(run_dir, now=now, exclude=exclude)
    if done.action in ("start", "release"):
        was = "was held; it" if done.action == "release" else "waits in the queue and"
        say(f"job {done.job_id} of {run_dir.name} {was} may start now")
        return
    what = f"requeued {run_dir.name} as" if done.action == "requeue" else f"{run_dir.name} waits on as"
    without = f", without {exclude}" if exclude else ""
    say(f"{what} job {done.job_id}{without}")
    if done.note:
        say(done.note)


def _move(run: str, off: str, *, wait: bool) -> None:
    """Move a run's ranks off nodes.

    Raises:
        typer.Exit: they have moved, or have not; with the exit code.
        ConfigError, ZslurmError: see `ask_to_move`.
    """
    run_dir = find(run)
    asked = ask_to_move(run_dir, off)
    if not wait:
        shows = f"`zslurm logs --events {run_dir.name}` shows it"
        say(f"asked job {asked.job_id} of {run_dir.name} to move off {off}; {shows}")
        return
    refused = 0
    try:
        for answer in answers_to(run_dir, asked):
            say(answer.line)
            refused += not answer.moved
    except KeyboardInterrupt:
        say(f"not waiting any more; `zslurm logs --events {run_dir.name}` shows what comes of it")
        raise typer.Exit(130) from None
    raise typer.Exit(Exit.FAILED if refused else Exit.DONE)


def cancel(
    runs: Runs,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the run has saved and stopped.")] = False,
) -> None:
    """Let runs save and stop; `submit` continues them.

    A job whose run directory is gone, or that is not the run's present job, is ended as scancel does.

    Example: zslurm cancel my-run
    """
    targets: list[RunDir | OrphanJob] = []
    for reference in runs:
        if (stray := control.cancel_stray(reference)) is not None:
            say(stray)
            continue
        try:
            targets.append(find_to_change(reference, "cancel"))
        except OrphanJob as orphan:
            targets.append(orphan)
    for run in dict.fromkeys(targets):
        if isinstance(run, OrphanJob):
            say(control.cancel_orphan(run.job, run.run))
            continue
        job_id = control.cancel(run, wait=wait)
        if not job_id:
            say(f"{run.name} is not active; nothing to cancel")
        elif not wait and look(run).active:
            say(f"cancelled job {job_id} of {run.name}: it saves and stops; `--wait` waits until then")
        else:
            say(f"cancelled job {job_id} of {run.name}")


def exec(
    run: Run,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Program and arguments.")],
    nodelist: Annotated[
        str | None,
        typer.Option("-w", "--nodelist", metavar="NODES", help="Only on these nodes of the job; a hostlist."),
    ] = None,
) -> None:
    """Run a command on each node of a running run. It runs once on each node, next to the ranks.

    Its exit code is the worst of them.

    Example: zslurm exec my-run --nodelist node3 -- rocm-smi --showuse
    """
    raise typer.Exit(exec_on_nodes(find(run), command, nodelist))


def rm(
    runs: Runs,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask; needed without a terminal.")] = False,
) -> None:
    """Remove runs with their checkpoints, metrics and logs.

    A run that is active is refused: cancel it first. What is removed cannot be brought back.

    Example: zslurm rm my-run --yes
    """
    run_dirs = find_all(runs)
    for state in look_all(run_dirs):
        if state.active:
            raise ZslurmError(
                f"{state.run.name}: it is {state.state}; `zslurm cancel {state.run.name} --wait` ends it"
            )
    for run in run_dirs:
        if not yes:
            _ask(run)
        _remove(run)
        say(f"removed {run.path}")


def _ask(run: RunDir) -> None:
    """Ask whether a run may be removed.

    Raises:
        ConfigError: there is no terminal to ask on.
        typer.Abort: it may not.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"{run.name}: without a terminal `zslurm rm` needs --yes")
    saved = len(list(run.checkpoints.glob("step-*")))
    size = show_bytes(_size(run.path))
    typer.confirm(f"remove {run.path} ({size}, checkpoints: {saved})?", abort=True, err=True)


def _size(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            total += path.lstat().st_size if path.is_file() or path.is_symlink() else 0
    return total


def _remove(run: RunDir) -> None:
    """Remove a run's directory; its configuration goes first, so that half of a run is no run.

    Raises:
        ZslurmError: the file system refused.
    """
    try:
        if run.path.is_symlink():
            raise ZslurmError(f"{run.path}: a symbolic link; remove what it points to by its own name")
        run.config.unlink()
        shutil.rmtree(run.path)
    except OSError as error:
        raise ZslurmError(f"{error.filename or run.path}: cannot be removed: {error.strerror}") from error
