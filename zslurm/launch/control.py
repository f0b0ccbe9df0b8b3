"""Cancel and requeue: through Slurm for its jobs, through signals for local ones."""

from __future__ import annotations

import signal
import time

from zslurm.config.load import load_spec
from zslurm.errors import NotFound, RunActive, ZslurmError
from zslurm.launch.processes import DetachedProcess, ProcessRecord
from zslurm.launch.run_dir import RunDir
from zslurm.launch.run_state import last_job, look
from zslurm.launch.submission import record_action, submit
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.states import JobState

_POLL_S = 0.2
# A start in the very second in which the job's earlier run ended on a node fails there ("Job credential revoked").
RESTART_AFTER_S = 5


def cancel(run: RunDir, *, wait: bool = False) -> str | None:
    """Ask the run's job to save and stop; returns its id, None where nothing is active.

    Args:
        wait: return when the job is over.

    Raises:
        SlurmUnavailable, SlurmRefused: from Slurm.
        ZslurmError: a local run's processes are on another machine.
    """
    state = look(run)
    if not state.active or state.job_id is None:
        return None
    spec = load_spec(run.config)
    if state.launcher == "slurm":
        SlurmClient().cancel(state.job_id)
    else:
        _stop_local(run)
    record_action(run, "cancel", state.job_id, spec)
    while wait and look(run).active:
        time.sleep(_POLL_S)
    return state.job_id


def _stop_local(run: RunDir) -> None:
    """Signal the supervisor; wait for it where the run has only just been started."""
    deadline = time.monotonic() + 30.0
    job = last_job(run)
    assert job is not None
    while True:
        supervisor = ProcessRecord.read(run.supervisor)
        if supervisor is not None and not supervisor.here:
            raise ZslurmError(f"{run.name}: it runs on {supervisor.host}; cancel it there")
        if supervisor is not None and supervisor.created >= job.time - 60 and supervisor.signal(signal.SIGTERM):
            return
        if job.process is None or not job.process.alive:
            _stop_ranks(run)  # nobody is left to pass it on
            return
        if time.monotonic() > deadline:
            job.process.signal(signal.SIGTERM)
            return
        time.sleep(_POLL_S)


def _stop_ranks(run: RunDir) -> None:
    attempts = run.attempt_dirs()
    step = DetachedProcess.adopt(attempts[-1].step_process, attempts[-1].step_exit) if attempts else None
    if step is not None:
        step.signal_group(signal.SIGUSR2)


def requeue(run: RunDir, *, now: bool = False) -> str:
    """Start the run's job again: it continues from its last checkpoint. Returns the job id.

    Args:
        now: on Slurm, do not wait for the pause that Slurm makes before a requeued job may start.

    Raises:
        NotFound: the run was never submitted, or Slurm has forgotten its job.
        SlurmUnavailable, SlurmRefused: from Slurm.
    """
    job = last_job(run)
    if job is None:
        raise NotFound(f"{run.name}: it was never submitted; `zslurm submit` starts it")
    spec = load_spec(run.config)
    if job.launcher == "local":
        cancel(run, wait=True)
        return submit(spec).job_id
    client = SlurmClient()
    if client.job(job.job_id) is None:
        raise NotFound(
            f"{run.name}: Slurm has forgotten job {job.job_id}; `zslurm submit` continues the run as a new job"
        )
    client.requeue(job.job_id)
    record_action(run, "requeue", job.job_id, spec)
    if now:
        _start_now(client, job.job_id)
    return job.job_id


def _start_now(client: SlurmClient, job_id: str) -> None:
    """Once the job is pending again, lift the start time that Slurm set (earlier it would be overwritten)."""
    deadline = time.monotonic() + 300.0
    while time.monotonic() < deadline:
        record = client.job(job_id)
        if record is not None and record.state is JobState.PENDING and record.restarts:
            client.start_in(job_id, RESTART_AFTER_S)
            return
        if record is None or (record.restarts and record.state is JobState.RUNNING):
            return
        time.sleep(1.0)
    raise RunActive(f"job {job_id} did not stop within 5 minutes; it is requeued and starts when it can")
