"""All measurements of a cluster in one job, in order, within a time; each is kept as soon as it is made.

A calibration is a list of parts. A part is a benchmark on all nodes, or a command on the first node (kernels,
tuned products). Parts that were measured are not measured again if the calibration is continued: after Ctrl-C,
after the end of the job, or on the nodes that remain after one was lost.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zslurm.bench.result import BenchResult, ResultWriter
from zslurm.bench.results.apply import Found, settings_from
from zslurm.bench.run.launch import launch
from zslurm.bench.run.request import BenchProgress, BenchRequest
from zslurm.cluster.measurements import (
    Calibration,
    CalibrationPart,
    Measurements,
    StoredValue,
    read_measurements,
    write_measurements,
)
from zslurm.cluster.site import Site
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.slurm.hostlist import compress

_LEAST_MINUTES = 0.05


@dataclass(frozen=True)
class Part:
    """One measurement of a calibration.

    Attributes:
        name: short, unique; the result is called by it.
        about: what is measured, in a few words.
        share: of the time, relative to the other parts.
        benchmark: as in `zslurm bench NAME`; empty if `command` measures.
        options: of the benchmark, as JSON has them.
        environments: see `BenchRequest`.
        command: words after `zslurm`, run on the first node; {minutes} is replaced by the time that it has.
        needs_gpu: whether there is nothing to measure without a GPU.
        keeps_values: whether runs take values from the result.
    """

    name: str
    about: str
    share: float
    benchmark: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    environments: Sequence[Mapping[str, str]] = ({},)
    command: tuple[str, ...] = ()
    needs_gpu: bool = False
    keeps_values: bool = True


@dataclass(frozen=True)
class Place:
    """Where a calibration is made.

    Attributes:
        site: the profile.
        nodes: of the job that this process runs in; none: this machine.
        has_gpus: whether ranks have GPUs.
        ranks: on each node; None: one for each GPU, two without GPUs.
    """

    site: Site
    nodes: tuple[str, ...]
    has_gpus: bool
    ranks: int | None = None


class CalibrationProgress:
    """What happens during a calibration; the command line overrides what it shows."""

    def began(self, number: int, parts: int, part: Part, minutes: float) -> None:
        """Part `number` of so many begins, and has so many minutes."""

    def skipped(self, part: Part, reason: str) -> None:
        """Report that a part is not measured."""

    def ended(self, part: Part, result: BenchResult | None, found: Found | None) -> None:
        """Report that a part was measured."""

    def failed(self, part: Part, reason: str) -> None:
        """Report that a part could not be measured; the others are."""

    def of_points(self) -> BenchProgress:
        """Return what shows the points of a benchmark."""
        return BenchProgress()


class CalibrationRun:
    """One call of the command: measures the parts that are left."""

    def __init__(
        self,
        path: Path,
        profile: str,
        parts: Sequence[Part],
        place: Place,
        *,
        minutes: float,
        shapes_of: str,
        anew: bool,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read what was measured before.

        Args:
            path: the file of measurements; results of parts go into a folder of its name next to it.
            profile: name of the profile.
            parts: in the order in which they are measured.
            place: nodes and ranks.
            minutes: for all parts together.
            shapes_of: the run whose products are measured.
            anew: measure again what was measured.
            stopped: whether the user or Slurm has interrupted the command; a benchmark then ends with a part.
            clock: monotonic seconds.

        Raises:
            ConfigError: the file cannot be used.
        """
        self.path, self.profile, self.parts, self.place = path, profile, parts, place
        self.minutes, self._stopped, self._clock, self._began = minutes, stopped, clock, clock()
        self.nodes = list(place.nodes)
        self.measurements = read_measurements(path, profile) or Measurements(profile=profile)
        before = self.measurements.calibration
        continues = not anew and before is not None and before.continues(shapes_of, [part.name for part in parts])
        self.calibration = (
            before
            if continues and before is not None
            else Calibration(began=datetime.now(UTC).isoformat(timespec="seconds"), shapes_of=shapes_of)
        )

    @property
    def left(self) -> list[Part]:
        """Return the parts that are not measured yet."""
        return [part for part in self.parts if not self.calibration.has(part.name)]

    @property
    def results(self) -> Path:
        """Return the folder of the results."""
        return self.path.with_suffix("")

    def measure(self, progress: CalibrationProgress) -> bool:
        """Measure what is left, and keep it part by part; returns whether nothing is left.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was measured is kept.
            ZslurmError: the file cannot be written.
        """
        self._write()  # before minutes of measuring
        left = self.left
        for index, part in enumerate(left):
            number = len(self.parts) - len(left) + index + 1
            remaining = self.minutes - (self._clock() - self._began) / 60
            shares = sum(later.share for later in left[index:])
            minutes = max(_LEAST_MINUTES, remaining * part.share / shares)
            if part.needs_gpu and not self.place.has_gpus:
                progress.skipped(part, "it needs a GPU")
                self._keep(part, CalibrationPart(problem="it needs a GPU"), {})
                continue
            if remaining <= 0:
                progress.failed(part, "no time is left; the same command continues")
                continue
            progress.began(number, len(self.parts), part, minutes)
            began = self._clock()
            try:
                result, found = self._measure(part, minutes, progress)
            except ZslurmError as error:
                if self._stopped():
                    raise KeyboardInterrupt from error
                progress.failed(part, str(error).splitlines()[-1])
                continue
            took = CalibrationPart(
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                seconds=round(self._clock() - began, 1),
                nodes=compress(self.nodes),
                slow=tuple(result.slow) if result is not None else (),
                exclude=tuple(result.exclude) if result is not None else (),
                complete=result is None or result.complete,
            )
            if result is not None and result.lost_nodes:
                self.nodes = [node for node in self.nodes if node not in result.lost_nodes]
            self._keep(part, took, found.values if found is not None else {})
            progress.ended(part, result, found)
            if self._stopped():
                raise KeyboardInterrupt
        return not self.left

    def _measure(
        self, part: Part, minutes: float, progress: CalibrationProgress
    ) -> tuple[BenchResult | None, Found | None]:
        """Measure one part.

        Raises:
            ZslurmError: nothing was measured; the reason is its last line.
        """
        if part.command:
            self._run_command(part, minutes)
            return None, None
        file = self.results / f"{part.name}.json"
        words = ["zslurm", *sys.argv[1:]]
        request = BenchRequest(
            benchmark=part.benchmark,
            options=dict(part.options),
            command=words,
            nodes=len(self.nodes) or None,
            nodelist=compress(self.nodes) if self.nodes else None,
            ranks=self.place.ranks,
            minutes=minutes,
            environments=part.environments,
        )
        result = launch(request, self.place.site, ResultWriter(file), progress.of_points())
        return result, settings_from(result, file) if part.keeps_values else None

    def _run_command(self, part: Part, minutes: float) -> None:
        """Run the command of a part on this node, which is the first one of the job.

        Raises:
            ZslurmError: it failed.
        """
        words = [word.replace("{minutes}", f"{minutes:.2f}") for word in part.command]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "zslurm", *words],
            text=True, errors="replace", capture_output=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        (self.results / f"{part.name}.txt").write_text(done.stdout, encoding="utf-8")
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ZslurmError(f"zslurm {' '.join(words)}: {lines[-1]}")

    def _keep(self, part: Part, took: CalibrationPart, values: Mapping[str, StoredValue]) -> None:
        self.calibration = self.calibration.with_part(part.name, took)
        self.measurements = self.measurements.with_values(values)
        self._write()

    def _write(self) -> None:
        """Write the measurements.

        Raises:
            ZslurmError: the file, or the folder of the results, cannot be written.
        """
        try:
            self.results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.results}: cannot be made: {error.strerror}; name another file with --out"
            ) from error
        self.measurements = self.measurements.model_copy(update={"calibration": self.calibration})
        write_measurements(self.path, self.measurements)
