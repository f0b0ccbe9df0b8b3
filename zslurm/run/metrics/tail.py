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
    """The newest rows of `metrics.jsonl`; all empty if there is no such file."""
    found = NewestRows()
    for line in lines_backwards(path):
        if b'"step"' in line and len(found.step_times) < _STEPS_TO_AVERAGE:
            _take_step(found, line)
        if not found.evaluation and b'"evaluation"' in line:
            row = parse_line(line)
            found.evaluation = row if row is not None and row.get("kind") == "evaluation" else {}
        if not found.checkpoint and b'"COMMITTED"' in line:
            row = parse_line(line)
            found.checkpoint = row if row is not None and row.get("kind") == "checkpoint" else {}
        if not found.sources and b'"sources"' in line:  # one in every ten steps: no need to look further for it
            row = parse_line(line)
            found.sources = row if row is not None and row.get("kind") == "sources" else {}
        if len(found.step_times) == _STEPS_TO_AVERAGE and found.evaluation and found.checkpoint:
            break
    return found


def newest_steps(path: Path, count: int) -> list[dict[str, Any]]:
    """The newest rows of steps, oldest first, at most `count`; of a step that was repeated the last counts."""
    found: list[dict[str, Any]] = []
    for line in lines_backwards(path):
        row = parse_line(line) if b'"step"' in line else None
        if row is None or row.get("kind") != "step" or not isinstance(row.get("step"), int):
            continue
        if not found or row["step"] < found[-1]["step"]:
            found.append(row)
        if len(found) == count:
            break
    return found[::-1]


def last_step_at(path: Path, attempt: int) -> float | None:
    """When an attempt finished its newest step (UNIX seconds); None if it has finished none.

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
