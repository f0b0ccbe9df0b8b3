"""A task file: YAML that names documents, how they become questions, and how answers are counted.

The keys are those of lm-evaluation-harness (0.4), as far as they mean something here: most of its tasks whose
templates are jinja are task files once their data is a jsonl file. Python in a task (`!function`) is refused:
write a template. docs/evaluation.md has the whole form.
"""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from zslurm.checkpoint_tools.plain import in_words
from zslurm.train.errors import DataError
from zslurm.train.evaluation.tasks.filters import Filter
from zslurm.train.evaluation.tasks.metrics import METRICS, MetricConfig, defaults_of
from zslurm.train.sections.section import Count, NonNegative, Positive, Section, Whole

OutputType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"]

_UNUSED = frozenset(
    "tag group task_alias metadata should_decontaminate doc_to_decontamination_query dataset_name version".split()
)
"""Keys of lm-evaluation-harness that change no score here."""

_NAME = re.compile(r"[\w.+-]{1,80}", re.ASCII)


_MOST = 1 << 30
"""Of any limit of a program: what Linux takes, and more than a machine has."""


class FewshotConfig(Section):
    """Where examples come from, and how they are written where that differs from the questions."""

    sampler: Literal["default", "first_n"] = "default"
    split: str | None = None
    samples: tuple[dict[str, Any], ...] | None = None
    fewshot_indices: tuple[Whole, ...] | None = None
    doc_to_text: str | None = None
    doc_to_choice: str | tuple[str, ...] | None = None
    doc_to_target: str | int | None = None
    fewshot_delimiter: str | None = None
    target_delimiter: str | None = None


class GenerationConfig(Section):
    """How answers are generated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    until: tuple[str, ...] | None = None
    max_gen_toks: Count = 256
    do_sample: bool | None = None
    temperature: NonNegative | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @field_validator("until", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def drawn_at(self) -> float:
        """Return the temperature; 0 for the likeliest token, as it is without `do_sample: true`."""
        if self.do_sample is False:
            return 0.0
        if self.temperature is None:
            return 1.0 if self.do_sample else 0.0
        return self.temperature


class FilterConfig(Section):
    """A named chain of filters; the metrics are counted once for each."""

    name: str
    filter: Annotated[tuple[Filter, ...], Field(min_length=1)]


class ExecutionConfig(Section):
    """A command that runs what was generated; the sample passes where it exits with 0."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    program: str = "{{prompt}}{{completion}}"
    file: str = "program.py"
    time_s: Annotated[Positive, Field(le=_MOST)] = 10.0
    memory_mb: Annotated[Count, Field(le=_MOST)] = 1024
    processes: Annotated[Count, Field(le=_MOST)] = 32
    file_mb: Annotated[Count, Field(le=_MOST)] = 16
    network: bool = False
    isolation: Literal["namespaces", "limits"] = "namespaces"

    @field_validator("command", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        words = shlex.split(value) if isinstance(value, str) else value
        if words in ([], [""]):
            raise ValueError("names no program")
        return words

    @field_validator("file")
    @classmethod
    def _a_plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[\w.-]+", value) or value.startswith("."):
            raise ValueError(f"file ({value}) must be a plain name, such as program.py")
        return value

    @model_validator(mode="after")
    def _cuts_off_what_it_can(self) -> ExecutionConfig:
        if self.isolation == "limits" and not self.network:
            raise ValueError("isolation: limits cannot cut off the network; say so with network: true")
        return self


class TaskConfig(Section):
    """The settings of a task."""

    task: str
    output_type: OutputType = "generate_until"
    data: str | None = None
    fewshot_data: str | None = None
    dataset_path: Literal["json"] | None = None
    dataset_kwargs: dict[str, Any] | None = None
    training_split: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    fewshot_split: str | None = None
    doc_to_text: str | int = ""
    doc_to_target: str | int | tuple[str, ...] = ""
    doc_to_choice: str | tuple[str, ...] | None = None
    gen_prefix: str | None = None
    description: str = ""
    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"
    num_fewshot: Whole = 0
    fewshot_config: FewshotConfig = FewshotConfig()
    generation_kwargs: GenerationConfig = GenerationConfig()
    repeats: Count = 1
    filter_list: tuple[FilterConfig, ...] | None = None
    metric_list: tuple[MetricConfig, ...] = ()
    execution: ExecutionConfig | None = None
    limit: Count | None = None

    @field_validator("num_fewshot", mode="before")
    @classmethod
    def _none_is_no_example(cls, value: object) -> object:
        return 0 if value is None else value

    @field_validator("doc_to_choice", mode="before")
    @classmethod
    def _values_of_a_mapping(cls, value: object) -> object:
        return list(value.values()) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _goes_together(self) -> TaskConfig:
        if not _NAME.fullmatch(self.task):
            raise ValueError(f"task ({self.task}) must be a name of letters, digits, and . _ + -")
        if (self.data is None) == (self.dataset_path is None):
            raise ValueError("give data: FILE.jsonl, or dataset_path: json with dataset_kwargs.data_files")
        if self.output_type == "multiple_choice" and self.doc_to_choice is None:
            raise ValueError("doc_to_choice is missing, which output_type: multiple_choice needs")
        if self.output_type != "generate_until" and self.execution is not None:
            raise ValueError("execution needs output_type: generate_until")
        for metric in self.metrics:
            known = METRICS.get(metric.kind)
            if known is None or self.output_type not in known.output_types:
                those = ", ".join(name for name, each in METRICS.items() if self.output_type in each.output_types)
                raise ValueError(f"metric {metric.metric}: is not one of {self.output_type}; there are: {those}")
            if metric.kind == "pass@k":
                if self.execution is None:
                    raise ValueError(f"metric {metric.metric} needs execution: the command that runs a sample")
                if metric.k > self.repeats:
                    raise ValueError(
                        f"metric {metric.metric} needs repeats of {metric.k} or more, got {self.repeats}"
                    )
        if self.execution is not None and not any(metric.kind == "pass@k" for metric in self.metrics):
            raise ValueError("execution needs a metric that counts it, such as pass@1")
        if self.repeats > 1 and self.generation_kwargs.drawn_at == 0:
            raise ValueError("repeats above 1 need generation_kwargs.do_sample: true, or all samples are the same")
        return self

    @property
    def metrics(self) -> tuple[MetricConfig, ...]:
        """Return the metrics that are counted: those that are listed, or the usual ones of the output type."""
        return self.metric_list or defaults_of(self.output_type)

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the strings that end an answer."""
        until = self.generation_kwargs.until
        return (self.fewshot_delimiter,) if until is None else until


class Task(BaseModel):
    """A task and the file that it is from.

    Attributes:
        path: the file; paths in it are relative to its folder.
    """

    model_config = ConfigDict(frozen=True)

    path: Path
    config: TaskConfig

    @property
    def name(self) -> str:
        """Return its name."""
        return self.config.task


def shipped() -> dict[str, Path]:
    """Return the tasks that come with zslurm, by name."""
    folder = Path(str(resources.files("zslurm.train.evaluation.tasks"))) / "shipped"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def load_task(reference: str) -> Task:
    """Read a task: a YAML file, or the name of one that is shipped.

    Raises:
        DataError: there is none, or it is wrong; one line that names the file, the key and what to do.
    """
    path = Path(reference).expanduser()
    if not path.is_file():
        own = shipped()
        if reference not in own:
            raise DataError(f"{reference}: no such task file; shipped tasks: {', '.join(own)}")
        path = own[reference]
    raw = _read(path, ())
    try:
        return Task(path=path.absolute(), config=TaskConfig.model_validate(raw))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "is no key of a task; docs/evaluation.md has all of them"
        raise DataError(f"{path}: {where + ': ' if where else ''}{message}") from error


def load_tasks(references: tuple[str, ...] | list[str]) -> list[Task]:
    """Read tasks, each name once.

    Raises:
        DataError: as `load_task`; or two tasks have one name.
    """
    tasks = [load_task(reference) for reference in references]
    for index, task in enumerate(tasks):
        if any(task.name == other.name for other in tasks[:index]):
            raise DataError(f"{task.path}: a task called {task.name} is given already; rename one of them")
    return tasks


def _read(path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
    """Return the keys of a file, over those of the file that it includes."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_TaskLoader)  # a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {in_words(error)}") from error
    except yaml.YAMLError as error:
        raise DataError(f"{path}: {_position(error)}") from error
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise DataError(f"{path}: is no task file: expected keys such as task, data and doc_to_text")
    included = raw.pop("include", None)
    if included is not None:
        base = path.parent / str(included)
        if base in including or base == path:
            raise DataError(f"{path}: include: {included} includes itself")
        raw = {**_read(base, (*including, path)), **raw}
    return {key: value for key, value in raw.items() if key not in _UNUSED and (value is not None)}


class _TaskLoader(yaml.SafeLoader):
    """YAML as lm-evaluation-harness reads it, without Python functions."""


def _refuse(loader: _TaskLoader, suffix: str, node: yaml.Node) -> None:
    raise yaml.constructor.ConstructorError(
        None,
        None,
        f"!{suffix} {node.value} is Python code, which a task cannot have here; write a jinja template",
        node.start_mark,
    )


_TaskLoader.add_multi_constructor("!", _refuse)


def _position(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "is not YAML"
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)
