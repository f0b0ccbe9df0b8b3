"""`zslurm status`: runs as rows, one run in full, and both as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from zslurm.checkpoint_tools.format.layout import MANIFEST, step_of
from zslurm.checkpoint_tools.quantities import show_count, show_duration
from zslurm.cli.options import Json, SomeRuns
from zslurm.core.console import print_json, print_table, say
from zslurm.core.errors import Exit, ZslurmError
from zslurm.core.units import show_time
from zslurm.run.events import cause_of, describe, describe_cause, describe_fault
from zslurm.run.find import OrphanJob, find
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state import RunState, look_all
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.reasons import explain
from zslurm.train.jsonl import read_jsonl


def status(
    runs: SomeRuns = None,
    active: Annotated[bool, typer.Option("--active", help="Only runs that are running or waiting.")] = False,
    json: Json = False,
) -> None:
    """Show your runs, or everything about one.

    Exit code 4 where Slurm does not answer: then the states are as old as stderr says.

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
    excluded = (
        _excluded(alone.job_id) if alone and alone.active and alone.launcher == "slurm" and not stale else None
    )
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
    """The nodes that a job must not use; None where Slurm does not say."""
    try:
        return SlurmClient(retries=Retries(attempts=1)).excluded_nodes(job_id or "")
    except ZslurmError:
        return None


COLUMNS = (*"run state job attempt step loss held-out tokens/s MFU left".split(), "last event", "note")

_WAITING = ("pending", "requeued", "held")


def _left(state: RunState) -> str:
    if state.state != "running" or not state.step or not state.total_steps or not state.step_time_s:
        return "-"
    return show_duration((state.total_steps - state.step) * state.step_time_s)


def _mfu(state: RunState) -> str:
    return f"{100 * state.mfu:.1f} %" if state.mfu is not None else ""


def note(state: RunState) -> str:
    """What is to be said of a run besides its figures: why it failed, or why it waits and until when."""
    if state.state in _WAITING and state.reason:
        return _preempted(state) + why(state) + _start(state)
    if state.state == "preempted":
        return _preempted(state) + _saved(state)
    if not state.cause and not state.reason and state.state == "interrupted":
        return _saved(state)
    return (_preempted(state) + why(state)).removesuffix("; ") or survived(state)


def _saved(state: RunState) -> str:
    where = f"saved at step {state.checkpoint_step}; " if state.checkpoint_step is not None else ""
    return f"{where}submit again to continue"


def _preempted(state: RunState) -> str:
    """That Slurm gave the nodes to another job, and what follows, where the run has not come back from that."""
    event = state.aegis.preempted
    if state.state in ("completed", "cancelled"):  # it came to its end, or a person ended it, in the grace time
        return ""
    if event is None:
        return "Slurm preempted the job and ended it; " if state.state == "preempted" else ""
    when = f"preempted at {show_time(float(event['preempt_time']))}"
    if not state.active:
        return f"{when}: Slurm ended the job; "
    if state.state in _WAITING:
        return f"{when}, starts again by itself; "
    return f"{when}: it saves, and {'goes back into the queue' if event['mode'] == 'requeue' else 'ends'}; "


def why(state: RunState) -> str:
    """Why it is in its state, where that is known."""
    if state.cause:
        return describe_cause(state.cause)
    if state.state in _WAITING and state.reason:
        return explain(state.reason)
    return state.reason or ""


def survived(state: RunState) -> str:
    """What an active run went through: how often it was started again in place, and the last root cause."""
    if not state.active or not (cause := state.aegis.last_cause):
        return ""
    times = state.aegis.restarts_in_place
    again = f"started again {'once' if times == 1 else f'{times} times'}; last cause " if times else "last cause "
    when = cause.get("time")
    ago = f"{show_duration(time.time() - float(when))} ago: " if when is not None else ""
    return f"{again}{ago}{describe_root(cause)}"


def describe_root(cause: Mapping[str, Any]) -> str:
    """A cause of Aegis in one line: with its kind where it is a fault that was noticed."""
    return describe_fault({**cause, "line": cause["message"]}) if cause.get("kind") else describe_cause(cause)


def _start(state: RunState) -> str:
    """When a waiting job is expected to start, where Slurm has planned it."""
    if state.expected_start is None:
        return ""
    ahead = state.expected_start - time.time()
    soon = f" (in {show_duration(ahead)})" if ahead > 0 else ""
    return f"; start expected {show_time(state.expected_start)}{soon}"


def _last_event(state: RunState) -> str:
    if state.last_event is None:
        return "-"
    kind = str(state.last_event.get("event", "?")).replace("_", " ")
    when = state.last_event.get("time")
    return kind if when is None else f"{kind} {show_duration(time.time() - float(when))} ago"


def stale_line(states: Sequence[RunState]) -> str | None:
    """What to say where Slurm did not answer: how old the states are, and why; None where it did."""
    old = [state.as_of for state in states if state.as_of is not None]
    if old:
        age = show_duration(time.time() - min(old))
        return f"the Slurm controller does not answer; what is shown is {age} old"
    unknown = [state for state in states if state.state == "unknown" and state.launcher == "slurm"]
    return unknown[0].reason if unknown else None


def as_row(state: RunState) -> list[str]:
    """One line of the table."""
    return [
        state.run.name,
        state.state,
        state.job_id or "-",
        str(state.attempt or "-"),
        f"{state.step or 0}/{state.total_steps or '?'}",
        f"{state.loss:.4f}" if state.loss is not None else "-",
        f"{state.evaluation_loss:.4f}" if state.evaluation_loss is not None else "-",
        show_count(state.tokens_per_s) if state.tokens_per_s is not None else "-",
        _mfu(state) or "-",
        _left(state),
        _last_event(state),
        note(state),
    ]


def as_json(state: RunState) -> dict[str, Any]:
    """Everything about a run; absent values are null."""
    return {
        "run": state.run.name,
        "run_dir": str(state.run.path),
        "state": state.state,
        "active": state.active,
        "job_id": state.job_id,
        "cluster": state.cluster,
        "launcher": state.launcher,
        "reason": state.reason,
        "reason_words": explain(state.reason) if state.state in _WAITING and state.reason else None,
        "expected_start": state.expected_start,
        "as_of": state.as_of,
        "successor": state.successor,
        "nodes": state.nodes,
        "restarts": state.restarts,
        "submitted": state.submitted,
        "attempt": state.attempt,
        "step": state.step,
        "total_steps": state.total_steps,
        "loss": state.loss,
        "tokens_per_s": state.tokens_per_s,
        "mfu": state.mfu,
        "evaluation_step": state.evaluation_step,
        "evaluation_loss": state.evaluation_loss,
        "checkpoint_step": state.checkpoint_step,
        "best_step": state.best_step,
        "exit_code": state.exit_code,
        "cause": state.cause,
        "last_event": state.last_event,
        "last_cause": state.aegis.last_cause,
        "last_decision": state.aegis.last_decision,
        "excluded": list(state.aegis.excluded),
        "restarts_in_place": state.aegis.restarts_in_place,
        "preempted": state.aegis.preempted,
    }


def orphan_as_json(job: JobRecord, run: RunDir) -> dict[str, Any]:
    """What Slurm knows of a job whose run directory is gone, under the keys of `as_json`."""
    return {
        "run": run.name,
        "run_dir": str(run.path),
        "run_dir_exists": False,
        "state": job.state.lower(),
        "active": job.state.is_active,
        "job_id": job.job_id,
        "nodes": job.nodes or None,
        "restarts": job.restarts,
    }


def details_as_json(state: RunState, excluded: str | None) -> dict[str, Any]:
    """One run in full: its attempts, checkpoints and excluded nodes too."""
    return as_json(state) | {
        "excluded_nodes": excluded,
        "checkpoints": checkpoint_steps(state.run),
        "attempts": list(_attempts(state)),
    }


def checkpoint_steps(run: RunDir) -> list[int]:
    """The steps of the checkpoints that lie in the run's directory and were committed."""
    found = {step_of(path.parent.name) for path in run.checkpoints.glob(f"*/{MANIFEST}")}
    return sorted(step for step in found if step is not None)


def details(state: RunState, excluded: str | None = None) -> Iterator[str]:
    """One run in full, line by line.

    Args:
        state: of the run.
        excluded: the nodes that its job must not use; None where that is not known.
    """
    job = f" (job {state.job_id} on {state.cluster})" if state.job_id else ""
    yield f"{state.run.name}: {state.state}{job}"
    if note(state):
        yield f"  {note(state)}"
    yield f"  directory   {state.run.path}"
    if state.submitted:
        yield f"  submitted   {show_time(state.submitted)}, {show_duration(time.time() - state.submitted)} ago"
    if state.nodes:
        yield f"  nodes       {state.nodes}"
    if excluded or state.aegis.excluded:
        yield f"  excluded    {_exclusions(state, excluded)}"
    if state.successor:
        yield f"  successor   job {state.successor} continues the run if this one ends early"
    if state.step is not None:
        loss = f", loss {state.loss:.4f}" if state.loss is not None else ""
        left = f", {_left(state)} left" if _left(state) != "-" else ""
        yield f"  step        {state.step} of {state.total_steps}{loss}{left}"
    if state.tokens_per_s is not None:
        mfu = f", MFU {_mfu(state)}" if _mfu(state) else ""
        yield f"  speed       {show_count(state.tokens_per_s)} tokens/s{mfu}"
    if state.evaluation_loss is not None:
        yield f"  held-out    loss {state.evaluation_loss:.4f} at step {state.evaluation_step}"
    if state.checkpoint_step is not None:
        best = f", the best: step {state.best_step}" if state.best_step is not None else ""
        kept = checkpoint_steps(state.run)
        listed = f"; kept: {', '.join(map(str, kept))}" if len(kept) > 1 else ""
        yield f"  checkpoint  step {state.checkpoint_step}{best}{listed}"
    yield from _aegis_lines(state)
    attempts = list(_attempts(state))
    if attempts:
        yield "  attempts"
        yield from map(_attempt_line, attempts)


def _exclusions(state: RunState, by_slurm: str | None) -> str:
    """The nodes that the run does not use: what Slurm excludes, and what the supervisor leaves out besides."""
    if by_slurm is None:
        return compress(state.aegis.excluded)
    own = sorted(set(state.aegis.excluded) - set(expand(by_slurm)))
    return f"{by_slurm}{'; ' if by_slurm else ''}by Aegis: {compress(own)}" if own else by_slurm


def _aegis_lines(state: RunState) -> Iterator[str]:
    """What went wrong last, and what was done about it."""
    aegis = state.aegis
    in_note = (state.cause or {}).get("message")
    if aegis.last_cause is not None and aegis.last_cause["message"] != in_note:
        yield f"  last cause  {_when(aegis.last_cause)}{describe_root(aegis.last_cause)}"
    if aegis.last_decision is not None:
        yield f"  decision    {_when(aegis.last_decision)}{describe(aegis.last_decision)}"
    if aegis.restarts_in_place:
        yield f"  restarts    {aegis.restarts_in_place} in place, {state.restarts} by Slurm"


def _when(event: Mapping[str, Any]) -> str:
    return f"{show_time(float(event['time']))}  " if event.get("time") is not None else ""


def _attempt_line(attempt: dict[str, Any]) -> str:
    when = show_time(attempt["started"]) if attempt["started"] else "?"
    cause = f": {describe_cause(attempt['cause'])}" if attempt["cause"] else ""
    end = f" (exit code {attempt['exit_code']}){cause}" if attempt["ended"] else f" on {attempt['nodes']}"
    return f"    {attempt['attempt']:>3}  {when}  {attempt['outcome']}{end}"


def _attempts(state: RunState) -> Iterator[dict[str, Any]]:
    """Every attempt with its nodes and its end; one that has none runs, or its end was not recorded."""
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
