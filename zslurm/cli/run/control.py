"""`zslurm cancel|hold|release|requeue|move`, and `zslurm exec`: act on runs that were submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zslurm.cli.options import Run, Runs
from zslurm.core.console import say
from zslurm.core.errors import Exit
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
) -> None:
    """Put a run's job back into the queue.

    The run saves, stops, and continues from that checkpoint when it starts again. With --exclude the nodes are on
    its list before it can start.

    Example: zslurm requeue my-run --exclude node[3,7]
    """
    found = find_to_change(run, "requeue")
    done = control.requeue(found, now=now, exclude=exclude)
    if done.action == "start":
        say(f"{found.name} waits in the queue as job {done.job_id} and may start now")
        return
    what = f"requeued {found.name} as" if done.action == "requeue" else f"{found.name} waits on as"
    without = f", without {exclude}" if exclude else ""
    say(f"{what} job {done.job_id}{without}")
    if done.note:
        say(done.note)


def hold(runs: Runs) -> None:
    """Keep runs that wait in the queue from starting.

    Example: zslurm hold my-run
    """
    for run in dict.fromkeys(find_to_change(reference, "hold") for reference in runs):
        say(f"held job {control.hold(run)} of {run.name}; `zslurm release {run.name}` lets it start")


def release(runs: Runs) -> None:
    """Let held runs start.

    Example: zslurm release my-run
    """
    for run in dict.fromkeys(find_to_change(reference, "release") for reference in runs):
        job_id, held = control.release(run)
        say(
            f"released job {job_id} of {run.name}" if held else f"job {job_id} of {run.name} is not held; it waits"
        )


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


def move(
    run: Run,
    off: Annotated[str, typer.Option("--off", metavar="NODES", help="A hostlist of nodes that the ranks leave.")],
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when the ranks have moved, or when they do not.")
    ] = True,
) -> None:
    """Move a run's ranks off nodes, at a step's boundary and without a restart.

    Spares of the job take the places of the nodes, one after the other; no step is lost, and the run does not use
    these nodes any more. It needs recovery in memory (aegis.recovery: memory) and spares (slurm.spares). Ctrl-C
    ends the wait, not the move.

    Example: zslurm move my-run --off node3
    """
    found = find(run)
    asked = ask_to_move(found, off)
    if not wait:
        say(f"asked job {asked.job_id} of {found.name} to move off {off}; `zslurm events {found.name}` shows it")
        return
    refused = 0
    try:
        for answer in answers_to(found, asked):
            say(answer.line)
            refused += not answer.moved
    except KeyboardInterrupt:
        say(f"not waiting any more; `zslurm events {found.name}` shows what comes of it")
        raise typer.Exit(130) from None
    raise typer.Exit(Exit.FAILED if refused else Exit.DONE)


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
