"""Follow a run from the terminal: a progress display on a terminal, plain lines elsewhere.

Ctrl-C saves and stops a local run, and only detaches from a Slurm job.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_count, show_duration
from zslurm.cli.run.run_rows import release_held, saved, why
from zslurm.core.console import say
from zslurm.core.errors import Exit
from zslurm.run.events import (
    AttemptEnded,
    Decided,
    DeputyActed,
    GpuTested,
    NodesExcluded,
    Requeued,
    RequeueFailed,
    StartPostponed,
)
from zslurm.run.events.event import from_row
from zslurm.run.run_dir import RunDir
from zslurm.run.state.rest import states_until_rest
from zslurm.run.state.run_state import RunState, look
from zslurm.submit.control import cancel
from zslurm.train.jsonl import JsonLinesTail

LINE_EVERY_S = 5.0
"""Away from a terminal, a line for a step is printed at most this often."""
_WAITING = ("pending", "requeued", "held", "suspended", "unknown")
_RECOVERY = (GpuTested, NodesExcluded, Requeued, RequeueFailed, StartPostponed, DeputyActed)
"""Events that are shown besides each failure and each decision: what else follows from a failure."""
_EXIT_CODES = {
    "completed": Exit.DONE,
    "interrupted": Exit.INTERRUPTED,
    "preempted": Exit.INTERRUPTED,
    "cancelled": Exit.INTERRUPTED,
}
"""What `--wait` exits with, by the state in which the run came to rest."""


def follow(run: RunDir, job_id: str) -> int:
    """Show progress until the run comes to rest; returns the exit code of `zslurm submit --wait`."""
    state = _on_terminal(run, job_id) if sys.stderr.isatty() else _as_lines(run, job_id)
    if state.active:
        say(f"detached; job {job_id} continues. `zslurm cancel {run.name}` stops it")
        return Exit.DONE
    return _say_end(state)


def _as_lines(run: RunDir, job_id: str) -> RunState:
    last = 0.0

    def show(row: dict[str, Any], state: RunState) -> None:
        nonlocal last
        now = time.monotonic()
        if row["kind"] != "step":
            say(f"{run.name}: {_describe(row, state)}")
        elif now - last >= LINE_EVERY_S or row["step"] == state.total_steps:
            last = now
            say(f"{run.name}: {_describe(row, state)}")

    def say_of_run(text: str) -> None:
        say(f"{run.name}: {text}")

    return _watch(run, job_id, show, say_of_run, lambda text, failed: say_of_run(text))


def _on_terminal(run: RunDir, job_id: str) -> RunState:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, markup=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(run.name, total=None, text="starting")

        def show(row: dict[str, Any], state: RunState) -> None:
            if row["kind"] != "step":
                console.print(_describe(row, state))
            else:
                progress.update(task, total=state.total_steps, completed=row["step"], text=_describe(row, state))

        def print_line(text: str, failed: bool) -> None:
            console.print(text, style="red" if failed else "yellow")
            progress.update(task, text="the attempt failed" if failed else "after a failure")

        return _watch(run, job_id, show, lambda text: progress.update(task, text=text), print_line)


def _watch(
    run: RunDir,
    job_id: str,
    show: Callable[[dict[str, Any], RunState], None],
    show_state: Callable[[str], None],
    print_line: Callable[[str, bool], None],
) -> RunState:
    """Show what happens until the run rests, or Ctrl-C detaches from a Slurm job.

    `show` shows a new metric, `show_state` a change of state, and `print_line` prints a failure (True), or what
    happens next (False). What happened in jobs before `job_id` is not shown.
    """
    tail = JsonLinesTail(run.metrics)
    tail.new_records()  # what earlier attempts wrote is not news; a new one takes seconds to its first step
    events, jobs = JsonLinesTail(run.events), {job_id}
    last_state = last_line = ""
    try:
        for state in states_until_rest(run):
            for row in filter(_is_shown, tail.new_records()):
                show(row, state)
            jobs.update(job for job in (state.job_id, state.successor) if job)
            for event in events.new_records():
                if event.get("job_id") in jobs and (line := recovery_line(event)):
                    print_line(line, isinstance(from_row(event), AttemptEnded))
            for line in release_held([state]):
                if line != last_line:  # a job that stays held has the same one at every look
                    print_line(line.partition(": ")[2], False)
                last_line = line
            if state.state != last_state and state.state in _WAITING:
                show_state(state.state + (f" ({state.reason})" if state.reason else ""))
            last_state = state.state
        return state
    except KeyboardInterrupt:
        if look(run).launcher == "local":
            show_state("stopping: it saves first")
            cancel(run, wait=True)
        return look(run)


def recovery_line(event: Mapping[str, Any]) -> str | None:
    """Describe a failure, or what follows from it, in one line; None for any other event."""
    typed = from_row(event)
    failed = isinstance(typed, AttemptEnded) and typed.outcome not in ("completed", "interrupted")
    acted = isinstance(typed, Decided) and typed.action != "finish"
    if not (failed or acted or isinstance(typed, _RECOVERY)):
        return None
    return " ".join(typed.describe().split())


def _describe(row: dict[str, Any], state: RunState) -> str:
    if row["kind"] == "checkpoint":
        return f"saved step {row['step']}"
    if row["kind"] == "evaluation":
        return f"step {row['step']}  validation loss {row['loss']:.4f}"
    total, seconds = state.total_steps, row.get("step_time_s")
    parts = [f"step {row['step']}/{total}" if total else f"step {row['step']}"]
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.4f}")
    if row.get("tokens_per_s") is not None:
        parts.append(f"{show_count(row['tokens_per_s'])} tokens/s")
    if total and seconds is not None:
        parts.append(f"{show_duration(max(0, total - row['step']) * seconds)} left")
    return "  ".join(parts)


def _say_end(state: RunState) -> int:
    if state.state == "completed":
        loss = f", loss {state.loss:.4f}" if state.loss is not None else ""
        say(f"{state.run.name}: completed {counted(state.step or 0, 'step')}{loss}")
    elif state.state in ("interrupted", "preempted", "cancelled"):
        say(f"{state.run.name}: stopped; {saved(state)}")
    else:
        say(f"{state.run.name}: {state.state}: {why(state) or 'no reason recorded'}")
        say(f"what to do: zslurm why {state.run.name}    output: zslurm logs {state.run.name}")
    if state.state == "failed" and state.exit_code == Exit.STOPPED:
        return Exit.STOPPED
    return int(_EXIT_CODES.get(state.state, Exit.FAILED))


def _is_shown(row: dict[str, Any]) -> bool:
    """Return whether a row is a step, a validation loss, or a checkpoint that is there."""
    if row.get("kind") == "checkpoint":
        return row.get("state") == "COMMITTED"
    return row.get("kind") in ("step", "evaluation")
