"""The newest rows of a metrics file, read from its end: a long run writes a hundred thousand of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zslurm.train.jsonl import lines_backwards, parse_line

_STEPS_TO_AVERAGE = 10  # one step's time may hold a checkpoint


@dataclass
class NewestRows:
    """The last row of each kind; empty if there is none yet."""

    step: dict[str, Any] = field(default_factory=dict)
    step_times: list[float] = field(default_factory=list)
    """Of the last steps."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """The last that was committed."""

    @property
    def step_time_s(self) -> float | None:
        """A usual step's time: the median of the last."""
        times = sorted(self.step_times)
        return times[len(times) // 2] if times else None


def newest_rows(path: Path) -> NewestRows:
    """Return the newest rows of `metrics.jsonl`; all empty if there is no such file."""
    rows = NewestRows()
    for line in lines_backwards(path):
        if b'"step"' in line and len(rows.step_times) < _STEPS_TO_AVERAGE:
            _take_step(rows, line)
        if not rows.evaluation and b'"evaluation"' in line:
            row = parse_line(line)
            rows.evaluation = row if row is not None and row.get("kind") == "evaluation" else {}
        if not rows.checkpoint and b'"COMMITTED"' in line:
            row = parse_line(line)
            rows.checkpoint = row if row is not None and row.get("kind") == "checkpoint" else {}
        if not rows.sources and b'"sources"' in line:  # one in every ten steps: no need to look further for it
            row = parse_line(line)
            rows.sources = row if row is not None and row.get("kind") == "sources" else {}
        if len(rows.step_times) == _STEPS_TO_AVERAGE and rows.evaluation and rows.checkpoint:
            break
    return rows


def newest_steps(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the newest rows of steps, oldest first, at most `count`.

    Of a step that was repeated the last counts.
    """
    rows: list[dict[str, Any]] = []
    for line in lines_backwards(path):
        row = parse_line(line) if b'"step"' in line else None
        if row is None or row.get("kind") != "step" or not isinstance(row.get("step"), int):
            continue
        if not rows or row["step"] < rows[-1]["step"]:
            rows.append(row)
        if len(rows) == count:
            break
    return rows[::-1]


def last_step_at(path: Path, attempt: int) -> float | None:
    """Return when an attempt finished its newest step (UNIX seconds); None if it has finished none.

    Every rank has finished it then: a step ends with what they compute together.
    """
    for line in lines_backwards(path):
        row = parse_line(line) if b'"step"' in line else None
        if row is not None and row.get("kind") == "step":
            return float(row["time"]) if row.get("attempt") == attempt and "time" in row else None
    return None


def _take_step(found: NewestRows, line: bytes) -> None:
    row = parse_line(line)
    if row is not None and row.get("kind") == "step":
        found.step = found.step or row
        found.step_times += [row["step_time_s"]] if row.get("step_time_s") is not None else []
