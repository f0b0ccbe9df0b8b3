"""The tasks of a run's configuration: checked when the run is submitted, and loaded again by its first rank."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from zslurm.train.errors import ConfigError, DataError
from zslurm.train.sections.metrics_config import EvaluationConfig

if TYPE_CHECKING:
    from zslurm.train.evaluation.harness import HarnessTask


def load_run_tasks(config: EvaluationConfig, best_by: str) -> list[HarnessTask]:
    """Load evaluation.tasks with their documents.

    Raises:
        DataError: a task is wrong.
        ConfigError: lm-evaluation-harness is not installed, or checkpoint.best_by names no score of the tasks.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "evaluation.tasks needs lm_eval, which is not installed here: pip install 'zslurm-train[eval]'"
        )
    from zslurm.train.evaluation.harness import load_tasks

    try:
        tasks = load_tasks(config.tasks)
    except DataError as error:
        raise DataError(f"evaluation.tasks: {error}") from error
    metrics = [name for task in tasks for name in task.metrics()]
    groups = {group for task in tasks for group in task.groups()}
    if best_by != "loss" and best_by not in metrics and best_by.rpartition("/")[0] not in groups:
        raise ConfigError(f"checkpoint.best_by: {best_by}: evaluation.tasks has {', '.join(metrics)}")
    return tasks
