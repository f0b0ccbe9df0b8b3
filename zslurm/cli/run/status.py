"""`zslurm status`: runs as rows, and one run in full."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from zslurm.checkpoint_tools.format.layout import MANIFEST, step_of
from zslurm.checkpoint_tools.quantities import show_count, show_duration
from zslurm.cli.options import Json, SomeRuns
from zslurm.cli.run.run_rows import (
    COLUMNS,
    as_json,
    as_row,
    describe_root,
    note,
    orphan_as_json,
    show_mfu,
    stale_line,
    time_left,
)
from zslurm.core.console import print_json, print_table, say
from zslurm.core.errors import Exit, ZslurmError
from zslurm.core.units import show_time
from zslurm.run.event_text import cause_of, describe_cause
from zslurm.run.events import describe
from zslurm.run.find import OrphanJob, find
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state import RunState, look_all
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries
from zslurm.slurm.hostlist import compress, expand
from zslurm.train.jsonl import read_jsonl


def status(
    runs: SomeRuns = None,
    active: Annotated[bool, typer.Option("--active", help="Only runs that are running or waiting.")] = False,
    json: Json = False,
) -> None:
    """Show your runs, or everything about one.

    Exit code 4 where Slurm does not answer: the states are those of its last answer then, with their age on
    stderr.

    Example: zslurm status my-run
    """
    found: dict[RunDir, None] = {}
    orphans: list[OrphanJob] = []
    for reference in runs or ():
        try:
            found[find(reference)] = None
        except OrphanJob as orphan:
            orphans.append(orphan)
    states = look_all(list(found) if runs else known_runs(), cached=True)
    stale = stale_line(states)
    if active:
        states = [state for state in states if state.active]
        orphans = [lost for lost in orphans if lost.job.state.is_active]
    alone = states[0] if runs and len(states) == 1 and not orphans else None
    asks_slurm = alone is not None and alone.active and alone.launcher == "slurm" and not stale
    excluded = _excluded(alone.job_id) if alone is not None and asks_slurm else None
    if json:
        rows = [details_as_json(alone, excluded)] if alone else [as_json(state) for state in states]
        print_json(rows + [orphan_as_json(lost.job, lost.run) for lost in orphans])
    elif alone:
        for line in details(alone, excluded):
            print(line)
    elif states or orphans:
        if states:
            print_table(COLUMNS, [as_row(state) for state in states])
        for lost in orphans:
            print(lost)
    else:
        say("no runs are active" if active else "no runs yet; `zslurm submit run.yaml` starts one")
    if stale:
        say(f"zslurm: {stale}")
        raise typer.Exit(Exit.SLURM_UNAVAILABLE)


def _excluded(job_id: str | None) -> str | None:
    """Ask Slurm for the nodes that a job must not use; None where it does not answer."""
    try:
        return SlurmClient(retries=Retries(attempts=1)).excluded_nodes(job_id or "")
    except ZslurmError:
        return None


def details_as_json(state: RunState, excluded: str | None) -> dict[str, Any]:
    """Return one run in full: its attempts, checkpoints and excluded nodes too."""
    return as_json(state) | {
        "excluded_nodes": excluded,
        "checkpoints": _checkpoint_steps(state.run),
        "attempts": list(_attempts(state)),
    }


def details(state: RunState, excluded: str | None = None) -> Iterator[str]:
    """Describe one run in full, line by line; `excluded` are the nodes of Slurm's list, None if not known."""
    job = f" (job {state.job_id} on {state.cluster})" if state.job_id else ""
    yield f"{state.run.name}: {state.state}{job}"
    if note(state):
        yield f"  {note(state)}"
    for name, text in _facts(state, excluded):
        if text:
            yield f"  {name:<11} {text}"
    attempts = list(_attempts(state))
    if attempts:
        yield "  attempts"
        yield from map(_attempt_line, attempts)


def _facts(state: RunState, excluded: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield names and values; an empty value is not shown."""
    aegis = state.aegis
    yield "directory", str(state.run.path)
    if state.submitted:
        age = show_duration(time.time() - state.submitted)
        yield "submitted", f"{show_time(state.submitted)}, {age} ago"
    yield "nodes", state.nodes
    yield "excluded", _exclusions(state, excluded)
    if state.successor:
        yield "successor", f"job {state.successor} continues the run if this one ends early"
    if state.step is not None:
        loss = f", loss {state.loss:.4f}" if state.loss is not None else ""
        left = f", {time_left(state)} left" if time_left(state) else ""
        yield "step", f"{state.step} of {state.total_steps}{loss}{left}"
    if state.tokens_per_s is not None:
        mfu = f", MFU {show_mfu(state)}" if state.mfu is not None else ""
        yield "speed", f"{show_count(state.tokens_per_s)} tokens/s{mfu}"
    if state.evaluation_loss is not None:
        yield "validation", f"loss {state.evaluation_loss:.4f} at step {state.evaluation_step}"
    if state.checkpoint_step is not None:
        best = f", the best: step {state.best_step}" if state.best_step is not None else ""
        kept = _checkpoint_steps(state.run)
        listed = f"; kept: {', '.join(map(str, kept))}" if len(kept) > 1 else ""
        yield "checkpoint", f"step {state.checkpoint_step}{best}{listed}"
    in_note = (state.cause or {}).get("message")
    if aegis.last_cause is not None and aegis.last_cause["message"] != in_note:
        yield "last cause", f"{_when(aegis.last_cause)}{describe_root(aegis.last_cause)}"
    if aegis.last_decision is not None:
        yield "decision", f"{_when(aegis.last_decision)}{describe(aegis.last_decision)}"
    if aegis.restarts_in_place:
        yield "restarts", f"{aegis.restarts_in_place} in place, {state.restarts} by Slurm"
    if times := aegis.recovered_in_memory:
        yield "recovered", f"{'once' if times == 1 else f'{times} times'} in memory, without a restart"
    if times := aegis.planned_moves:
        yield (
            "moved",
            f"{'once' if times == 1 else f'{times} times'} to another node, as planned; no step was lost",
        )


def _checkpoint_steps(run: RunDir) -> list[int]:
    """Return the steps of the checkpoints in the run's directory that were committed."""
    found = {step_of(path.parent.name) for path in run.checkpoints.glob(f"*/{MANIFEST}")}
    return sorted(step for step in found if step is not None)


def _exclusions(state: RunState, by_slurm: str | None) -> str:
    """Return the nodes that the run does not use: what Slurm excludes, and what Aegis leaves out besides."""
    if by_slurm is None:
        return compress(state.aegis.excluded)
    own = sorted(set(state.aegis.excluded) - set(expand(by_slurm)))
    return f"{by_slurm}{'; ' if by_slurm else ''}by Aegis: {compress(own)}" if own else by_slurm


def _when(event: Mapping[str, Any]) -> str:
    return f"{show_time(float(event['time']))}  " if event.get("time") is not None else ""


def _attempt_line(attempt: dict[str, Any]) -> str:
    when = show_time(attempt["started"]) if attempt["started"] else "?"
    cause = f": {describe_cause(attempt['cause'])}" if attempt["cause"] else ""
    end = f" (exit code {attempt['exit_code']}){cause}" if attempt["ended"] else f" on {attempt['nodes']}"
    return f"    {attempt['attempt']:>3}  {when}  {attempt['outcome']}{end}"


def _attempts(state: RunState) -> Iterator[dict[str, Any]]:
    """Yield every attempt with its nodes and its end; one that has none runs, or its end was not recorded."""
    started: dict[int, dict[str, Any]] = {}
    for event in read_jsonl(state.run.events):
        if event.get("attempt") is None:
            continue
        if event.get("event") == "attempt_started":
            started[event["attempt"]] = event
        elif event.get("event") == "attempt_ended":
            begin = started.pop(event["attempt"], {})
            yield _attempt(event["attempt"], begin, event, event.get("outcome", "no end recorded"))
    for number, begin in started.items():
        yield _attempt(number, begin, {}, "running" if state.state == "running" else "no end recorded")


def _attempt(number: int, begin: dict[str, Any], end: dict[str, Any], outcome: str) -> dict[str, Any]:
    return {
        "attempt": number,
        "started": begin.get("time"),
        "ended": end.get("time"),
        "nodes": begin.get("nodes"),
        "outcome": outcome,
        "exit_code": end.get("exit_code"),
        "cause": cause_of(end),
    }
