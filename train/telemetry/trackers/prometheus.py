"""Prometheus: the newest numbers in a text file, for the textfile collector of a node exporter.

The file is replaced by a rename, so that a collector never reads half of it, and removed when the run ends in
order: a run that is over has no present numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from zslurm.train.telemetry.trackers.tracker import TrackedRun, Tracker


class Prometheus(Tracker):
    """A gauge `zslurm_...` for each number, labelled by run and project; `zslurm_step` is the newest step."""

    KEY, PACKAGE, EXTRA = "prometheus", "prometheus_client", "prometheus"

    def __init__(self, run: TrackedRun) -> None:
        """Choose the file: the one that is named, or `zslurm-RUN.prom` if a directory is named.

        Raises:
            FileNotFoundError: its directory does not exist.
        """
        from prometheus_client import CollectorRegistry, Gauge

        path = Path(run.config["metrics"]["prometheus"])
        self._file = path / f"zslurm-{run.name}.prom" if path.is_dir() else path
        if not self._file.parent.is_dir():
            raise FileNotFoundError(f"{self._file.parent}: there is no such directory")
        self._registry, self._gauges = CollectorRegistry(), dict[str, Gauge]()
        self._labels = {"run": run.name, "project": run.project}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the file again, with the numbers of earlier lines that this one does not have."""
        from prometheus_client import write_to_textfile

        self._set("step", step)
        for tag, value in values.items():
            self._set(tag, value)
        write_to_textfile(str(self._file), self._registry)

    def finish(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)

    def _set(self, tag: str, value: float) -> None:
        from prometheus_client import Gauge

        name = "zslurm_" + re.sub(r"\W", "_", tag)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, tag, list(self._labels), registry=self._registry)
        self._gauges[name].labels(**self._labels).set(value)
