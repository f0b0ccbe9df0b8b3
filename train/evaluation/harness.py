"""Score a model with lm-evaluation-harness: its tasks, its metrics, and what it asks of a model.

    tasks = load_tasks(["hellaswag", "my_task.yaml"], include_path="tasks")
    for task in tasks:
        results, samples = score(task, TextModel(coder, context, ask))

The harness runs in one process. It asks for likelihoods and texts, and `ask` divides that over the ranks. This
file needs `lm_eval` (the extra `eval`).
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import datasets
import jinja2
import numpy as np
import yaml
from lm_eval import evaluator
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from zslurm.checkpoint_tools.plain import shorten
from zslurm.train.errors import DataError
from zslurm.train.evaluation.scores import TaskResult

BOOTSTRAP_DRAWS = 1000
"""For standard errors without a formula, such as a perplexity's; the harness's 100,000 take minutes."""
_LONGEST_MESSAGE = 400
_FEWSHOT_SEED = 1234
"""The harness's default."""
_TASK_ERRORS = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
    datasets.exceptions.DatasetsError,
    jinja2.TemplateError,
    yaml.YAMLError,
)
"""What the harness raises for a wrong task; a task's own Python code may raise any of them too."""


class Texts(Protocol):
    """What answers the harness, such as a `TextModel`; this file needs no torch."""

    def log_likelihoods(self, texts: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation behind its context, and whether it is the likeliest."""

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each text as a whole."""

    def continuations(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the text behind each context, by the keys of `generation_kwargs`."""


class HarnessTask(NamedTuple):
    """A task, or a group of tasks, with its documents.

    Attributes:
        reference: how it was named.
        content: what the harness evaluates: its tasks and groups by name.
    """

    reference: str
    content: dict[str, Any]

    def metrics(self) -> list[str]:
        """Return the names of the scores of single tasks, as TASK/METRIC."""
        return [
            f"{name}/{_metric_name(metric, filter_ensemble.name)}"
            for name, task in self.content["tasks"].items()
            for metric in task.aggregation()
            for filter_ensemble in task._filters
        ]

    def groups(self) -> list[str]:
        """Return the names of groups of tasks."""
        return list(self.content["groups"])


class _Model(LM):
    """What the harness asks."""

    def __init__(self, texts: Texts) -> None:
        super().__init__()
        self._texts = texts

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        return self._texts.log_likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        return self._texts.rolling_log_likelihoods([text for (text,) in (request.args for request in requests)])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        return self._texts.continuations([request.args for request in requests])


def load_tasks(
    references: Sequence[str],
    *,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    run_code: bool = False,
) -> list[HarnessTask]:
    """Load tasks with their documents, from the hub if they are there.

    Args:
        references: names of tasks, groups or tags of the harness, patterns such as `mmlu_*`, and YAML files; paths
            in these are relative to their folder.
        include_path: a folder with more tasks; paths in them are relative to it.
        num_fewshot: examples before each question, unless a task has none; None: the tasks' own.
        run_code: whether tasks that run what the model writes are accepted.

    Raises:
        DataError: there is no such task, or it cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # which the metric `code_eval` asks for
    names = [reference for reference in references if not _is_file(reference)]
    manager = TaskManager(include_path=_texts(include_path), include_defaults=False)
    if any(not name.endswith(".yaml") and not manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=_texts(include_path))  # reads 14,000 files
    loaded: list[HarnessTask] = []
    for reference in references:
        matches = [str(Path(reference).expanduser().absolute())]
        if not _is_file(reference):
            matches = manager.match_tasks([reference])
            if not matches:
                raise DataError(f"{reference}: no such task or file; `lm_eval ls tasks` lists the tasks")
        with _as_data_error(reference), _folder_of(matches, manager, include_path):
            content = manager.load(matches)
            for task in content["tasks"].values():
                _set_fewshot(task, num_fewshot)
        _check(reference, content["tasks"], loaded, run_code)
        loaded.append(HarnessTask(reference, content))
    return loaded


def score(
    task: HarnessTask, model: Texts, *, limit: int | None = None
) -> tuple[list[TaskResult], list[dict[str, Any]]]:
    """Return the scores of a task's tasks and groups, and a sample for each document and filter.

    Raises:
        DataError: a question cannot be asked, or an answer not counted.
        TrainError: see `model.ask`.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # or the harness forks this process, for bootstrapping
    for inner_task in task.content["tasks"].values():
        inner_task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    with _as_data_error(task.reference), _seeded():
        outcome = evaluator.evaluate(
            _Model(model),
            task.content,
            limit=limit,
            bootstrap_iters=BOOTSTRAP_DRAWS,
            log_samples=True,
            confirm_run_unsafe_code=True,  # load_tasks has decided
        )
    samples = [{"task": name, **line} for name, lines in outcome["samples"].items() for line in lines]
    return _results(outcome), samples


def _results(found: Mapping[str, Any]) -> list[TaskResult]:
    """Return the harness's results; results of groups have as many documents as their tasks."""
    results = []
    for name, row in {**found["results"], **found.get("groups", {})}.items():
        metrics, stderr, higher = dict[str, float](), dict[str, float | None](), dict[str, bool]()
        for key, value in row.items():
            metric, comma, chain = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            shown = _metric_name(metric, chain)
            error = row.get(f"{metric}_stderr,{chain}")
            metrics[shown] = float(value)
            stderr[shown] = float(error) if isinstance(error, int | float) else None
            higher[shown] = found["higher_is_better"].get(name, {}).get(metric) is not False
        if metrics:
            results.append(TaskResult(name, metrics, stderr, higher, int(row["sample_len"])))
    return results


def _metric_name(metric: str, chain: str) -> str:
    """Return the name of a score; `none` is what the harness calls no filters."""
    return metric if chain == "none" else f"{metric},{chain}"


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Set the number of examples by the harness's rules: a task with 0 keeps it."""
    configured = task.get_config("num_fewshot")
    if configured is None or (num_fewshot is not None and configured != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)


def _check(reference: str, tasks: Mapping[str, Any], before: Sequence[HarnessTask], run_code: bool) -> None:
    for name, task in tasks.items():
        if any(name in earlier.content["tasks"] for earlier in before):
            raise DataError(f"{reference}: a task called {name} is given already; name it once")
        if getattr(task, "MULTIMODAL", False):
            raise DataError(f"{reference}: {name} asks about images or sound, which the model cannot read")
        if getattr(task, "UNSAFE_CODE", False) and not run_code:
            raise DataError(
                f"{reference}: {name} runs the programs that the model writes, without a sandbox; allow it with "
                "--run-code of zslurm eval, in a container or a virtual machine"
            )


def _is_file(reference: str) -> bool:
    return Path(reference).expanduser().is_file()


def _texts(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _folder_of(
    matches: Sequence[str], manager: TaskManager, include_path: Path | None
) -> AbstractContextManager[None]:
    """Work in the folder that paths in task files are relative to, unless the tasks are the harness's own."""
    if _is_file(matches[0]):
        return chdir(Path(matches[0]).parent)
    file = manager.task_index[matches[0]].yaml_path
    if include_path is not None and file is not None and include_path.resolve() in Path(file).resolve().parents:
        return chdir(include_path)
    return nullcontext()


@contextmanager
def _as_data_error(reference: str) -> Iterator[None]:
    """Raise what is wrong with a task as one line."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{reference}: {error}") from error
    except _TASK_ERRORS as error:
        message = shorten(" ".join(str(error).split()), _LONGEST_MESSAGE)
        raise DataError(f"{reference}: {type(error).__name__}: {message}") from error


@contextmanager
def _seeded() -> Iterator[None]:
    """Give the tasks' own code the harness's seeds; the draws of this process continue afterwards as without."""
    states = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(_FEWSHOT_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
