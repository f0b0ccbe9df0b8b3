"""The supervisor: starts the ranks, passes signals on, and tells the truth about their end.

It stands beside the ranks, never above them. They live in a step of their own; all it knows lies in files of
the run directory. So it may be killed at any moment: the batch script starts it again, and it takes the running
step up where its predecessor left it, or records how the step ended meanwhile.

It makes one attempt for each start of the job. Restarting in place, spares and exclusions belong here later.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any

from train.jsonl import JsonLinesWriter, read_jsonl
from zslurm.aegis.rails_check import check_rails
from zslurm.aegis.verdict import Cause, Verdict, judge, root_failure
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.errors import ConfigError, Exit, ZslurmError
from zslurm.launch.checkpoint_lock import free_from_dead_job
from zslurm.launch.interpreter import Interpreter
from zslurm.launch.node_order import rank_order
from zslurm.launch.prepare import clear_up, prepare
from zslurm.launch.processes import DetachedProcess, ProcessRecord
from zslurm.launch.run_dir import AttemptDir, RunDir, read_json, write_atomically
from zslurm.launch.step import in_order, kill_step, local_step, slurm_step
from zslurm.launch.successor import dismiss_successor, why_not_needed
from zslurm.report.redact import redact_mapping
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.srun_output import TaskFailure, failed_nodes, task_failures
from zslurm.slurm.topology import hostlist_in_order

# Signals that ask the run to save and stop: Slurm's warning before the time limit, and its termination.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
# A rank that has only just been started does not listen yet: the request is repeated.
_REPEAT_S = 2.0


class Supervisor:
    """Watches one start of a run's job."""

    def __init__(self, run: RunDir, environ: dict[str, str]) -> None:
        """Prepare; nothing is started yet.

        Args:
            run: the run.
            environ: environment of the job; the ranks inherit it.

        Raises:
            ConfigError: config.json is missing or damaged, or this is not a job.
        """
        self.run = run
        self.spec: RunSpec = load_spec(run.config)
        self.on_slurm = self.spec.cluster.launcher == "slurm"
        self.job_id = _required(environ, "SLURM_JOB_ID" if self.on_slurm else "ZSLURM_JOB_ID")
        self.restart = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self.environ = environ
        # The batch script was asked to stop before this supervisor could be.
        asked = environ.get("ZSLURM_STOP")
        self.stop_signal: int | None = signal.Signals[f"SIG{asked}"] if asked else None
        self.stop_deadline: float | None = None
        self.repeat_at = 0.0

    def supervise(self) -> int:
        """Watch until the attempt is over; returns the exit code of the run."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_stop_signal)
        for signum in (signal.SIGCONT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        ProcessRecord.of(os.getpid()).write(self.run.supervisor)
        with JsonLinesWriter(self.run.events) as self.events:
            if (reason := why_not_needed(self.run, self.environ)) is not None:
                self._event("successor_ended", reason=reason)
                return self._end(Exit.DONE)
            verdict = self._attempt()
            self._event("run_ended", **verdict.fields())
            clear_up(self.spec, self.job_id, self.environ)
        if verdict.outcome in ("completed", "failed"):
            dismiss_successor(self.run, self.job_id)
        return self._end(verdict.exit_code)

    def _end(self, code: int) -> int:
        """Tell the batch script that the run is over in this job."""
        write_atomically(self.run.job_exit(self.job_id), f"{code}\n")
        return code

    def _attempt(self) -> Verdict:
        """Watch the running step of this start of the job, or that of a new attempt, to its end."""
        attempt, process = self._adopt() or (None, None)
        if attempt is None or process is None:
            if self.stop_signal is not None:
                return self._stopped_early()
            verdict = self._preflight()
            if verdict is not None or self.stop_signal is not None:
                return verdict or self._stopped_early()
            try:
                python = prepare(self.spec, self.run, self.job_id, self.environ, self._event)
            except ZslurmError as error:
                return Verdict("failed", error.exit_code, Cause(str(error)))
            attempt, process = self._start(python)
        verdict = self._watch(attempt, process)
        self._event("attempt_ended", attempt=attempt.number, **verdict.fields())
        return verdict

    def _stopped_early(self) -> Verdict:
        """Asked to stop before any rank was started."""
        assert self.stop_signal is not None
        self._event("signal", signal=signal.Signals(self.stop_signal).name)
        return Verdict("interrupted", Exit.INTERRUPTED)

    def _preflight(self) -> Verdict | None:
        """Check the nodes before the ranks start; None where they may. Costs nothing where nothing is known."""
        if not self.on_slurm or not self.spec.cluster.nics:
            return None
        return check_rails(
            self.spec, self.run, self.job_id, self.environ, self._event, lambda: self.stop_signal is not None
        )

    def _on_stop_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.stop_signal = signum

    def _event(self, kind: str, **fields: Any) -> None:
        fields = redact_mapping(fields)
        self.events.append({"time": time.time(), "event": kind, "job_id": self.job_id, **fields})
        shown = " ".join(f"{key}={json.dumps(value)}" for key, value in fields.items() if value is not None)
        print(f"supervisor: {kind} {shown}".rstrip(), flush=True)

    def _adopt(self) -> tuple[AttemptDir, DetachedProcess] | None:
        """Take up the step that an earlier supervisor of this start of the job left; None where there is none."""
        attempts = self.run.attempt_dirs()
        if attempts:
            last = attempts[-1]
            ended = {e["attempt"] for e in read_jsonl(self.run.events) if e.get("event") == "attempt_ended"}
            if last.number not in ended:
                described = read_json(last.description) or {}
                mine = (described.get("job_id"), described.get("restart")) == (self.job_id, self.restart)
                process = DetachedProcess.adopt(last.step_process, last.step_exit)
                if mine and process is not None:
                    self._event(
                        "supervisor_started", pid=os.getpid(), host=socket.gethostname(), adopted=last.number
                    )
                    return last, process
                cause = Cause("the job was requeued or its batch node died before the attempt could be judged")
                self._event("attempt_ended", attempt=last.number, **Verdict("lost", 1, cause).fields())
        self._event("supervisor_started", pid=os.getpid(), host=socket.gethostname())
        return None

    def _start(self, python: Interpreter) -> tuple[AttemptDir, DetachedProcess]:
        """Begin the next attempt."""
        attempts = self.run.attempt_dirs()
        attempt = self.run.attempt(attempts[-1].number + 1 if attempts else 1)
        attempt.logs.mkdir(parents=True)
        attempt.ranks.mkdir()
        make = slurm_step if self.on_slurm else local_step
        plan = make(self.spec, self.run, attempt, python)
        nodes = self.environ.get("SLURM_JOB_NODELIST", compress([socket.gethostname()]))
        ordered = rank_order(self.spec.cluster, expand(nodes), SlurmClient()) if self.on_slurm else None
        if ordered is not None:
            nodes = hostlist_in_order(ordered[: self.spec.slurm.nodes])
            plan = in_order(plan, attempt, expand(nodes), self.spec.ranks_per_node)
        body = {
            "attempt": attempt.number,
            "job_id": self.job_id,
            "restart": self.restart,
            "nodes": nodes,
            "world_size": self.spec.world_size,
            "command": plan.command,
        }
        write_atomically(attempt.description, json.dumps(body, indent=1) + "\n")
        if self.on_slurm and (dead := free_from_dead_job(self.run.checkpoints, self.job_id, SlurmClient())):
            self._event("lock_taken_over", holder=str(dead))
        process = plan.start(attempt)
        self._event("attempt_started", attempt=attempt.number, nodes=nodes, world_size=self.spec.world_size)
        return attempt, process

    def _watch(self, attempt: AttemptDir, process: DetachedProcess) -> Verdict:
        """Wait for the step's end; kill it where it does not save in time, or outlives a failed rank."""
        failures: list[TaskFailure] = []
        killed_because: str | None = None
        failed_at: float | None = None
        while process.poll() is None:
            process.reap()
            self._pass_signal_on(attempt, process)
            for failure in self._new_failures(attempt, failures):
                if failure.exit_code != Exit.INTERRUPTED:
                    failed_at = failed_at or time.monotonic()
            killed_because = self._why_kill(attempt, failures, failed_at)
            if killed_because is not None:
                self._event("step_killed", attempt=attempt.number, reason=killed_because)
                self._kill(attempt, process)
                _wait_gone(process)
                break
            time.sleep(self.spec.aegis.poll_s)
        else:
            self._new_failures(attempt, failures)
            if not process.left_exit_code:
                self._kill(attempt, process)
        process.reap()
        process.signal_group(signal.SIGKILL)  # what a rank started in the background
        shutil.rmtree(attempt.progress(self.environ), ignore_errors=True)  # what killed ranks left on this node
        log = _read(attempt.step_log)
        code = process.poll()
        code = 128 + signal.SIGKILL if code is None else code
        return judge(code, _rank_ends(attempt), failures, failed_nodes(log), log[-2000:], killed_because)

    def _kill(self, attempt: AttemptDir, process: DetachedProcess) -> None:
        kill_step(process, attempt, self.job_id if self.on_slurm else None)

    def _pass_signal_on(self, attempt: AttemptDir, process: DetachedProcess) -> None:
        now = time.monotonic()
        if self.stop_signal is None or now < self.repeat_at:
            return
        if self.stop_deadline is None:
            self._event("signal", signal=signal.Signals(self.stop_signal).name, attempt=attempt.number)
            self.stop_deadline = now + self.spec.aegis.save_s
        process.signal_group(signal.SIGUSR2)
        self.repeat_at = now + _REPEAT_S

    def _new_failures(self, attempt: AttemptDir, known: list[TaskFailure]) -> list[TaskFailure]:
        """Failures that the step reported since the last look; added to `known` and to the events."""
        new = task_failures(_read(attempt.step_log))[len(known) :]
        for failure in new:
            known.append(failure)
            ranks = list(failure.ranks)
            self._event("ranks_ended", attempt=attempt.number, ranks=ranks, node=failure.node, what=failure.what)
        return new

    def _why_kill(self, attempt: AttemptDir, failures: list[TaskFailure], failed_at: float | None) -> str | None:
        """Why the step must be killed now; None while there is reason to wait.

        Where ranks complain of lost peers, and those peers say nothing, their node may be dead. Slurm finds out
        by itself (SlurmdTimeout) and requeues the job: it gets the time to do so.
        """
        aegis, now = self.spec.aegis, time.monotonic()
        if self.stop_deadline is not None and now > self.stop_deadline:
            return f"the ranks did not save and stop within {aegis.save_s:g} s"
        if failed_at is None or now <= failed_at + aegis.grace_s:
            return None
        if root_failure(failures, {end["rank"]: end for end in _rank_ends(attempt)}) is not None:
            return f"peers of the failed rank did not end within {aegis.grace_s:g} s"
        if now > failed_at + aegis.lost_peer_s:
            return f"ranks lost their peers, and Slurm named no failed node within {aegis.lost_peer_s:g} s"
        return None


def _rank_ends(attempt: AttemptDir) -> list[dict[str, Any]]:
    """What the ranks that have ended recorded."""
    return [end for path in sorted(attempt.ranks.glob("*.json")) if (end := read_json(path))]


def _wait_gone(process: DetachedProcess) -> None:
    deadline = time.monotonic() + 60.0
    while process.poll() is None and time.monotonic() < deadline:
        process.reap()
        time.sleep(0.05)


def _required(environ: dict[str, str], name: str) -> str:
    if name not in environ:
        raise ConfigError(f"not inside a job: {name} is not set; `zslurm submit` starts a run and its supervisor")
    return environ[name]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def supervise(run_dir: str) -> int:
    """The one call that submitit pickles: supervise the run's job and return the run's exit code."""
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    return Supervisor(RunDir(Path(run_dir)), environ).supervise()
