"""From the values of documents to the scores of a task, and how they are reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zslurm.train.evaluation.tasks.metrics import score
from zslurm.train.evaluation.tasks.questions import chains_of
from zslurm.train.evaluation.tasks.task import TaskConfig


@dataclass(frozen=True)
class Result:
    """The scores of a task.

    Attributes:
        task: its name.
        metrics: scores by the metric's name, with the name of its filter where it has one.
        stderr: their standard errors; None where one document gives none.
        higher_is_better: by the metric's name.
        documents: that were asked about.
        tokens: that the model computed for them, on all ranks.
        seconds: that it took.
    """

    task: str
    metrics: dict[str, float]
    stderr: dict[str, float | None]
    higher_is_better: dict[str, bool]
    documents: int
    tokens: int
    seconds: float

    def fields(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def names_of(config: TaskConfig) -> list[str]:
    """Return the names of a task's scores: its metrics, exact_match once for each chain of filters."""
    names: list[str] = []
    for metric in config.metrics:
        if metric.kind == "exact_match" and config.output_type == "generate_until":
            names += [f"exact_match{suffix}" for suffix, _ in chains_of(config)]
        else:
            names.append(metric.metric)
    return list(dict.fromkeys(names))


def result_of(config: TaskConfig, values: NDArray[np.float64], tokens: int, seconds: float) -> Result:
    """Return the scores of the values and weights of all documents [documents, metrics, 2]."""
    metrics, errors, higher = dict[str, float](), dict[str, float | None](), dict[str, bool]()
    for column, name in enumerate(names_of(config)):
        kind = "pass@k" if name.startswith("pass@") else name.partition(",")[0]
        metrics[name], errors[name], higher[name] = score(kind, *values[:, column].T.tolist())
    return Result(config.task, metrics, errors, higher, len(values), tokens, seconds)


def as_metrics(results: Sequence[Result]) -> dict[str, Any]:
    """Return results as the fields of one line of metrics.jsonl: numbers by TASK/METRIC."""
    return {
        "scores": {f"{each.task}/{name}": value for each in results for name, value in each.metrics.items()},
        "stderr": {f"{each.task}/{name}": value for each in results for name, value in each.stderr.items()},
        "documents": {each.task: each.documents for each in results},
        "tokens": sum(each.tokens for each in results),
        "seconds": sum(each.seconds for each in results),
    }
