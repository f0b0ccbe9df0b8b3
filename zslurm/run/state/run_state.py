"""The state of a run: what Slurm (or the process table) reports of its job, and what its own files hold.

Slurm is asked once for all runs. If it has forgotten a job (some minutes after its end, without accounting),
the outcome that the supervisor recorded decides; if there is none, the state is `lost` instead of a guess.
If Slurm does not answer, a state may be as old as `RunState.as_of`, or unknown.
"""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from zslurm.core.errors import ZslurmError
from zslurm.core.files import read_json
from zslurm.core.processes import ProcessRecord
from zslurm.run.events import (
    AttemptStarted,
    Cancelled,
    Decided,
    Ended,
    Readmitted,
    RequeuedByUser,
    Submitted,
    SuccessorSubmitted,
)
from zslurm.run.events.event import Event, from_row
from zslurm.run.events.event_text import node_names
from zslurm.run.identity import original_of
from zslurm.run.metrics.tail import newest_rows
from zslurm.run.program_signals import not_shown
from zslurm.run.run_dir import RunDir
from zslurm.run.state.state_events import IN_PLACE, AegisView, aegis_view, read_state_events
from zslurm.slurm import queue_view
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.queue_view import QueueView
from zslurm.slurm.states import JobState
from zslurm.train.jsonl import read_jsonl
from zslurm.train.sections.segments import Segment, segments_of

State = Literal[
    "pending",  # waits in the queue for its first start
    "requeued",  # waits in the queue after it ran before
    "held",
    "running",
    "stopping",  # was cancelled, and saves and stops
    "suspended",
    "completing",
    "completed",
    "interrupted",  # saved and stopped, because it was asked to; submit again to continue
    "preempted",  # saved and stopped, and Slurm ended the job for another one; submit again to continue
    "failed",
    "cancelled",
    "node-failed",
    "timeout",  # killed at the time limit
    "out-of-memory",
    "lost",  # ended without a record of how
    "unknown",  # Slurm does not answer
    "prepared",  # never accepted by a launcher
    "copied",  # a copy of a run: the job in its files is the original's
]
STATES: tuple[State, ...] = get_args(State)
ACTIVE: frozenset[State] = frozenset(
    {"pending", "requeued", "held", "running", "stopping", "suspended", "completing"}
)


@dataclass(frozen=True)
class RunState:
    """Everything that is known of a run now."""

    run: RunDir
    state: State
    job_id: str | None = None
    cluster: str | None = None
    launcher: str | None = None
    reason: str | None = None
    expected_start: float | None = None
    """When Slurm means to start a job that waits (UNIX seconds), if it has planned that."""
    as_of: float | None = None
    """When Slurm reported it, if it does not answer now; None if it did."""
    nodes: str | None = None
    restarts: int = 0
    submitted: float | None = None
    attempt: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    step_time_s: float | None = None
    evaluation_step: int | None = None
    evaluation_loss: float | None = None
    sources: Mapping[str, Any] = field(default_factory=dict)
    """Tokens and epochs of each source of the data, as metrics.jsonl has them."""
    checkpoint_step: int | None = None
    best_step: int | None = None
    exit_code: int | None = None
    cause: dict[str, Any] | None = None
    successor: str | None = None
    """The job that waits for the end of this one."""
    not_shown: tuple[str, ...] = ()
    """What the program of a run does not show of its progress; empty for zslurm's own trainer."""
    last_event: dict[str, Any] | None = None
    """The newest row of the run's events."""
    damaged_events: int = 0
    """Lines of the run's events that cannot be read."""
    aegis: AegisView = field(default_factory=AegisView)
    """What the supervisor noticed and did in this job."""

    @property
    def active(self) -> bool:
        """True while the run has a job that runs or may yet run; also while that cannot be found out."""
        return self.state in ACTIVE or self.state == "unknown"

    @property
    def present_cause(self) -> dict[str, Any]:
        """Why the run ended; empty if a person ended it, or only faults are known that were repaired."""
        if self.state == "cancelled":
            return {}
        last = self.aegis.last_cause
        present = last is not None and last.get("attempt") in (None, self.attempt)
        return self.cause or (last if last is not None and present else {})


_SLURM_STATES: dict[JobState, State] = {
    JobState.SUSPENDED: "suspended",
    JobState.CANCELLED: "cancelled",
    JobState.NODE_FAIL: "node-failed",
    JobState.BOOT_FAIL: "node-failed",
    JobState.TIMEOUT: "timeout",
    JobState.DEADLINE: "timeout",
    JobState.PREEMPTED: "preempted",
    JobState.OUT_OF_MEMORY: "out-of-memory",
}


_REASONS_TO_WAIT = {"BeginTime", "Priority", "Resources", "JobHeldUser"}
"""Why a job waits, which is never why it was cancelled."""


@dataclass(frozen=True)
class _Job:
    """The last submission of a run, from its own files."""

    job_id: str
    launcher: str
    cluster: str
    user: str
    time: float
    process: ProcessRecord | None
    cancelled: bool = False
    successor: str | None = None
    """The job that waits for the end of this one, to continue the run (job/successor.py)."""
    acted: float = 0.0
    """When a user last did something to it."""
    readmitted: Mapping[str, float] = field(default_factory=dict)
    """Excluded nodes that a user allowed again, and when."""
    original: Path | None = None
    """The directory that the job works in, if the run is a copy of that."""


_SUBMISSION = {"action", "job_id", "launcher", "cluster", "time"}
"""What every row of submissions.jsonl has."""


def last_job(run: RunDir) -> _Job | None:
    """Return the newest job of a run; None if it was never submitted, and if the job belongs to its original."""
    job = recorded_job(run)
    return job if job is not None and job.original is None else None


def recorded_job(run: RunDir) -> _Job | None:
    """Return the newest job in the files of a run, also if it belongs to the run which it is a copy of."""
    job: _Job | None = None
    submission: dict[str, Any] = {}
    readmitted: dict[str, float] = {}
    for row in read_jsonl(run.submissions):
        if not row.keys() >= _SUBMISSION:
            continue  # damaged
        event = from_row(row)
        if isinstance(event, Readmitted):
            readmitted |= dict.fromkeys(node_names(event.nodes), event.time)
        if isinstance(event, Submitted):
            process = ProcessRecord.of_fields(row)
            user = event.user or getpass.getuser()
            job = _Job(event.job_id, row["launcher"], row["cluster"], user, event.time, process)
            submission = row
        elif job is None or event.job_id not in (job.job_id, job.successor):
            continue
        elif isinstance(event, SuccessorSubmitted):
            job = replace(job, successor=event.successor)
        elif isinstance(event, Cancelled | RequeuedByUser):  # a requeue takes an earlier cancel back
            job = replace(job, cancelled=isinstance(event, Cancelled))
        job = replace(job, acted=event.time, readmitted=dict(readmitted))
    return job if job is None else replace(job, original=original_of(run, submission))


def look(run: RunDir) -> RunState:
    """Return the state of one run."""
    return look_all([run])[0]


def look_all(runs: Sequence[RunDir], *, cached: bool = False) -> list[RunState]:
    """Return the states of many runs, with one question to Slurm.

    With `cached`, for what is shown to a person, an answer that Slurm gave some seconds ago will do, or an older
    one if it does not answer. What decides something asks again.
    """
    jobs = [recorded_job(run) for run in runs]
    on_slurm = [job for job in jobs if job is not None and job.original is None and job.launcher == "slurm"]
    if not on_slurm:
        seen = QueueView()
    elif cached:
        users = {getpass.getuser(), *(job.user for job in on_slurm)}
        acted = max(job.acted for job in on_slurm)
        seen = queue_view.view(_job_ids(on_slurm), users, not_before=acted)
    else:
        seen = ask_slurm(_job_ids(on_slurm))
    return [_state(run, job, seen) for run, job in zip(runs, jobs, strict=True)]


def _job_ids(jobs: Sequence[_Job]) -> list[str]:
    return [job_id for job in jobs for job_id in (job.job_id, job.successor) if job_id is not None]


def ask_slurm(job_ids: list[str]) -> QueueView:
    """Return what one squeue call shows of these jobs, or the problem with it."""
    client = SlurmClient()
    try:
        records = client.queue(job_ids)
        forgotten = [job_id for job_id in job_ids if job_id not in records]
        for job_id, runs in client.history(forgotten).items():
            records[job_id] = runs[-1]
    except ZslurmError as error:
        return QueueView(problem=str(error))
    return QueueView(records)


def _state(run: RunDir, job: _Job | None, seen: QueueView) -> RunState:
    if job is None:
        return RunState(run, "prepared")
    events = read_state_events(run.events)
    if job.original is not None:
        why = f"a copy of {job.original}; submit it under its own name to continue it from its checkpoints"
        return RunState(run, "copied", reason=why, last_event=events.newest, **_progress(run))
    job = _present_job(job, events.events, seen)
    end = _end_of(job.job_id, events.events)
    record = seen.jobs.get(job.job_id)
    nodes, restarts, reason, expected, as_of = None, 0, None, None, None
    state: State
    if job.launcher == "local":
        state, reason = _local_state(run, job, end)
    elif record is not None:
        state, reason = _slurm_state(job, record, end)
        nodes, restarts = record.nodes or None, record.restarts
        if record.state.is_waiting and record.start_time is not None:
            expected = record.start_time.timestamp()
        as_of = seen.asked if seen.problem else None
    elif (problem := seen.problem or seen.no_history) is not None:
        state, reason = _unanswered_state(job, end, problem)
    else:
        state, reason = _forgotten_state(job, end)
    if state == "running" and job.cancelled:
        state = "stopping"
    aegis = aegis_view(events.events, job.job_id, readmitted=job.readmitted)
    if state == "interrupted" and aegis.preempted is not None:
        state = "preempted"
    ended = end if state not in ACTIVE else None
    return RunState(
        run,
        state,
        job.job_id,
        job.cluster,
        job.launcher,
        reason,
        expected,
        as_of,
        nodes or _nodes_of(run),
        restarts,
        job.time,
        exit_code=ended.exit_code if ended else None,
        cause=ended.cause if ended else None,
        successor=job.successor if state in ACTIVE else None,
        last_event=events.newest,
        damaged_events=events.damaged,
        aegis=aegis,
        **_progress(run),
    )


def is_settled(job: _Job, events: Sequence[Event]) -> bool:
    """Return whether the run came to its end in this job, so that no successor has to continue it."""
    end = _end_of(job.job_id, events)
    return job.cancelled or (end is not None and end.outcome in ("completed", "failed"))


def _present_job(job: _Job, events: Sequence[Event], seen: QueueView) -> _Job:
    """Return the job that the run depends on now: the submitted one, or its successor if that took its place."""
    if job.successor is None or is_settled(job, events):
        return job
    first, second = seen.jobs.get(job.job_id), seen.jobs.get(job.successor)
    if (first is not None and first.state.is_active) or (first is None and seen.problem is not None):
        return job
    if second is None and not any(event.job_id == job.successor for event in events):
        return job
    return replace(job, job_id=job.successor, successor=None)


def _end_of(job_id: str, events: Sequence[Event]) -> Ended | None:
    return _last_end([event for event in events if event.job_id == job_id])


def _last_end(events: Sequence[Event]) -> Ended | None:
    """Return how the job ended, or its last attempt if no later one was started."""
    end: Ended | None = None
    for event in events:
        if isinstance(event, Ended):
            end = event
        elif isinstance(event, AttemptStarted) or _is_followed(event):
            end = None
    return end


def _is_followed(event: Event) -> bool:
    """Return whether a decision lets the run continue after the end of an attempt."""
    return isinstance(event, Decided) and event.acted and event.action in (*IN_PLACE, "requeue")


def _state_at_end(job: _Job, end: Ended) -> State:
    outcome = end.outcome
    if outcome == "interrupted" and job.cancelled:
        return "cancelled"
    states: dict[str, State] = {"completed": "completed", "interrupted": "interrupted", "failed": "failed"}
    return states.get(outcome, "lost")


def _local_state(run: RunDir, job: _Job, end: Ended | None) -> tuple[State, str | None]:
    if job.process is not None and not job.process.here and end is None:
        return "unknown", f"it was started on {job.process.host}: ask there"
    if any(process.alive for process in _local_processes(run, job)):
        return ("completing" if end else "running"), None
    return _forgotten_state(job, end)


def _local_processes(run: RunDir, job: _Job) -> list[ProcessRecord]:
    """Return what holds a local run, its supervisor, and its step: any of them may outlive the others."""
    attempts = run.attempt_dirs()
    step = ProcessRecord.read(attempts[-1].step_process) if attempts else None
    return [process for process in (job.process, ProcessRecord.read(run.supervisor), step) if process is not None]


def _forgotten_state(job: _Job, end: Ended | None) -> tuple[State, str | None]:
    if end is not None:
        return _state_at_end(job, end), None
    if job.cancelled:
        return "cancelled", None
    return "lost", f"job {job.job_id} is gone and did not record its outcome; see `zslurm logs --supervisor`"


def _unanswered_state(job: _Job, end: Ended | None, problem: str) -> tuple[State, str | None]:
    """Return the state without an answer of Slurm: known if the run ended for good and was not touched since."""
    if end is not None and end.outcome in ("completed", "failed") and end.time > job.acted:
        return _state_at_end(job, end), None
    return "unknown", problem


def _slurm_state(job: _Job, record: JobRecord, end: Ended | None) -> tuple[State, str | None]:
    reason, state = record.reason or None, record.state
    if state.is_waiting:
        if state is JobState.REQUEUE_HOLD or "held" in record.reason.lower():
            return "held", reason
        return ("requeued" if record.restarts or state is not JobState.PENDING else "pending"), reason
    if state.is_on_nodes:
        states: dict[JobState, State] = {
            JobState.COMPLETING: "completing",
            JobState.SUSPENDED: "suspended",
            JobState.STOPPED: "suspended",
        }
        return states.get(state, "running"), None
    if state in (JobState.COMPLETED, JobState.FAILED) and end is not None:
        return _state_at_end(job, end), None
    if state is JobState.COMPLETED:
        return "completed", None
    if state is JobState.CANCELLED and reason in _REASONS_TO_WAIT:  # Slurm leaves it with the job
        return "cancelled", None
    return _SLURM_STATES.get(state, "failed" if state.is_over else "unknown"), reason


def _nodes_of(run: RunDir) -> str | None:
    attempts = run.attempt_dirs()
    described = read_json(attempts[-1].description) if attempts else None
    nodes = described.get("nodes") if described else None
    return nodes if isinstance(nodes, str) else None


def _progress(run: RunDir) -> dict[str, Any]:
    """Return how far the run is: from its metrics and its configuration."""
    config = read_json(run.config) or {}
    rows = newest_rows(run.metrics)
    attempts = run.attempt_dirs()
    step, saved = rows.step.get("step"), rows.checkpoint.get("step")
    sources = rows.sources.get("sources")
    return {
        "attempt": attempts[-1].number if attempts else None,
        "step": step,
        "total_steps": total_steps(config),
        "loss": rows.step.get("loss"),
        "tokens_per_s": rows.step.get("tokens_per_s"),
        "mfu": rows.step.get("mfu"),
        "step_time_s": rows.step_time_s,
        "evaluation_step": rows.evaluation.get("step"),
        "evaluation_loss": rows.evaluation.get("loss"),
        "sources": sources if isinstance(sources, dict) else {},
        "checkpoint_step": saved,
        "not_shown": not_shown(config, step=step, checkpoint_step=saved) if attempts else (),
        "best_step": rows.checkpoint.get("best_step"),
    }


def total_steps(config: dict[str, Any]) -> int | None:
    """As PhaseConfig.steps, without loading pydantic for each of many runs; of a program trainer.steps."""
    try:
        if (trainer := config.get("trainer")) is not None:
            return int(trainer["steps"]) if trainer.get("steps") else None
        return sum(segment.steps for phase in config["phases"] for segment in _segments(phase))
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError):  # a damaged config.json
        return None


def _segments(phase: dict[str, Any]) -> tuple[Segment, ...]:
    ramp = [(segment["until_tokens"], segment["global_batch"]) for segment in phase.get("batch_ramp", ())]
    return segments_of(phase["tokens"], phase["context"], phase["global_batch"], ramp)
