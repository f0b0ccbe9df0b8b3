"""Run evaluation.command: it evaluates an export of the weights, next to the training and never in its way.

    trainer, rank 0     a checkpoint is committed -> starts one process and continues; checks on it at every step
    that process        see `train.evaluation.command`: exports the checkpoint, runs the user's command, leaves how
                        it went in RUN_DIR/exports/step-00000400.json

The process has no torch and no GPU, a lower priority, its own session, and none of the variables by which a
program would think itself a rank of the run. One runs at a time; one that is due while another runs is left out.
No failure of it stops the training.

No shell is involved: the command is split into words as a shell would, {model}, {step} and {run} are replaced
inside of them, and the words are the arguments of one program. For pipes there is `bash -c '...' name {model}`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.plain import reason_of
from zslurm.train.evaluation.command import GRACE_S, ExportPaths
from zslurm.train.jsonl import Record
from zslurm.train.schedule import Position, due
from zslurm.train.sections.metrics_config import EvaluationConfig
from zslurm.train.telemetry.observer import ObservedRun, Observer, StepResult
from zslurm.train.telemetry.timing import StepPart

_LOG = logging.getLogger(__name__)
_KEEP_EXPORTS = 1
"""Newest exports that stay in RUN_DIR/exports."""
_RANKS_OWN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|(TORCHELASTIC|ZSLURM)_.*"
)
"""Variables by which a program takes itself for a rank of a distributed run."""


def command_words(command: str, *, model: str, step: int, run: str) -> list[str]:
    """Return the words of a command, with {model}, {step} and {run} replaced inside of each; other braces stay.

    Raises:
        ValueError: a quotation is not closed.
    """
    values = {"{model}": model, "{step}": str(step), "{run}": run}
    pattern = re.compile("|".join(map(re.escape, values)))
    return [pattern.sub(lambda match: values[match[0]], word) for word in shlex.split(command)]


class EvaluationCommand(Observer):
    """Asks for the checkpoints to evaluate; on rank 0 starts the process and records how it went."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        command: str,
        config: EvaluationConfig,
        record: Record,
        *,
        starts: bool = True,
    ) -> None:
        """Prepare; nothing is started, and on a rank without `starts` never is. {run} is replaced by `name`."""
        self._run_dir, self._name, self._command, self._config = run_dir.absolute(), name, command, config
        self._record_line, self._starts = record, starts
        self._pending = False
        self._to_export: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._step = -1

    @classmethod
    def create(cls, run: ObservedRun) -> EvaluationCommand | None:
        """Return one for every rank of a run that has a command: all ask for the same checkpoints."""
        config = run.config.evaluation
        if config.command is None:
            return None
        name = run.config.run.name
        return cls(run.run_dir, name, config.command, config, run.record, starts=run.world.is_first)

    def step_done(self, step: int, here: Position, result: StepResult, split: Mapping[StepPart, float]) -> None:
        """Note whether the command is due, and how the one before went."""
        self._pending = self._pending or due(self._config.command_every_steps, step)
        self.poll()

    def needs_checkpoint(self) -> bool:
        """Return whether a command waits for a checkpoint."""
        return self._pending

    def checkpoint_requested(self, step: int) -> None:
        """Evaluate this checkpoint, once it is complete, if a command waits for one."""
        if self._pending:
            self._to_export.add(step)
            self._pending = False

    def checkpoint_committed(self, step: int, path: Path) -> None:
        """Start the command if it waited for this checkpoint."""
        if self._starts and step in self._to_export:
            self.start(step, path)
        self._to_export.discard(step)

    def checkpoints_in_use(self) -> frozenset[int]:
        """Return the step whose checkpoint is being exported, which must not be removed yet."""
        exporting = self.poll() and not ExportPaths(self._run_dir, self._step).model.exists()
        return frozenset({self._step}) if exporting else frozenset()

    def start(self, step: int, checkpoint: Path) -> None:
        """Export a committed checkpoint and run the command on it, in the background."""
        if self.poll():
            _LOG.info("evaluation.command: step %d is left out: that of step %d still runs", step, self._step)
            self._record(step, "skipped", reason=f"the command of step {self._step} still ran")
            return
        paths = ExportPaths(self._run_dir, step)
        words = command_words(self._command, model=str(paths.model), step=step, run=self._name)
        arguments = map(str, (self._run_dir, step, checkpoint.absolute(), _KEEP_EXPORTS, os.getpid()))
        environment = {name: value for name, value in os.environ.items() if not _RANKS_OWN.fullmatch(name)}
        try:
            paths.root.mkdir(exist_ok=True)
            paths.result.unlink(missing_ok=True)
            with paths.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "zslurm.train.evaluation.command", *arguments, *words],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            reason = reason_of(error)
            _LOG.info("evaluation.command: cannot be started at step %d: %s", step, reason)
            self._record(step, "failed", reason=reason)
            return
        self._step = step

    def poll(self) -> bool:
        """Return whether it runs; records how it ended once it has."""
        if self._process is None:
            return False
        if self._process.poll() is None:
            return True
        self._ended("failed")
        return False

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Wait for its end, or until `give_up()`: then it is killed."""
        if self.poll():
            _LOG.info("waiting for evaluation.command of step %d", self._step)
        while self.poll() and not give_up():
            time.sleep(0.1)
        self.kill()

    def kill(self) -> None:
        """End it now, if it runs."""
        if not self.poll() or self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._ended("killed")

    def _ended(self, otherwise: str) -> None:
        """Record how it ended: by what it left, `otherwise` if it left nothing."""
        assert self._process is not None
        code, self._process = self._process.returncode, None
        paths = ExportPaths(self._run_dir, self._step)
        try:
            result = json.loads(paths.result.read_text())
        except (OSError, ValueError):
            reason = f"the process that exports ended with {code}; see {paths.log}"
            result = {"outcome": otherwise, "reason": reason}
        if result["outcome"] == "failed":
            _LOG.info("evaluation.command of step %d failed: %s; see %s", self._step, result["reason"], paths.log)
        elif result["outcome"] == "done":
            _LOG.info(
                "evaluation.command of step %d is done in %.1f s: %s", self._step, result["seconds"], paths.log
            )
        self._record(self._step, **result)

    def _record(self, step: int, outcome: str, **fields: Any) -> None:
        paths = ExportPaths(self._run_dir, step)
        row = {"exit_code": None, "seconds": None, "export_seconds": None, "reason": None} | fields
        self._record_line(
            "evaluation_command", step=step, outcome=outcome, **row, model=str(paths.model), log=str(paths.log)
        )
