"""The documents of a task: jsonl files, one object a line; which are questions, and which are examples."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from zslurm.checkpoint_tools.plain import in_words
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.errors import DataError
from zslurm.train.evaluation.tasks.task import Task

FEWSHOT_SEED = 1234
"""Seed of the examples that are drawn: that of lm-evaluation-harness."""

STDLIB = "python:stdlib"
"""As `data` of a task: modules of the standard library of the Python that runs."""
_MODULES = tuple(
    "abc ast bisect calendar copy csv difflib enum fnmatch fractions glob heapq keyword linecache mimetypes "
    "numbers pprint queue reprlib sched shlex stat string textwrap this timeit token trace types weakref".split()
)
_MODULE_CHARACTERS = 4000

Fields = dict[str, Any]


class Document(NamedTuple):
    """A document, and where it is from for messages: FILE, line N."""

    fields: Fields
    origin: str


class Documents(NamedTuple):
    """The documents of a task.

    Attributes:
        questions: what the model is asked, in the order of the file.
        pool: what examples are taken from.
        shared: the pool is the questions: one is never an example for itself.
    """

    questions: list[Document]
    pool: list[Fields]
    shared: bool


def load_documents(task: Task, limit: int | None = None) -> Documents:
    """Read the documents of a task, at most `limit` questions.

    Raises:
        DataError: a file is missing or wrong, or there are too few examples.
    """
    config = task.config
    files = _files(task)
    if config.data == STDLIB:
        return Documents(list(_standard_library())[: limit or config.limit], [], shared=False)
    if config.data is not None:
        asked, shown = "test", "fewshot" if config.fewshot_data is not None else "test"
        shared = shown == asked
    else:
        asked = _present(task, files, config.test_split or config.validation_split, "test_split")
        split = config.fewshot_config.split or config.fewshot_split or config.training_split
        shown = _present(task, files, split or config.validation_split or asked, "fewshot_split")
        # The first is the harness's rule, which draws one more where neither split is named as well.
        named = config.fewshot_config.split or config.fewshot_split
        shared = named == config.test_split or shown == asked
    questions = list(_read(task, files[asked]))
    limit = min(limit or len(questions), config.limit or len(questions))
    pool: list[Fields] = []
    if config.num_fewshot:
        samples = config.fewshot_config.samples
        if samples is not None and config.fewshot_config.split is None and config.fewshot_split is None:
            pool, shared = list(samples), False
        else:
            pool = [each.fields for each in (questions if shown == asked else _read(task, files[shown]))]
        if (indices := config.fewshot_config.fewshot_indices) is not None:
            if max(indices, default=0) >= len(pool):
                raise DataError(f"{task.path}: fewshot_config.fewshot_indices: there are {len(pool)} examples")
            pool = [pool[index] for index in indices]
        if len(pool) < config.num_fewshot + shared:
            raise DataError(
                f"{task.path}: num_fewshot ({config.num_fewshot}): {counted(len(pool), 'document')} can be taken"
            )
    return Documents(questions[:limit], pool, shared)


class Examples:
    """Chooses the examples of each question; called for the questions in their order."""

    def __init__(self, task: Task, documents: Documents) -> None:
        """Begin with the first question."""
        self._config, self._documents = task.config, documents
        self._random = Random(FEWSHOT_SEED)

    def of(self, question: Fields) -> list[Fields]:
        """Return the examples of the next question."""
        count, pool, shared = self._config.num_fewshot, self._documents.pool, self._documents.shared
        if not count:
            return []
        if self._config.fewshot_config.sampler == "first_n":
            return [each for each in pool if not shared or each != question][:count]
        drawn = self._random.sample(pool, count + shared)
        drawn = [each for each in drawn if not shared or each != question][:count]
        if len(drawn) < count:  # the pool has copies of the question
            others = [each for each in pool if each != question]
            drawn = self._random.sample(others, min(count, len(others)))
        return drawn


def _standard_library() -> Iterator[Document]:
    """Yield the beginnings of modules, those that are there."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for name in _MODULES:
        path = folder / f"{name}.py"
        if path.is_file():
            text = path.read_text(encoding="utf-8")[:_MODULE_CHARACTERS]
            yield Document({"module": name, "text": text}, str(path))


def _files(task: Task) -> dict[str, list[Path]]:
    """Return the files of each split."""
    config, folder = task.config, task.path.parent
    if config.data is not None:
        named: dict[str, Any] = {"test": config.data}
        if config.fewshot_data is not None:
            named["fewshot"] = config.fewshot_data
    else:
        given = (config.dataset_kwargs or {}).get("data_files")
        if not given:
            raise DataError(f"{task.path}: dataset_kwargs.data_files is missing: the jsonl file of each split")
        named = given if isinstance(given, dict) else {"train": given}
    return {
        split: [folder / Path(str(each)).expanduser() for each in (those if isinstance(those, list) else [those])]
        for split, those in named.items()
    }


def _present(task: Task, files: dict[str, list[Path]], split: str | None, key: str) -> str:
    if split is None:
        raise DataError(f"{task.path}: {key} is missing; dataset_kwargs.data_files has {', '.join(files)}")
    if split not in files:
        raise DataError(f"{task.path}: {key}: {split} is not in dataset_kwargs.data_files: {', '.join(files)}")
    return split


def _read(task: Task, paths: list[Path]) -> Iterator[Document]:
    for path in paths:
        count = 0
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        count += 1
                        yield Document(_fields(line, f"{path}, line {number}"), f"{path}, line {number}")
        except FileNotFoundError:
            raise DataError(f"{task.path}: {path}: no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read: {in_words(error)}") from error
        if not count:
            raise DataError(f"{path}: holds no document")


def _fields(line: str, origin: str) -> Fields:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{origin}: is not JSON") from None
    if not isinstance(fields, dict):
        raise DataError(f"{origin}: is no object of fields")
    if "\\ud" in line.lower():  # as JSON writes any character of two halves, whole or not
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{origin}: holds half of a surrogate pair, which is no text") from None
    return fields
