"""Write the metrics for TensorBoard, in RUN_DIR/tensorboard: every number of metrics.jsonl as a scalar.

The tag is KIND/FIELD (`step/loss`, `step/time_split_s/forward`), the step the line's own. A resumed run writes a
new file beside the old ones, and makes TensorBoard forget what they hold of the steps that it repeats. Needs
the tensorboard package; torch.utils.tensorboard, which writes the files, does not bring it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zslurm.train.config import TrainConfig
from zslurm.train.errors import ConfigError
from zslurm.train.telemetry.observer import ObservedRun, Observer


class TensorBoard(Observer):
    """One attempt's event file."""

    def __init__(self, directory: Path, *, first_step: int, attempt: int) -> None:
        """Open a new file in `directory`, which is made; steps from `first_step` on in earlier files are void."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(directory), purge_step=first_step, flush_secs=30, filename_suffix=f".attempt-{attempt}"
        )

    @staticmethod
    def check(config: TrainConfig) -> None:
        """Refuse the setting without the package. Every rank asks; only rank 0 writes.

        Raises:
            ConfigError: the tensorboard package is not installed.
        """
        if config.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "metrics.tensorboard: the tensorboard package is not installed; pip install "
                "'zslurm[tensorboard]', or leave it off (metrics.jsonl has everything)"
            )

    @classmethod
    def create(cls, run: ObservedRun) -> TensorBoard | None:
        """Return that of rank 0, if it is wanted."""
        if not run.world.is_first or not run.config.metrics.tensorboard:
            return None
        return cls(run.run_dir / "tensorboard", first_step=run.done + 1, attempt=run.attempt)

    def recorded(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Add one line of metrics."""
        if "step" in fields:
            for tag, value in _scalars(kind, {key: value for key, value in fields.items() if key != "step"}):
                self._writer.add_scalar(tag, value, fields["step"])

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Write what is left and close the file."""
        self._writer.close()


def _scalars(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _scalars(f"{tag}/{key}", item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield tag, value
