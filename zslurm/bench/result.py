"""The result of a benchmark: one JSON file, written row by row while the benchmark runs.

While it runs, rows go to FILE.partial, one JSON document a line: the first is the result without rows, each
further one a row. At the end the whole is written to FILE by rename and FILE.partial is removed. A benchmark that
was killed leaves FILE.partial, which `read_result` reads as a result that is not complete.
"""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from zslurm.core.errors import ConfigError, NotFound, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.run.index import state_dir

SCHEMA = 1
"""Number of the format; it grows where an old reader would misread a new file."""

PARTIAL = ".partial"


class MeasuredMachine(BaseModel):
    """Where it was measured.

    Attributes:
        cluster: name of the profile; `local` for this machine.
        nodes: in the order of the ranks.
        ranks_per_node: ranks on each node.
        device: `cuda` (also ROCm's) or `cpu`.
        gpu: model of the GPUs; None on CPUs.
        gpus_per_node: GPUs that a node has, in use or not.
        gpu_memory: bytes of one GPU that were free at the start, the least of all ranks; of a node without GPUs
            the free memory, divided by its ranks.
        cpu: model of the CPU.
        cores: of a node that a job may use.
    """

    model_config = ConfigDict(extra="forbid")

    cluster: str
    nodes: list[str]
    ranks_per_node: int
    device: str
    gpu: str | None
    gpus_per_node: int
    gpu_memory: int
    cpu: str
    cores: int

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        return len(self.nodes) * self.ranks_per_node


class Skipped(BaseModel):
    """A point that was not measured, and why."""

    model_config = ConfigDict(extra="forbid")

    point: dict[str, Any]
    reason: str


class BenchResult(BaseModel):
    """What a benchmark found.

    Attributes:
        schema_version: number of this format.
        benchmark: its name, as in `zslurm bench NAME`.
        command: the command line.
        machine: where it was measured.
        versions: of python, torch, rocm or cuda, rccl or nccl, slurm, zslurm; None if there is none.
        environment: the variables of RCCL, NCCL, HSA and gloo that the ranks had.
        date: when it began, in UTC (ISO 8601).
        seconds: how long it took.
        options: of the benchmark.
        rows: what was measured; the columns are fixed for each benchmark.
        skipped: what was not measured, with the reason.
        complete: whether all that was planned was measured.
        lost_nodes: nodes that stopped answering while it ran.
        notes: what a reader must know in addition to the figures, one sentence each.
        findings: which GPU, rail, node or pair is slower than its peers, one sentence each (findings.py).
        slow: their names.
        exclude: nodes that are better left out, for `--exclude`.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA
    benchmark: str
    command: list[str]
    machine: MeasuredMachine
    versions: dict[str, str | None]
    environment: dict[str, str]
    date: str
    seconds: float = 0.0
    options: dict[str, Any]
    rows: list[dict[str, Any]] = []
    skipped: list[Skipped] = []
    complete: bool = False
    lost_nodes: list[str] = []
    notes: list[str] = []
    findings: list[str] = []
    slow: list[str] = []
    exclude: list[str] = []


def default_path(benchmark: str, cluster: str) -> Path:
    """Return the default path of a result: in the user's state directory."""
    now = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return state_dir() / "bench" / f"{benchmark}-{cluster}-{now}.json"


class ResultWriter:
    """Writes a result row by row."""

    def __init__(self, path: Path) -> None:
        """Take the file; its folder is made.

        Raises:
            ConfigError: it cannot be written there.
        """
        self.path = path
        self.partial = _partial(path)
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a directory")
            path.parent.mkdir(parents=True, exist_ok=True)
            self.partial.touch()
        except OSError as error:
            raise ConfigError(
                f"{path}: the result cannot be written: {error.strerror}; name another file with --out"
            ) from error

    def begin(self, result: BenchResult) -> None:
        """Write what is known before the first row."""
        self._append(result.model_dump(mode="json", exclude={"rows"}), mode="w")

    def add(self, row: dict[str, Any]) -> None:
        """Write a row."""
        self._append(row, mode="a")

    def _append(self, document: dict[str, Any], *, mode: str) -> None:
        try:
            with self.partial.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(document) + "\n")
        except OSError as error:
            raise ZslurmError(f"{self.partial}: the result cannot be written: {error.strerror}") from error

    def finish(self, result: BenchResult) -> None:
        """Write the whole result, and remove the file of its rows.

        Raises:
            ZslurmError: it cannot be written; the rows are in the partial file.
        """
        try:
            write_atomically(self.path, json.dumps(result.model_dump(mode="json"), indent=1) + "\n")
            self.partial.unlink(missing_ok=True)
        except OSError as error:
            raise ZslurmError(
                f"{self.path}: the result cannot be written: {error.strerror}; its rows are in {self.partial}"
            ) from error

    def discard(self) -> None:
        """Remove the file of rows, if there is nothing to keep."""
        self.partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.parent / f"{path.name}{PARTIAL}"  # with_name refuses an empty name, as `--out=` gives


def read_result(path: Path) -> BenchResult:
    """Read a result; of a benchmark that was killed, what it left, by the same name.

    Raises:
        NotFound: there is no such file.
        ConfigError: it is no result of `zslurm bench`, or of a newer version.
    """
    partial = _partial(path)
    file = path if path.exists() or not partial.exists() else partial
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
        raise ConfigError(f"{path}: cannot be read: {why}") from error
    try:
        document = _of_rows(text) if file.name.endswith(PARTIAL) else json.loads(text)
        version = document["schema_version"]
        if not isinstance(version, int) or version > SCHEMA:
            raise ConfigError(f"{path}: format {version}, of a newer zslurm; this one reads up to {SCHEMA}")
        return BenchResult.model_validate(document)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(f"{path}: not a result of `zslurm bench`") from error


def _of_rows(text: str) -> dict[str, Any]:
    """Return the document whose rows stand one on each line; the last line may be cut."""
    head, *lines = text.splitlines()
    document: dict[str, Any] = json.loads(head) | {"rows": [], "complete": False}
    for line in lines:
        try:
            document["rows"].append(json.loads(line))
        except ValueError:
            break
    return document
