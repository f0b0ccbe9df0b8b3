"""TensorBoard: event files in RUN_DIR/tensorboard.

A resumed run writes a new file next to the old ones, and makes TensorBoard forget what they hold of the steps that
it repeats. Needs the tensorboard package; torch.utils.tensorboard, which writes the files, does not bring it.
"""

from __future__ import annotations

from collections.abc import Mapping

from zslurm.train.telemetry.trackers.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """One attempt's event file."""

    KEY, PACKAGE, EXTRA = "tensorboard", "tensorboard", "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        """Open a new file in the run's folder."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(run.run_dir / "tensorboard"),
            purge_step=run.first_step,
            flush_secs=30,
            filename_suffix=f".attempt-{run.attempt}",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers as scalars."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def finish(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()
