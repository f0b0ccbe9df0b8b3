"""When checkpoints are made, how far they are, and what is told of them.

A save runs in the background (saver.py). What all ranks must do alike they learn from numbers summed over
the ranks in every step anyway:

    busy        some rank has not finished the save before: the one that is due waits, training does not
    overdue     it has taken longer than checkpoint.longest_delay_s: now training waits, on every rank
    failures    saves that failed in a row, as rank 0 counts: more than checkpoint.failures end the run

The last save of a run, and the one that it makes when it is asked to stop, are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.train.checkpointing.checkpointer import Checkpointer
from zslurm.train.checkpointing.writer import Reached, SaveState
from zslurm.train.config import CheckpointConfig
from zslurm.train.errors import TrainError
from zslurm.train.progress import CheckpointState, Phase, ProgressWriter

_SHOWN = {
    SaveState.REQUESTED: CheckpointState.REQUESTED,
    SaveState.STAGED: CheckpointState.STAGED,
    SaveState.WRITTEN: CheckpointState.WRITTEN,
    SaveState.COMMITTED: CheckpointState.COMMITTED,
}


class Write(Protocol):
    """Writes a record of metrics.jsonl."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


class Saves:
    """The saves of one rank's run.

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
        write: Write | None,
        say: Callable[[str], None],
        committed: Callable[[int, Path], None],
    ) -> None:
        """Args:
        first: whether this is rank 0, whose count of failures counts.
        write: where records go; None where another rank writes them.
        committed: called with step and path of each checkpoint that is committed.
        """
        self._checkpointer, self._config, self._progress = checkpointer, config, progress
        self._first, self._write, self._say, self._committed = first, write, say, committed
        self._facts: dict[str, Any] = {}
        self._busy = self._overdue = False
        self._failures = 0
        self.stall_s = 0.0

    def signals(self) -> tuple[float, float, float]:
        """This rank's numbers, to be summed over the ranks."""
        saver = self._checkpointer.saver
        overdue = saver.busy_s > self._config.longest_delay_s
        return float(saver.busy), float(overdue), float(self._failures if self._first else 0)

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums: from here on all ranks do the same.

        Raises:
            TrainError: too many saves failed.
        """
        self._busy, self._overdue = sums[0] > 0, sums[1] > 0
        if sums[2] > self._config.failures:
            raise TrainError(
                f"checkpoint: {counted(int(sums[2]), 'save')} in a row failed, more than checkpoint.failures "
                f"({self._config.failures}) allows; the reasons are above, older checkpoints are untouched"
            )

    def hold(self) -> None:
        """Before the weights change: let the copy of the save in progress have them first."""
        self.stall_s += self._checkpointer.saver.hold()

    def may_start(self) -> bool:
        """Whether a save that is due can begin; one that is overdue is waited for."""
        if self._busy and self._overdue:
            self._wait()
            return True
        return not self._busy

    def start(self, step: int, *, wait: bool, best: dict[str, Any], **request: Any) -> None:
        """Begin a save, and with `wait` end it; `request` is for `Checkpointer.request`.

        Args:
            best: fields on the best step so far, for the record of the commit.

        Raises:
            TrainError: it was to be waited for, and failed.
        """
        if wait:
            self._wait()  # for the one before
        self.stall_s = 0.0
        self._facts = best
        self._checkpointer.request(step, **request)
        if not wait and self._config.background:
            self.report()
            return
        self._progress.update(phase=Phase.SAVE)
        before = self._failures
        self._wait()
        self._checkpointer.saver.hold()
        self._progress.update(phase=Phase.STEP)
        if wait and self._failures > before:
            raise TrainError("checkpoint: the last save failed (reason above); older checkpoints are untouched")

    def report(self) -> None:
        """Tell how far the save in progress has come since the last call; never waits."""
        for reached in self._checkpointer.saver.poll():
            self._tell(reached)

    def _wait(self) -> None:
        self.stall_s += self._checkpointer.saver.finish()
        self._busy = self._overdue = False
        self.report()

    def _tell(self, reached: Reached) -> None:
        done = reached.state is SaveState.COMMITTED
        if reached.state in _SHOWN:
            self._progress.update(checkpoint=_SHOWN[reached.state])
        if done:
            self._progress.update(committed_step=reached.step)
        self._failures = 0 if done else self._failures + (reached.state is SaveState.FAILED)
        if self._write is not None:
            self._write(
                "checkpoint",
                step=reached.step,
                state=reached.state.value,
                bytes=reached.bytes,
                seconds=reached.seconds,
                stall_s=self.stall_s,
                reason=reached.reason or None,
                **(self._facts if done else {}),
            )
        if reached.state is SaveState.FAILED:
            self._say(f"the save of step {reached.step} failed: {reached.reason}")
        if done and reached.path is not None:
            self._say(
                f"saved {reached.path.name} ({show_bytes(reached.bytes)} in {reached.seconds:.2f} s, "
                f"training waited {self.stall_s:.3f} s)"
            )
            self._committed(reached.step, reached.path)
