"""trackio: a database in RUN_DIR/trackio, or `online` the Space of TRACKIO_SPACE_ID at Hugging Face.

`TRACKIO_DIR=RUN_DIR/trackio trackio show` opens it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zslurm.train.telemetry.trackers.tracker import TrackedRun, Tracker


class Trackio(Tracker):
    """A run of trackio."""

    KEY, PACKAGE, EXTRA = "trackio", "trackio", "trackio"

    def __init__(self, run: TrackedRun) -> None:
        """Begin the run, or resume it."""
        space = os.environ.get("TRACKIO_SPACE_ID") if run.online else None
        if run.online and not space:
            raise ValueError("TRACKIO_SPACE_ID is not set")
        os.environ.setdefault("TRACKIO_DIR", str(run.run_dir.absolute() / "trackio"))
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=run.name,
            space_id=space,
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row."""
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """Write what is left."""
        self._run.finish()
