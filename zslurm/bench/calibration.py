"""All measurements of a cluster in one job, in order, within a time; each is kept as soon as it is made.

A calibration is a list of parts. A part is a benchmark on all nodes, or on one GPU of the first node (kernels,
tuned products). Parts that were measured are not measured again if the calibration is continued: after Ctrl-C,
after the end of the job, or on the nodes that remain after one was lost.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zslurm.bench.result import BenchResult, ResultWriter, read_result
from zslurm.bench.results.apply import Found, settings_from
from zslurm.bench.results.tables import keep_tables
from zslurm.bench.run.launch import launch
from zslurm.bench.run.request import BenchProgress, BenchRequest
from zslurm.checkpoint_tools import InUse, acquire
from zslurm.checkpoint_tools.lock import Holder
from zslurm.cluster.measurements import (
    CalibrationPart,
    Measurements,
    StoredValue,
    read_measurements,
    results_folder,
    write_measurements,
)
from zslurm.cluster.site import Site
from zslurm.config.software import torch_version
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import own_job_id
from zslurm.slurm.hostlist import compress

NO_TIME = "too little time is left; the same command continues"


@dataclass(frozen=True)
class Part:
    """One measurement of a calibration.

    Attributes:
        name: short, unique; the result is called by it.
        about: what is measured, in a few words.
        share: of the time, relative to the other parts.
        benchmark: as in `zslurm bench NAME`.
        options: of the benchmark, as JSON has them.
        environments: see `BenchRequest`.
        on_one_gpu: whether one rank on the first node measures.
        least_minutes: with less time the part is not begun.
        needs_gpu: whether there is nothing to measure without a GPU.
        keeps_values: whether runs take values from the result.
    """

    name: str
    about: str
    share: float
    benchmark: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environments: Sequence[Mapping[str, str]] = ({},)
    on_one_gpu: bool = False
    least_minutes: float = 0.05
    needs_gpu: bool = False
    keeps_values: bool = True

    def identity(self, nodes: int, ranks: int | None, software: str) -> str:
        """Return in a word what is measured, on how many nodes and ranks, and with which software."""
        options = {name: value for name, value in self.options.items() if name != "work"}
        facts = [
            self.benchmark,
            options,
            [dict(environment) for environment in self.environments],
            *(() if self.on_one_gpu else (nodes, ranks)),
        ]
        return hashlib.sha256(json.dumps([*facts, software], sort_keys=True).encode()).hexdigest()[:16]


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

    def ended(self, part: Part, result: BenchResult, found: Found | None) -> None:
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
        anew: bool,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read what was measured before.

        Args:
            path: the file of measurements; results of parts go into a folder next to it (`results_folder`).
            profile: name of the profile.
            parts: in the order in which they are measured.
            place: nodes and ranks.
            minutes: for all parts together.
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
        cluster = place.site.cluster
        software = f"{cluster.gpu_type} {cluster.rocm_version} {cluster.rccl_version} {torch_version(cluster)}"
        self._identities = {part.name: part.identity(len(self.nodes), place.ranks, software) for part in parts}
        if anew:  # the records of parts that are not asked for stay
            parts_known = self.measurements.parts
            outdated = {name: parts_known[name].model_copy(update={"complete": False}) for name in self._known}
            self.measurements = self.measurements.model_copy(update={"parts": parts_known | outdated})

    @property
    def _known(self) -> list[str]:
        return [part.name for part in self.parts if part.name in self.measurements.parts]

    def is_measured(self, part: Part) -> bool:
        """Return whether exactly this was measured, and whole."""
        record = self.measurements.parts.get(part.name)
        return record is not None and record.complete and record.of == self._identities[part.name]

    @property
    def left(self) -> list[Part]:
        """Return the parts that can be measured here and are not yet."""
        measurable = [part for part in self.parts if self.place.has_gpus or not part.needs_gpu]
        return [part for part in measurable if not self.is_measured(part)]

    @property
    def results(self) -> Path:
        """Return the folder of the results."""
        return results_folder(self.path)

    def measure(self, progress: CalibrationProgress) -> bool:
        """Measure what is left, and keep it part by part; returns whether nothing is left.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was measured is kept.
            ZslurmError: the file cannot be written, another process measures, or all nodes are lost.
        """
        check_writable(self.path)  # before minutes of measuring
        with self._alone():
            for part in self.parts:
                if part.needs_gpu and not self.place.has_gpus:
                    progress.skipped(part, "it needs a GPU")
            remaining = self.left
            first = len(self.parts) - len(remaining) + 1
            for index, part in enumerate(remaining):
                self._measure_and_keep(part, remaining[index:], first + index, progress)
        return not self.left

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the right to measure for this file.

        Raises:
            ZslurmError: another process holds it.
        """
        job_id = own_job_id() or ""
        try:
            with acquire(self.results, job=job_id, is_gone=_has_ended):
                yield
        except InUse as error:
            raise ZslurmError(f"{self.path}: {error}") from error

    def _measure_and_keep(
        self, part: Part, remaining: Sequence[Part], number: int, progress: CalibrationProgress
    ) -> None:
        minutes_left = self.minutes - (self._clock() - self._began) / 60
        minutes = minutes_left * part.share / sum(later.share for later in remaining)
        if minutes < part.least_minutes:
            progress.failed(part, NO_TIME)
            return
        if self.place.nodes and not self.nodes:
            raise ZslurmError("all nodes of the job are lost")
        progress.began(number, len(self.parts), part, minutes)
        began = self._clock()
        try:
            result, derived = self._measure(part, minutes, progress)
        except ZslurmError as error:
            if self._stopped():
                raise KeyboardInterrupt from error
            progress.failed(part, str(error).splitlines()[-1])
            return
        took = CalibrationPart(
            of=self._identities[part.name],
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(self._clock() - began, 1),
            nodes=compress(self.nodes),
            slow=tuple(result.slow),
            exclude=tuple(result.exclude),
            complete=result.complete,
        )
        if result.lost_nodes:
            self.nodes = [node for node in self.nodes if node not in result.lost_nodes]
        self._keep(part, took, derived.values if derived is not None else {})
        progress.ended(part, result, derived)
        if self._stopped():
            raise KeyboardInterrupt

    def _measure(
        self, part: Part, minutes: float, progress: CalibrationProgress
    ) -> tuple[BenchResult, Found | None]:
        """Measure one part.

        Raises:
            ZslurmError: nothing was measured; the reason is its last line.
        """
        file, draft = self.results / f"{part.name}.json", self.results / f"{part.name}.new.json"
        nodes = self.nodes[:1] if part.on_one_gpu else self.nodes
        request = BenchRequest(
            benchmark=part.benchmark,
            options=dict(part.options),
            command=["zslurm", *sys.argv[1:]],
            nodes=len(nodes) or None,
            nodelist=compress(nodes) if nodes else None,
            ranks=1 if part.on_one_gpu else self.place.ranks,
            minutes=minutes,
            environments=part.environments,
        )
        result = launch(request, self.place.site, ResultWriter(draft), progress.of_points())
        if result.complete or not _is_whole(file):
            with suppress(FileNotFoundError):
                draft.replace(file)
        if not part.keeps_values:
            return result, None
        derived = settings_from(result, file)
        derived.lines += keep_tables(result, self.path)
        return result, derived

    def _keep(self, part: Part, took: CalibrationPart, values: Mapping[str, StoredValue]) -> None:
        """Add a part and its values to what is in the file by now, which `bench apply` may have written."""
        on_disk = read_measurements(self.path, self.profile) or self.measurements
        merged = on_disk.with_values(values, is_partial=not took.complete)
        self.measurements = merged.model_copy(update={"parts": self.measurements.parts | {part.name: took}})
        write_measurements(self.path, self.measurements)


def check_writable(path: Path) -> None:
    """Make the folder of the results, and try to write next to a file of measurements.

    Raises:
        ConfigError: that cannot be.
    """
    folder = results_folder(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "about.txt", f"Results of zslurm calibrate; the values are in {path.name}.\n")
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written: {error.strerror}; name another file with --out"
        ) from error


def _is_whole(file: Path) -> bool:
    """Return whether a file has a complete result."""
    try:
        return file.exists() and read_result(file).complete
    except ZslurmError:
        return False


def _has_ended(holder: Holder) -> bool:
    """Return whether the job of a process on another node is over, by Slurm."""
    if not holder.job:
        return False
    try:
        job = SlurmClient().queue([holder.job]).get(holder.job)
    except ZslurmError:
        return False
    return job is None or job.state.is_over
