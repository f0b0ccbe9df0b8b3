"""Run directories as submit, supervisor and rank 0 leave them, told event by event."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.train.runs import MODEL, STEP_TOKENS
from zslurm.aegis.core.policy.outcome import AttemptOutcome, Cause
from zslurm.config.spec import RunSpec
from zslurm.core.processes import ProcessRecord
from zslurm.run.events import Cancelled, Submitted
from zslurm.run.run_dir import RunDir
from zslurm.submit.submit import record_action
from zslurm.train.jsonl import JsonLinesWriter

STEPS = 40


class Story:
    """A local run of which nothing has happened but that its directory was prepared."""

    def __init__(self, directory: Path, *, ranks: int = 2) -> None:
        self.run = RunDir(directory)
        self.spec = RunSpec.model_validate(
            {
                "run": {"name": directory.name, "runs_dir": str(directory.parent)},
                "model": MODEL,
                "phases": [
                    {"tokens": STEPS * STEP_TOKENS, "context": 16, "global_batch": 6, "micro_batch": 1, "lr": 1e-3}
                ],
                "slurm": {"ranks_per_node": ranks},
            }
        )
        self.run.create(group_readable=False)
        self.run.config.write_text(self.spec.model_dump_json())
        self.clock = 1_780_000_000.0
        self.job_id = ""
        self.best_step: int | None = None

    def submitted(self, job_id: str = "local-1", *, process: int | None = None) -> Story:
        """The launcher took it; `process` holds it, else one that is gone."""
        self.job_id = job_id
        holder = ProcessRecord.of(process) if process else ProcessRecord(os.getpid(), 1.0, os.uname().nodename)
        row = Submitted(job_id=job_id, pid=holder.pid, created=holder.created, host=holder.host)
        record_action(self.run, row, self.spec)
        return self

    def cancelled(self) -> Story:
        record_action(self.run, Cancelled(job_id=self.job_id), self.spec)
        return self

    def started(self, attempt: int = 1) -> Story:
        place = self.run.attempt(attempt)
        place.logs.mkdir(parents=True)
        place.ranks.mkdir()
        place.description.write_text(json.dumps({"nodes": "node[0-1]", "world_size": self.spec.world_size}))
        return self.event("attempt_started", attempt=attempt, nodes="node[0-1]", world_size=2)

    def trained(self, *steps: int, attempt: int = 1, saved: int | None = None, mfu: float | None = None) -> Story:
        with JsonLinesWriter(self.run.metrics) as lines:
            for step in steps:
                row = {"kind": "step", "attempt": attempt, "step": step, "loss": 4 - step / 100, "mfu": mfu}
                lines.append(row | {"tokens_per_s": 1234.5, "step_time_s": 2.0, "time": self._tick()})
            if saved is not None:
                row = {"kind": "checkpoint", "attempt": attempt, "step": saved, "state": "COMMITTED"}
                row |= {"best_step": self.best_step, "best_loss": None}
                lines.append(row | {"bytes": 10, "seconds": 0.1, "time": self._tick()})
        return self

    def evaluated(self, step: int, loss: float, attempt: int = 1) -> Story:
        """The held-out loss was taken; the next checkpoint says that it is the lowest."""
        self.best_step = step
        with JsonLinesWriter(self.run.metrics) as lines:
            row = {"kind": "evaluation", "attempt": attempt, "step": step, "loss": loss}
            lines.append(row | {"time": self._tick()})
        return self

    def ended(self, outcome: Any, exit_code: int, cause: Cause | None = None, attempt: int = 1) -> Story:
        fields = AttemptOutcome(outcome, exit_code, cause).fields()
        self.event("attempt_ended", attempt=attempt, **fields)
        return self.event("run_ended", **fields)

    def preempted(self, mode: str) -> Story:
        return self.event("preempted", mode=mode, preempt_time=1_800_000_000.0, ends_at=1_800_000_030.0)

    def logged(self, rank: int, text: str, attempt: int = 1) -> Story:
        with self.run.attempt(attempt).rank_log(rank).open("a") as file:
            file.write(text)
        return self

    def event(self, kind: str, /, **fields: Any) -> Story:
        with JsonLinesWriter(self.run.events) as lines:
            lines.append({"time": self._tick(), "event": kind, "job_id": self.job_id, **fields})
        return self

    def _tick(self) -> float:
        self.clock += 1
        return self.clock


class Holder:
    """A living process that may stand for the one which holds a run."""

    def __enter__(self) -> Holder:
        self._process = subprocess.Popen(["sleep", "1000"])
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.end()
