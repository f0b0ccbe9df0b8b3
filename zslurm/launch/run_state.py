"""The state of a run: what Slurm (or the process table) says of its job, and what its own files say.

Slurm is asked once for all runs. Where it has forgotten a job (some minutes after its end, without accounting),
the verdict that the supervisor left decides; where there is none, the state says so instead of guessing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from train.jsonl import read_jsonl
from zslurm.errors import ZslurmError
from zslurm.launch.processes import ProcessRecord
from zslurm.launch.run_dir import RunDir, read_json
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.states import JobState

State = Literal[
    "pending",  # waits in the queue for its first start
    "requeued",  # waits in the queue after it ran before
    "held",
    "running",
    "suspended",
    "completing",
    "completed",
    "interrupted",  # saved and stopped, because it was asked to; submit again to continue
    "failed",
    "cancelled",
    "node-failed",
    "timeout",  # killed at the time limit
    "out-of-memory",
    "lost",  # ended without a verdict, and nobody knows how
    "unknown",  # Slurm does not answer
    "prepared",  # never accepted by a launcher
]
ACTIVE: frozenset[State] = frozenset({"pending", "requeued", "held", "running", "suspended", "completing"})


@dataclass(frozen=True)
class RunState:
    """Everything that can be said of a run now."""

    run: RunDir
    state: State
    job_id: str | None = None
    cluster: str | None = None
    launcher: str | None = None
    reason: str | None = None
    nodes: str | None = None
    restarts: int = 0
    submitted: float | None = None
    attempt: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = None
    checkpoint_step: int | None = None
    exit_code: int | None = None
    cause: dict[str, Any] | None = None

    @property
    def active(self) -> bool:
        """True while the run has a job that runs or may yet run; also while that cannot be found out."""
        return self.state in ACTIVE or self.state == "unknown"


_SLURM_STATES: dict[JobState, State] = {
    JobState.SUSPENDED: "suspended",
    JobState.CANCELLED: "cancelled",
    JobState.NODE_FAIL: "node-failed",
    JobState.BOOT_FAIL: "node-failed",
    JobState.TIMEOUT: "timeout",
    JobState.DEADLINE: "timeout",
    JobState.PREEMPTED: "interrupted",
    JobState.OUT_OF_MEMORY: "out-of-memory",
}


@dataclass(frozen=True)
class _Job:
    """The last submission of a run, from its own files."""

    job_id: str
    launcher: str
    cluster: str
    time: float
    cancelled: bool
    process: ProcessRecord | None


def last_job(run: RunDir) -> _Job | None:
    """The newest job of a run; None where it was never submitted."""
    job: _Job | None = None
    for row in read_jsonl(run.submissions):
        if row.get("action") == "cancel":
            if job is not None and job.job_id == row["job_id"]:
                job = _Job(job.job_id, job.launcher, job.cluster, job.time, True, job.process)
        elif row.get("action") == "submit":
            process = ProcessRecord(row["pid"], row["created"], row["host"]) if "pid" in row else None
            job = _Job(row["job_id"], row["launcher"], row["cluster"], row["time"], False, process)
        elif job is not None:  # a requeue takes an earlier cancel back
            job = _Job(job.job_id, job.launcher, job.cluster, job.time, False, job.process)
    return job


def look(run: RunDir) -> RunState:
    """The state of one run."""
    return look_all([run])[0]


def look_all(runs: Sequence[RunDir]) -> list[RunState]:
    """The states of many runs, with one question to Slurm."""
    jobs = [last_job(run) for run in runs]
    on_slurm = [job.job_id for job in jobs if job is not None and job.launcher == "slurm"]
    records, problem = _ask_slurm(on_slurm) if on_slurm else ({}, None)
    return [_state(run, job, records, problem) for run, job in zip(runs, jobs, strict=True)]


def _ask_slurm(job_ids: list[str]) -> tuple[dict[str, JobRecord], str | None]:
    client = SlurmClient()
    try:
        records = client.queue(job_ids)
        forgotten = [job_id for job_id in job_ids if job_id not in records]
        for job_id, runs in client.history(forgotten).items():
            records[job_id] = runs[-1]
    except ZslurmError as error:
        return {}, str(error)
    return records, None


def _state(run: RunDir, job: _Job | None, records: dict[str, JobRecord], problem: str | None) -> RunState:
    if job is None:
        return RunState(run, "prepared")
    events = [event for event in read_jsonl(run.events) if event.get("job_id") == job.job_id]
    verdict = _last_verdict(events)
    record = records.get(job.job_id)
    nodes, restarts, reason = None, 0, None
    state: State
    if job.launcher == "local":
        state, reason = _local_state(run, job, verdict)
    elif record is not None:
        state, reason = _slurm_state(job, record, verdict)
        nodes, restarts = record.nodes or None, record.restarts
    elif problem is not None:
        state, reason = "unknown", problem
    else:
        state, reason = _forgotten_state(job, verdict)
    ended = verdict if state not in ACTIVE else None
    cause = ended.get("cause") if ended else None
    return RunState(
        run,
        state,
        job.job_id,
        job.cluster,
        job.launcher,
        reason,
        nodes or _nodes_of(run),
        restarts,
        job.time,
        exit_code=ended.get("exit_code") if ended else None,
        cause=cause,
        **_progress(run),
    )


def _last_verdict(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """How the job ended, or its last attempt where no later one was started."""
    verdict: dict[str, Any] | None = None
    for event in events:
        if event["event"] in ("attempt_ended", "run_ended"):
            verdict = event
        elif event["event"] == "attempt_started":
            verdict = None
    return verdict


def _from_verdict(job: _Job, verdict: dict[str, Any]) -> State:
    outcome = verdict["outcome"]
    if outcome == "interrupted" and job.cancelled:
        return "cancelled"
    known: dict[str, State] = {"completed": "completed", "interrupted": "interrupted", "failed": "failed"}
    return known.get(outcome, "lost")


def _local_state(run: RunDir, job: _Job, verdict: dict[str, Any] | None) -> tuple[State, str | None]:
    if job.process is not None and not job.process.here and verdict is None:
        return "unknown", f"it was started on {job.process.host}: ask there"
    if any(process.alive for process in _local_processes(run, job)):
        return ("completing" if verdict else "running"), None
    return _forgotten_state(job, verdict)


def _local_processes(run: RunDir, job: _Job) -> list[ProcessRecord]:
    """What holds a local run, its supervisor, and its step: any of them may outlive the others."""
    attempts = run.attempt_dirs()
    step = ProcessRecord.read(attempts[-1].step_process) if attempts else None
    return [found for found in (job.process, ProcessRecord.read(run.supervisor), step) if found is not None]


def _forgotten_state(job: _Job, verdict: dict[str, Any] | None) -> tuple[State, str | None]:
    if verdict is not None:
        return _from_verdict(job, verdict), None
    if job.cancelled:
        return "cancelled", None
    return "lost", f"job {job.job_id} is gone and left no verdict; see `zslurm logs --supervisor`"


def _slurm_state(job: _Job, record: JobRecord, verdict: dict[str, Any] | None) -> tuple[State, str | None]:
    reason, state = record.reason or None, record.state
    if state.is_waiting:
        if state is JobState.REQUEUE_HOLD or "held" in record.reason.lower():
            return "held", reason
        return ("requeued" if record.restarts or state is not JobState.PENDING else "pending"), reason
    if state.is_on_nodes:
        known: dict[JobState, State] = {
            JobState.COMPLETING: "completing",
            JobState.SUSPENDED: "suspended",
            JobState.STOPPED: "suspended",
        }
        return known.get(state, "running"), None
    if state in (JobState.COMPLETED, JobState.FAILED) and verdict is not None:
        return _from_verdict(job, verdict), None
    if state is JobState.COMPLETED:
        return "completed", None
    return _SLURM_STATES.get(state, "failed" if state.is_over else "unknown"), reason


def _nodes_of(run: RunDir) -> str | None:
    attempts = run.attempt_dirs()
    described = read_json(attempts[-1].description) if attempts else None
    return described.get("nodes") if described else None


def _progress(run: RunDir) -> dict[str, Any]:
    """How far the run is: from its metrics and its configuration."""
    config = read_json(run.config) or {}
    step: dict[str, Any] = {}
    checkpoint: int | None = None
    for row in read_jsonl(run.metrics):
        if row.get("kind") == "step":
            step = row
        elif row.get("kind") == "checkpoint" and row.get("state") == "COMMITTED":
            checkpoint = row["step"]
    attempts = run.attempt_dirs()
    return {
        "attempt": attempts[-1].number if attempts else None,
        "step": step.get("step"),
        "total_steps": _total_steps(config),
        "loss": step.get("loss"),
        "tokens_per_s": step.get("tokens_per_s"),
        "step_time_s": step.get("step_time_s"),
        "checkpoint_step": checkpoint,
    }


def _total_steps(config: dict[str, Any]) -> int | None:
    """As PhaseConfig.steps, without loading pydantic for each of many runs."""
    try:
        batches = [(phase["tokens"], phase["global_batch"] * phase["context"]) for phase in config["phases"]]
        steps: int = sum(math.ceil(tokens / step_tokens) for tokens, step_tokens in batches)
        return steps
    except (KeyError, TypeError):
        return None
