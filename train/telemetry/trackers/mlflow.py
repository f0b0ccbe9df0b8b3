"""MLflow: `online` at MLFLOW_TRACKING_URI, or `offline` in RUN_DIR/mlflow.db, which `mlflow ui` shows.

The id of MLflow's run is kept in RUN_DIR/mlflow-run, so that later attempts continue it. A step that is repeated
has two values; MLflow shows both, the later one last.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

from zslurm.train.telemetry.trackers.tracker import TrackedRun, Tracker, scalars

_MOST_OF_A_BATCH = 1000  # what a server takes in one request
_LONGEST_PARAMETER = 500


class MLflow(Tracker):
    """A run at an MLflow server, or in a separate file."""

    KEY, PACKAGE, EXTRA = "mlflow", "mlflow", "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        """Create the run, or find the one of the attempt before."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        uri = (
            os.environ.get("MLFLOW_TRACKING_URI")
            if run.online
            else f"sqlite:///{run.run_dir.absolute()}/mlflow.db"
        )
        if not uri:
            raise ValueError("MLFLOW_TRACKING_URI is not set")
        self._client = MlflowClient(uri)
        kept = run.run_dir / "mlflow-run"
        if kept.exists():
            self._id = kept.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(run.project)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        kept.write_text(self._id + "\n")
        for name, value in _parameters(run.config):
            self._client.log_param(self._id, name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers; those that are not finite are left out, because not every server takes them."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        rows = [Metric(tag, value, now, step) for tag, value in values.items() if math.isfinite(value)]
        for first in range(0, len(rows), _MOST_OF_A_BATCH):
            self._client.log_batch(self._id, metrics=rows[first : first + _MOST_OF_A_BATCH])

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def _parameters(config: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the numbers of the configuration; MLflow shows them as a table."""
    return [(tag.removeprefix("/"), str(value)[:_LONGEST_PARAMETER]) for tag, value in scalars("", config)]
