"""`zslurm status`: runs as rows, one run in full, and both as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from train.jsonl import read_jsonl
from zslurm.launch.run_state import RunState
from zslurm.report.values import show_count, show_duration, show_time

COLUMNS = ("run", "state", "job", "attempt", "step", "loss", "tokens/s", "left", "note")


def _left(state: RunState) -> str:
    if state.state != "running" or not state.step or not state.total_steps or not state.step_time_s:
        return "-"
    return show_duration((state.total_steps - state.step) * state.step_time_s)


def _note(state: RunState) -> str:
    if state.cause:
        return describe_cause(state.cause)
    if state.reason:
        return state.reason
    if state.state == "interrupted":
        return f"saved at step {state.checkpoint_step}; submit again to continue"
    return ""


def describe_cause(cause: dict[str, Any]) -> str:
    """The root of a failure in one line: who, when, what."""
    where = [f"rank {cause['rank']}" if cause.get("rank") is not None else ""]
    where.append(f"on {cause['node']}" if cause.get("node") else "")
    where.append(f"after step {cause['step']}" if cause.get("step", -1) > 0 else "")
    place = " ".join(word for word in where if word)
    return f"{place}: {cause['message']}" if place else str(cause["message"])


def as_row(state: RunState) -> list[str]:
    """One line of the table."""
    return [
        state.run.name,
        state.state,
        state.job_id or "-",
        str(state.attempt or "-"),
        f"{state.step or 0}/{state.total_steps or '?'}",
        f"{state.loss:.4f}" if state.loss is not None else "-",
        show_count(state.tokens_per_s) if state.tokens_per_s is not None else "-",
        _left(state),
        _note(state),
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
        "nodes": state.nodes,
        "restarts": state.restarts,
        "submitted": state.submitted,
        "attempt": state.attempt,
        "step": state.step,
        "total_steps": state.total_steps,
        "loss": state.loss,
        "tokens_per_s": state.tokens_per_s,
        "checkpoint_step": state.checkpoint_step,
        "exit_code": state.exit_code,
        "cause": state.cause,
    }


def details(state: RunState) -> Iterator[str]:
    """One run in full, line by line."""
    job = f" (job {state.job_id} on {state.cluster})" if state.job_id else ""
    yield f"{state.run.name}: {state.state}{job}"
    if _note(state):
        yield f"  {_note(state)}"
    yield f"  directory   {state.run.path}"
    if state.submitted:
        yield f"  submitted   {show_time(state.submitted)}, {show_duration(time.time() - state.submitted)} ago"
    if state.nodes:
        yield f"  nodes       {state.nodes}"
    if state.step is not None:
        loss = f", loss {state.loss:.4f}" if state.loss is not None else ""
        left = f", {_left(state)} left" if _left(state) != "-" else ""
        yield f"  step        {state.step} of {state.total_steps}{loss}{left}"
    if state.checkpoint_step is not None:
        yield f"  checkpoint  step {state.checkpoint_step}"
    attempts = list(_attempts(state))
    if attempts:
        yield "  attempts"
        yield from attempts


def _attempts(state: RunState) -> Iterator[str]:
    started: dict[int, dict[str, Any]] = {}
    for event in read_jsonl(state.run.events):
        if event.get("event") == "attempt_started":
            started[event["attempt"]] = event
        elif event.get("event") == "attempt_ended":
            begin = started.pop(event["attempt"], None)
            when = show_time(begin["time"]) if begin else "?"
            cause = event.get("cause")
            why = f": {describe_cause(cause)}" if cause else ""
            yield f"    {event['attempt']:>3}  {when}  {event['outcome']} (exit code {event['exit_code']}){why}"
    for number, begin in started.items():
        word = "running" if state.state == "running" else "no end recorded"
        yield f"    {number:>3}  {show_time(begin['time'])}  {word} on {begin['nodes']}"
