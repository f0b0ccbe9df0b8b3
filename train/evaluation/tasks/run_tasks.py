"""The tasks of a run's configuration, without torch: checked when the run is submitted, and again by each rank."""

from __future__ import annotations

from zslurm.train.errors import ConfigError, DataError
from zslurm.train.evaluation.tasks.questions import questions_of
from zslurm.train.evaluation.tasks.scores import names_of
from zslurm.train.evaluation.tasks.task import Task, load_tasks
from zslurm.train.sections.metrics_config import EvaluationConfig


def load_run_tasks(config: EvaluationConfig, best_by: str) -> list[Task]:
    """Read evaluation.tasks.

    Raises:
        DataError: a task file is wrong.
        ConfigError: checkpoint.best_by names no metric of them.
    """
    try:
        tasks = load_tasks(config.tasks)
    except DataError as error:
        raise DataError(f"evaluation.tasks: {error}") from error
    known = [f"{task.name}/{name}" for task in tasks for name in names_of(task.config)]
    if best_by != "loss" and best_by not in known:
        raise ConfigError(f"checkpoint.best_by: {best_by}: evaluation.tasks has {', '.join(known)}")
    return tasks


def check_tasks(config: EvaluationConfig, best_by: str) -> None:
    """Read evaluation.tasks with their documents, as every rank will.

    Raises:
        DataError, ConfigError: as `load_run_tasks`; or a document is wrong.
    """
    for task in load_run_tasks(config, best_by):
        try:
            questions_of(task, config.tasks_limit)
        except DataError as error:
            raise DataError(f"evaluation.tasks: {error}") from error
