"""The supervisor: starts the ranks, passes signals on, and tells the truth about their end.

It stands beside the ranks, never above them. They live in a step of their own; all it knows lies in files of
the run directory. So it may be killed at any moment: the batch script starts it again, and it takes the running
step up where its predecessor left it, or records how the step ended meanwhile.

It makes one attempt for each start of the job. Restarting in place, spares and exclusions belong here later.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any

from train.jsonl import JsonLinesWriter, read_jsonl
from zslurm.aegis.verdict import Cause, Verdict, judge
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.errors import Exit
from zslurm.launch.processes import DetachedProcess, ProcessRecord
from zslurm.launch.run_dir import AttemptDir, RunDir, read_json, write_atomically
from zslurm.launch.step import kill_step, local_step, slurm_step
from zslurm.slurm.hostlist import compress
from zslurm.slurm.srun_output import failed_nodes, task_failures

# Signals that ask the run to save and stop: Slurm's warning before the time limit, and its termination.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class Supervisor:
    """Watches one start of a run's job."""

    def __init__(self, run: RunDir, environ: dict[str, str]) -> None:
        """Prepare; nothing is started yet.

        Args:
            run: the run.
            environ: environment of the job; the ranks inherit it.

        Raises:
            ConfigError: config.json is missing or damaged.
        """
        self.run = run
        self.spec: RunSpec = load_spec(run.config)
        self.on_slurm = self.spec.cluster.launcher == "slurm"
        self.job_id = environ["SLURM_JOB_ID" if self.on_slurm else "ZSLURM_JOB_ID"]
        self.restart = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self.environ = environ
        self.stop_signal: int | None = None
        self.stop_deadline: float | None = None

    def supervise(self) -> int:
        """Watch until the attempt is over; returns the exit code of the run."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_stop_signal)
        for signum in (signal.SIGCONT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        ProcessRecord.of(os.getpid()).write(self.run.supervisor)
        with JsonLinesWriter(self.run.events) as self.events:
            attempt, process = self._adopt_or_start()
            verdict = self._watch(attempt, process)
            self._event("attempt_ended", attempt=attempt.number, **verdict.fields())
            self._event("run_ended", outcome=verdict.outcome, exit_code=verdict.exit_code)
        write_atomically(self.run.job_exit(self.job_id), f"{verdict.exit_code}\n")
        return verdict.exit_code

    def _on_stop_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.stop_signal = signum

    def _event(self, kind: str, **fields: Any) -> None:
        self.events.append({"time": time.time(), "event": kind, "job_id": self.job_id, **fields})
        shown = " ".join(f"{key}={json.dumps(value)}" for key, value in fields.items() if value is not None)
        print(f"supervisor: {kind} {shown}".rstrip(), flush=True)

    def _adopt_or_start(self) -> tuple[AttemptDir, DetachedProcess]:
        """Take up the running step of this start of the job, or begin the next attempt."""
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
        return self._start(self.run.attempt(attempts[-1].number + 1 if attempts else 1))

    def _start(self, attempt: AttemptDir) -> tuple[AttemptDir, DetachedProcess]:
        attempt.logs.mkdir(parents=True)
        attempt.ranks.mkdir()
        make = slurm_step if self.on_slurm else local_step
        plan = make(self.spec, self.run, attempt, self.environ)
        nodes = self.environ.get("SLURM_JOB_NODELIST", compress([socket.gethostname()]))
        body = {
            "attempt": attempt.number,
            "job_id": self.job_id,
            "restart": self.restart,
            "nodes": nodes,
            "world_size": self.spec.world_size,
            "command": plan.command,
        }
        write_atomically(attempt.description, json.dumps(body, indent=1) + "\n")
        process = plan.start(attempt)
        self._event("attempt_started", attempt=attempt.number, nodes=nodes, world_size=self.spec.world_size)
        return attempt, process

    def _watch(self, attempt: AttemptDir, process: DetachedProcess) -> Verdict:
        """Wait for the step's end; stop it when asked to, and when a rank has failed and the rest does not end."""
        aegis = self.spec.aegis
        passed_on: int | None = None
        failed_at: float | None = None
        seen = 0
        while process.poll() is None:
            now = time.monotonic()
            if self.stop_signal is not None and passed_on is None:
                passed_on = self.stop_signal
                self._event("signal", signal=signal.Signals(passed_on).name, attempt=attempt.number)
                process.signal_group(signal.SIGUSR2)
                self.stop_deadline = now + aegis.save_s
            failures = task_failures(_read(attempt.step_log))
            for failure in failures[seen:]:
                if failure.exit_code != Exit.INTERRUPTED:
                    failed_at = failed_at or now
                self._event(
                    "ranks_ended",
                    attempt=attempt.number,
                    ranks=list(failure.ranks),
                    node=failure.node,
                    what=failure.what,
                )
            seen = len(failures)
            late_save = self.stop_deadline is not None and now > self.stop_deadline
            late_peers = failed_at is not None and now > failed_at + aegis.grace_s
            if late_save or late_peers:
                why = (
                    "ranks did not save and stop in time" if late_save else "peers of the failed rank did not end"
                )
                self._event("step_killed", attempt=attempt.number, reason=why)
                kill_step(process, attempt, self.job_id if self.on_slurm else None)
                failed_at, self.stop_deadline = None, None
                _wait_gone(process, deadline=now + 60.0)
                break
            process.reap()
            time.sleep(aegis.poll_s)
        process.reap()
        log = _read(attempt.step_log)
        ends = [end for path in sorted(attempt.ranks.glob("*.json")) if (end := read_json(path))]
        code = process.poll()
        return judge(
            128 + signal.SIGKILL if code is None else code,
            ends,
            task_failures(log),
            failed_nodes(log),
            log[-2000:],
        )


def _wait_gone(process: DetachedProcess, deadline: float) -> None:
    while process.poll() is None and time.monotonic() < deadline:
        process.reap()
        time.sleep(0.05)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def supervise(run_dir: str) -> int:
    """The one call that submitit pickles: supervise the run's job and return the run's exit code."""
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    return Supervisor(RunDir(Path(run_dir)), environ).supervise()
