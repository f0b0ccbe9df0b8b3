"""`zslurm cancel`, `requeue`, and `exec`: act on runs that were submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zslurm.cli.options import Run, Runs
from zslurm.core.console import say
from zslurm.core.errors import ConfigError, Exit
from zslurm.job.exec_command import exec_on_nodes
from zslurm.run.find import OrphanJob, find, find_to_change
from zslurm.run.state.run_state import look
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
    found = find_to_change(run, "requeue")
    done = control.requeue(found, now=now, exclude=exclude)
    if done.action in ("start", "release"):
        was = "was held; it" if done.action == "release" else "waits in the queue and"
        say(f"job {done.job_id} of {found.name} {was} may start now")
        return
    what = f"requeued {found.name} as" if done.action == "requeue" else f"{found.name} waits on as"
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
    found = find(run)
    asked = ask_to_move(found, off)
    if not wait:
        shows = f"`zslurm logs --events {found.name}` shows it"
        say(f"asked job {asked.job_id} of {found.name} to move off {off}; {shows}")
        return
    refused = 0
    try:
        for answer in answers_to(found, asked):
            say(answer.line)
            refused += not answer.moved
    except KeyboardInterrupt:
        say(f"not waiting any more; `zslurm logs --events {found.name}` shows what comes of it")
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
    found: list[RunDir | OrphanJob] = []
    for reference in runs:
        if (stray := control.cancel_stray(reference)) is not None:
            say(stray)
            continue
        try:
            found.append(find_to_change(reference, "cancel"))
        except OrphanJob as orphan:
            found.append(orphan)
    for run in dict.fromkeys(found):
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
    """Run a command on each node of a running run. It runs once on each node, beside the ranks.

    Its exit code is the worst of them.

    Example: zslurm exec my-run --nodelist node3 -- rocm-smi --showuse
    """
    raise typer.Exit(exec_on_nodes(find(run), command, nodelist))
