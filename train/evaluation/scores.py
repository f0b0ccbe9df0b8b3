"""The scores of a task, as they are recorded and reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TaskResult:
    """The scores of a task, or of a group of tasks.

    Attributes:
        task: its name.
        metrics: scores by the metric's name, followed by a comma and the name of its filter if it has one.
        stderr: their standard errors; None if lm-evaluation-harness gives none.
        higher_is_better: by the metric's name.
        documents: that were asked about.
    """

    task: str
    metrics: dict[str, float]
    stderr: dict[str, float | None]
    higher_is_better: dict[str, bool]
    documents: int

    def fields(self) -> dict[str, Any]:
        """Return the scores as JSON has them."""
        return asdict(self)


def as_metrics(results: Sequence[TaskResult]) -> dict[str, Any]:
    """Return results as fields of a line of metrics.jsonl: numbers by TASK/METRIC."""
    return {
        "scores": {f"{result.task}/{name}": value for result in results for name, value in result.metrics.items()},
        "stderr": {f"{result.task}/{name}": value for result in results for name, value in result.stderr.items()},
        "documents": {result.task: result.documents for result in results},
    }
