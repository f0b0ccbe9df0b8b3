"""The metrics of a run as columns: for a notebook, the run's report and comparisons.

    metrics = read_metrics("runs/first")             # the run's directory, or its metrics.jsonl
    metrics.steps["loss"]                            # numpy, one number for each kept step
    metrics.frame()                                  # the same as a pandas DataFrame, if pandas is installed
    metrics.frame("evaluation")

A restart repeats the steps after its checkpoint. A step is *kept* if no later line goes back to it or before
it: the others are work that was lost, and `all_steps` has them too.

Cost: one pass over the file; a run of a hundred thousand steps takes some seconds and some tens of megabytes.
Lists in a line (the load of each expert) are kept of at most LOAD_ROWS steps, spread over the run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zslurm.checkpoint_tools.plain import StrPath
from zslurm.core.errors import ZslurmError
from zslurm.train.jsonl import parse_line

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

LOAD_ROWS = 512
"""Steps whose loads of the experts are kept, at most."""

_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class LoadRow:
    """How evenly the experts were used in one step.

    Attributes:
        step: its number.
        entropy: of each layer, in [0, 1].
        shares: for each layer the share of the choices of each class, the skip class last.
    """

    step: int
    entropy: list[float]
    shares: list[list[float]]


@dataclass(repr=False)
class Metrics:
    """The lines of a run's metrics.jsonl, by kind.

    Attributes:
        steps: the kept steps by number: a column (numpy) for each number in their lines.
        all_steps: the same of every step line, in the order of the file.
        kept: for each line of `all_steps`, whether its step was kept.
        phases: the phase of each line of `all_steps`.
        path: the file.
        damaged: lines that were skipped because they are not whole or not sound.
        load: of some steps, how evenly the experts were used.
        others: the lines of each kind but `step`, oldest first.
    """

    path: Path
    damaged: int = 0
    load: list[LoadRow] = field(default_factory=list)
    others: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _numbers: dict[str, array[float]] = field(default_factory=dict)
    _phases: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """Describe the file: how many lines of each kind it has."""
        kinds = {"step": len(self._phases)} | {kind: len(rows) for kind, rows in self.others.items()}
        lines = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"Metrics({str(self.path)!r}, lines: {lines}{f', {self.damaged} damaged' if self.damaged else ''})"

    @property
    def phases(self) -> list[str]:
        """The phase of each line of `all_steps`."""
        return self._phases

    @cached_property
    def all_steps(self) -> dict[str, NDArray[np.float64]]:
        """Every step line in the order of the file, also of work that was lost: a column for each number.

        Nested fields have a dot in their name (`time_split_s.forward`); a value that a line lacks is NaN.
        """
        import numpy as np

        return {name: np.frombuffer(column) for name, column in self._numbers.items() if len(column)}

    @cached_property
    def kept(self) -> NDArray[np.bool_]:
        """For each line of `all_steps`, whether its step was kept: no later line is of that step or one before."""
        import numpy as np

        if "step" not in self.all_steps:
            return np.zeros(0, bool)
        steps = self.all_steps["step"]
        later = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], math.inf)
        return steps < later

    @cached_property
    def steps(self) -> dict[str, NDArray[np.float64]]:
        """The kept steps, by number: a column for each number in their lines."""
        return {name: column[self.kept] for name, column in self.all_steps.items()}

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind other than `step`, oldest first."""
        return self.others.get(kind, [])

    def frame(self, kind: str = "step", *, all_attempts: bool = False) -> pd.DataFrame:
        """Return the lines of one kind as a DataFrame; the one of steps has the step as its index.

        Args:
            kind: `step`, `evaluation`, `checkpoint`, `skipped` or `evaluation_command`.
            all_attempts: also steps that a restart took again; a column `kept` shows which were not.

        Raises:
            ZslurmError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ZslurmError("a DataFrame needs pandas, which is not installed; `pip install pandas`") from None
        if kind != "step":
            return pd.json_normalize(self.rows(kind))
        columns: dict[str, Any] = dict(self.all_steps)
        if not columns:
            return pd.DataFrame()
        columns["phase"] = self._phases
        frame = pd.DataFrame(columns).astype({name: "int64" for name in ("step", "attempt") if name in columns})
        frame["time"] = pd.to_datetime(frame["time"], unit="s", utc=True)
        frame["kept"] = self.kept
        if not all_attempts:
            frame = frame[frame["kept"]].drop(columns="kept")
        return frame.set_index("step")


def read_metrics(run: StrPath) -> Metrics:
    """Read a run's metrics: `run` is its directory, or the file itself. A file that is missing is empty.

    Raises:
        ZslurmError: the file cannot be read.
    """
    path = Path(run)
    path = path / _NAME if path.is_dir() else path
    metrics = Metrics(path)
    detail = _Thinned(metrics.load)
    try:
        for row in _sound_rows(path, metrics):
            kind = row.get("kind")
            if kind != "step":
                metrics.others.setdefault(str(kind), []).append(row)
            elif isinstance(row.get("step"), int):
                _add_step(metrics, row)
                detail.add(row)
            else:
                metrics.damaged += 1
    except OSError as error:
        raise ZslurmError(f"{path}: cannot be read: {error.strerror or error}") from error
    return metrics


def _sound_rows(path: Path, metrics: Metrics) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; count what is damaged, but not a last line that is still being written."""
    try:
        with path.open("rb") as file:
            for line in file:
                row = parse_line(line)
                if row is not None and isinstance(row.get("kind"), str):
                    yield row
                elif line.endswith(b"\n") and line.strip():
                    metrics.damaged += 1
    except FileNotFoundError:
        return


def _add_step(metrics: Metrics, row: Mapping[str, Any]) -> None:
    count = len(metrics._phases)
    for name, value in _numbers(row):
        column = metrics._numbers.get(name)
        if column is None:
            column = metrics._numbers[name] = array("d", [math.nan]) * count
        column.append(value)
    metrics._phases.append(str(row.get("phase", "")))
    for column in metrics._numbers.values():
        if len(column) <= count:
            column.append(math.nan)


def _numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            yield prefix + name, float(value)
        elif isinstance(value, dict) and not prefix:
            yield from _numbers(value, f"{name}.")


class _Thinned:
    """Keeps every n-th of the rows with loads, and doubles n whenever there are too many."""

    def __init__(self, kept: list[LoadRow]) -> None:
        self._kept, self._every, self._seen = kept, 1, 0

    def add(self, row: Mapping[str, Any]) -> None:
        entropy, shares = row.get("load_entropy_by_layer"), row.get("load_shares")
        if not _is_matrix([entropy]) or not _is_matrix(shares):
            return
        if self._seen % self._every == 0:
            if len(self._kept) == LOAD_ROWS:
                del self._kept[1::2]
                self._every *= 2
            if self._seen % self._every == 0:
                self._kept.append(LoadRow(row["step"], entropy, shares))  # type: ignore[arg-type]
        self._seen += 1


def _is_matrix(value: object) -> bool:
    """Return whether a value of JSON is a list of lists of numbers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and all(isinstance(x, float | int) for x in row) for row in value)
    )
