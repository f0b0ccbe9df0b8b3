"""Runs as rows of a table and as JSON; what a row notes besides figures."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zslurm.checkpoint_tools.quantities import show_count, show_duration
from zslurm.cli.terminal.table import Column
from zslurm.core.units import show_time
from zslurm.run.events import FaultDetected
from zslurm.run.events.event import from_row
from zslurm.run.events.event_text import describe_cause, describe_fault
from zslurm.run.metrics.tail import newest_steps
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.reasons import explain

COLUMNS = (
    Column("run"),
    Column("state", "state"),
    Column("job", drop=5),
    Column("attempt", drop=6),
    Column("step", drop=1),
    Column("loss", drop=3),
    Column("validation", drop=7),
    Column("tokens/s", drop=4),
    Column("MFU", drop=8),
    Column("left", drop=2),
    Column("last event", drop=9),
    Column("note", "below"),
)

_WAITING = ("pending", "requeued", "held")


_FAILED = ("failed", "lost", "timeout", "node-failed", "out-of-memory")
_RECENT_S = 3 * 86400.0


def waits_for_person(state: RunState) -> bool:
    """Return whether nothing happens to a run until a person acts: it failed, is held, or cannot start ranks.

    A start that is postponed until Slurm answers, or processes have died, comes by itself.
    """
    if state.state == "held":
        return True
    if _without_ranks(state) and (state.aegis.postponed or {}).get("needs_person"):
        return True
    ended = float((state.last_event or {}).get("time") or state.submitted or 0.0)
    return state.state in _FAILED and time.time() - ended < _RECENT_S


def _without_ranks(state: RunState) -> str:
    """Return why a job that runs cannot start ranks; empty if it does not wait."""
    event = state.aegis.postponed
    if state.state != "running" or event is None:
        return ""
    return f"no ranks run: {event.get('reason') or 'their start is postponed'}"


def as_row(state: RunState) -> list[str]:
    """Return one line of the table."""
    return [
        state.run.name,
        state.state,
        state.job_id or "-",
        str(state.attempt or "-"),
        "-" if state.not_shown and state.step is None else f"{state.step or 0}/{state.total_steps or '?'}",
        f"{state.loss:.4f}" if state.loss is not None else "-",
        f"{state.evaluation_loss:.4f}" if state.evaluation_loss is not None else "-",
        show_count(state.tokens_per_s) if state.tokens_per_s is not None else "-",
        show_mfu(state) or "-",
        time_left(state) or "-",
        _last_event(state),
        note(state),
    ]


def as_json(state: RunState) -> dict[str, Any]:
    """Return everything about a run; absent values are null."""
    facts = {name: value for name, value in vars(state).items() if name not in ("run", "step_time_s", "aegis")}
    waits = state.state in _WAITING and state.reason
    return {
        "run": state.run.name,
        "run_dir": str(state.run.path),
        **facts,
        "active": state.active,
        "reason_words": explain(state.reason or "") if waits else None,
        **vars(state.aegis),
        "excluded": list(state.aegis.excluded),
        "helpers": list(state.aegis.helpers),
    }


def orphan_as_json(job: JobRecord, run: RunDir) -> dict[str, Any]:
    """Return what Slurm knows of a job whose run directory is gone, under the keys of `as_json`."""
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


def stale_line(states: Sequence[RunState]) -> str | None:
    """Return how old the states are if Slurm did not answer, and why; None if it did."""
    old = [state.as_of for state in states if state.as_of is not None]
    if old:
        age = show_duration(time.time() - min(old))
        return f"the Slurm controller does not answer; what is shown is {age} old"
    unknown = [state for state in states if state.state == "unknown" and state.launcher == "slurm"]
    return unknown[0].reason if unknown else None


def time_left(state: RunState) -> str:
    """Return how long a running run will still take; empty if that is not known."""
    if state.state != "running" or not state.step or not state.total_steps or not state.step_time_s:
        return ""
    return show_duration((state.total_steps - state.step) * state.step_time_s)


def show_mfu(state: RunState) -> str:
    """Return the MFU in percent; empty if unknown."""
    return f"{100 * state.mfu:.1f} %" if state.mfu is not None else ""


def note(state: RunState) -> str:
    """Return what a run's figures do not show: why it failed, or why it waits and until when."""
    if postponed := _without_ranks(state):
        return postponed
    if state.state in _WAITING and state.reason:
        return _preempted(state) + why(state) + _start(state) + _after_fault(state)
    if state.state == "preempted":
        return _preempted(state) + saved(state)
    if not state.cause and not state.reason and state.state == "interrupted":
        return saved(state)
    return (
        (_preempted(state) + why(state)).removesuffix("; ") or _fault_without_progress(state) or _survived(state)
    )


def _fault_without_progress(state: RunState) -> str:
    """Return the fault that is the newest event of a run that runs and has finished no step since."""
    event = from_row(state.last_event or {})
    if state.state != "running" or not isinstance(event, FaultDetected):
        return ""
    if event.role != "root" or event.cleared:
        return ""
    if any(float(step.get("time") or 0.0) > event.time for step in newest_steps(state.run.metrics, 1)):
        return ""
    return f"fault {show_duration(time.time() - event.time)} ago, no step since: {describe_fault(event.row)}"


def _after_fault(state: RunState) -> str:
    """Note why a job that waits was requeued, if a fault of its last attempt was the reason."""
    cause, decision = state.aegis.last_cause, state.aegis.last_decision or {}
    requeued = decision.get("action") == "requeue" and state.aegis.preempted is None
    if not cause or not requeued or cause.get("attempt") not in (None, state.attempt):
        return ""
    return f"; requeued after: {describe_root(cause)}"


def saved(state: RunState) -> str:
    """Return the last save of a stopped run, and how to continue it."""
    where = f"saved at step {state.checkpoint_step}; " if state.checkpoint_step is not None else ""
    return f"{where}submit again to continue"


def _preempted(state: RunState) -> str:
    """Note that Slurm gave the nodes to another job, and what follows, until the run has come back from that."""
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
    """Return why a run is in its state, if that is known."""
    if state.cause:
        return describe_cause(state.cause)
    if state.state == "requeued" and state.reason == "BeginTime":
        return (
            "BeginTime: Slurm lets a requeued job wait, for two minutes by default; "
            f"`zslurm requeue {state.run.name} --now` starts it at once"
        )
    if state.state in _WAITING and state.reason:
        return explain(state.reason)
    return state.reason or ""


def _survived(state: RunState) -> str:
    """Note how often an active run was started again in place, and the last root cause."""
    if not state.active or not (cause := state.aegis.last_cause):
        return ""
    times = state.aegis.restarts_in_place
    again = f"started again {'once' if times == 1 else f'{times} times'}; last cause " if times else "last cause "
    when = cause.get("time")
    ago = f"{show_duration(time.time() - float(when))} ago: " if when is not None else ""
    return f"{again}{ago}{describe_root(cause)}"


def describe_root(cause: Mapping[str, Any]) -> str:
    """Describe a cause of Aegis in one line: with its kind if it is a fault that was noticed."""
    return describe_fault({**cause, "line": cause["message"]}) if cause.get("kind") else describe_cause(cause)


def _start(state: RunState) -> str:
    """Note when a waiting job is expected to start, if Slurm has planned it."""
    if state.expected_start is None:
        return ""
    ahead = state.expected_start - time.time()
    soon = f" (in {show_duration(ahead)})" if ahead > 0 else ""
    return f"; start expected {show_time(state.expected_start)}{soon}"


def _last_event(state: RunState) -> str:
    if state.last_event is None:
        return "-"
    kind = from_row(state.last_event).tag.replace("_", " ")
    when = state.last_event.get("time")
    return kind if when is None else f"{kind} {show_duration(time.time() - float(when))} ago"


def notify_overdue(states: Iterable[RunState]) -> list[str]:
    """Notify once of each run that waits in Slurm's queue for too long; return a line for each problem."""
    waiting = {
        state.run: state.job_id
        for state in states
        if state.state in ("pending", "requeued") and state.launcher == "slurm" and state.job_id is not None
    }
    if not waiting:
        return []
    from zslurm.submit.overdue import notify_all_overdue  # hooks take longer to import than `status` takes to run

    return notify_all_overdue(waiting)


def release_held(states: Iterable[RunState]) -> list[str]:
    """Release jobs that a node could not start, without that node; return a line for each that Slurm held."""
    if not (held := [state for state in states if state.state == "held" and state.launcher == "slurm"]):
        return []
    from zslurm.submit.held_launch import release_failed_launches  # as above

    return release_failed_launches(held)
