"""Decide when checkpoints are made, and report how far each of them is.

A save runs in the background (writer.py). What all ranks must do together they learn from `StepSignals`, which are
summed over the ranks in every step anyway. More than checkpoint.failures failed saves in a row end the run; those
for which there was no space do not count: saves are paused until there is.

The last save of a run, and the one that it makes when it is asked to stop, are waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.train.checkpointing.checkpointer import Checkpointer
from zslurm.train.checkpointing.writer import Reached, SaveRequest, SaveState
from zslurm.train.config import CheckpointConfig
from zslurm.train.errors import TrainError
from zslurm.train.jsonl import Record
from zslurm.train.progress import CheckpointState, Phase, ProgressWriter
from zslurm.train.schedule import due
from zslurm.train.step_signals import StepSignals

_LOG = logging.getLogger(__name__)

LONGEST_DELAY_S = 1800.0
"""Seconds that a save may take before training waits for it, when the next one is due."""


class SaveSchedule:
    """When one rank's run saves.

    Attributes:
        stall_s: seconds that training has waited for the save in progress, or for the last one.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        progress: ProgressWriter,
        *,
        first: bool,
        record: Record,
        committed: Callable[[int, Path], None],
    ) -> None:
        """Schedule the saves of `checkpointer`; `first` on rank 0, whose number of failures counts.

        `record` records each state of a save, `committed` is called with step and path of each new checkpoint.
        """
        self._checkpointer, self._config, self._progress = checkpointer, config, progress
        self._first, self._record, self._committed = first, record, committed
        self._request: SaveRequest | None = None
        self._pending = self._busy = self._overdue = False
        self._failures = 0
        self._reason = ""  # of the last save that failed
        self.stall_s = 0.0

    def add_signals(self, signals: StepSignals) -> StepSignals:
        """Return this rank's signals with what it knows of its saves."""
        writer = self._checkpointer.writer
        overdue = writer.busy_s > LONGEST_DELAY_S
        failures = self._failures if self._first else 0
        saving = self._checkpointer.saving
        return signals._replace(saving=float(saving), overdue=float(overdue), failed_saves=float(failures))

    def agree(self, sums: StepSignals) -> None:
        """Take the sums: from here on all ranks do the same.

        Raises:
            TrainError: too many saves failed.
        """
        self._busy, self._overdue = sums.saving > 0, sums.overdue > 0
        if sums.failed_saves > self._config.failures:
            failed, allowed = counted(int(sums.failed_saves), "save"), self._config.failures
            raise TrainError(
                f"checkpoint: {failed} in a row failed, more than checkpoint.failures ({allowed}) allows; "
                f"older checkpoints are untouched{self._why()}"
            )

    @property
    def pending(self) -> bool:
        """Whether a save is due, in progress or given up; ranks may differ on one that has just ended."""
        writer = self._checkpointer.writer
        return self._pending or writer.busy or writer.gave_up

    def regroup(self, *, pending: bool) -> None:
        """Continue after a fault, with another writer; a save that was `pending` on some rank is due again."""
        self._pending, self._busy, self._overdue, self._request = pending, False, False, None

    def before_update(self) -> None:
        """Wait, before the weights change, until the copy of the save in progress has them."""
        self.stall_s += self._checkpointer.writer.wait_for_snapshot()

    def is_due(self, step: int, *, taken: bool, needed: bool) -> bool:
        """Return whether to save after `step`: at every checkpoint.every_steps, and if it is `needed`.

        Skipped steps may have ruined weights before them: what is due then waits for a step that is taken.
        """
        self._pending = self._pending or needed or due(self._config.every_steps, step)
        return self._pending and taken

    def may_start(self) -> bool:
        """Return whether a save that is due can begin; one that is overdue is waited for."""
        if self._busy and self._overdue:
            self._wait()
            return True
        return not self._busy

    def start(self, request: SaveRequest, *, wait: bool) -> None:
        """Begin a save, and with `wait` end it.

        Raises:
            TrainError: it was to be waited for, and failed.
        """
        if wait:
            self._wait()  # for the one before
        self._pending, self.stall_s, self._request = False, 0.0, request
        self._checkpointer.writer.request(request)
        if not wait and self._config.background:
            self.report()
            return
        self._progress.update(phase=Phase.SAVE)
        self._reason = ""
        self._wait()
        self._checkpointer.writer.wait_for_snapshot()
        self._progress.update(phase=Phase.STEP)
        if wait and self._reason:
            raise TrainError(f"checkpoint: the last save failed; older checkpoints are untouched{self._why()}")

    def _why(self) -> str:
        return f"; the last one: {self._reason}" if self._reason else ""

    def report(self) -> None:
        """Report how far the save in progress has come since the last call; never waits."""
        for reached in self._checkpointer.writer.poll():
            self._report(reached)

    def _wait(self) -> None:
        self.stall_s += self._checkpointer.finish()
        self._busy = self._overdue = False
        self.report()

    def _report(self, reached: Reached) -> None:
        done, failed = reached.state is SaveState.COMMITTED, reached.state is SaveState.FAILED
        if not failed:
            self._progress.update(checkpoint=CheckpointState[reached.state])
        if done:
            self._progress.update(committed_step=reached.step)
        if done:
            self._failures, self._reason = 0, ""
        elif failed:
            self._reason = reached.reason
            # A full disk pauses saves: what the run holds in memory is worth more than its end.
            self._failures += not reached.full
        best = (self._request.cursor.get("best") or {}) if self._request is not None else {}
        self._record(
            "checkpoint",
            step=reached.step,
            state=reached.state.value,
            bytes=reached.bytes,
            seconds=reached.seconds,
            stall_s=self.stall_s,
            reason=reached.reason or None,
            **(_best_fields(best) if done else {}),
        )
        if failed:
            _LOG.info("the save of step %d failed: %s", reached.step, reached.reason)
        if done and reached.path is not None:
            _LOG.info(
                "saved %s (%s in %.2f s, training waited %.3f s)",
                reached.path.name, show_bytes(reached.bytes), reached.seconds, self.stall_s,
            )  # fmt: skip
            self._committed(reached.step, reached.path)


def _best_fields(best: Mapping[str, Any]) -> dict[str, Any]:
    """Return the best checkpoint of a cursor as metrics have it."""
    by_loss = best.get("metric", "loss") == "loss"
    return {
        "best_step": best.get("step"),
        "best_loss": best.get("loss") if by_loss else None,
        "best_metric": best.get("metric", "loss") if best else None,
    }
