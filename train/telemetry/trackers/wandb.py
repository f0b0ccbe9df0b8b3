"""Weights & Biases: `online`, or `offline` in RUN_DIR/wandb for `wandb sync`.

Every attempt has the same run id, so that the service shows one run. Its own step counter cannot go back, as a
resumed run does: `train_step` is a metric, and the axis of all others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zslurm.train.telemetry.trackers.tracker import TrackedRun, Tracker

AXIS = "train_step"


class Wandb(Tracker):
    """One attempt of a run at Weights & Biases."""

    KEY, PACKAGE, EXTRA = "wandb", "wandb", "wandb"

    def __init__(self, run: TrackedRun) -> None:
        """Begin the run, or resume it."""
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.identity,
            resume="allow",
            dir=str(run.run_dir),
            mode="online" if run.online else "offline",
            config=dict(run.config),
            settings=wandb.Settings(disable_git=True, disable_code=True, x_disable_stats=True, console="off"),
        )
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row of the run's history."""
        self._run.log({AXIS: step, **values})

    def finish(self) -> None:
        """Upload or write what is left."""
        self._run.finish()
