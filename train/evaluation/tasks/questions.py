"""From documents to what the model is asked: contexts and continuations, texts, or prompts.

Everything is put together as lm-evaluation-harness does it, character by character, so that scores compare.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zslurm.train.errors import DataError
from zslurm.train.evaluation.tasks.filters import filtered
from zslurm.train.evaluation.tasks.metrics import choice_values, exact_match
from zslurm.train.evaluation.tasks.task import Task, TaskConfig
from zslurm.train.evaluation.tasks.task_documents import Document, Documents, Examples, Fields, load_documents
from zslurm.train.evaluation.tasks.template import list_of, no_field, render, value_of

_WORDS = re.compile(r"\s+")

Values = dict[str, tuple[float, float]]
"""Of each metric a document's value and its weight."""


@dataclass(frozen=True)
class Question:
    """What the model is asked about one document.

    Attributes:
        index: of the document.
        origin: where it is from, for messages.
        fields: of the document.
        pairs: contexts, each with a continuation whose likelihood counts.
        text: whose likelihood counts as a whole.
        prompt: to be continued.
        choices: what the continuations are, without what joins them to their context.
        golds: places of the right choices.
        answers: right answers of what is generated.
    """

    index: int
    origin: str
    fields: Mapping[str, Any]
    pairs: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    prompt: str | None = None
    choices: tuple[str, ...] = ()
    golds: tuple[int, ...] = ()
    answers: tuple[str, ...] = field(default=())


def questions_of(task: Task, limit: int | None = None) -> list[Question]:
    """Return the questions of a task, in the order of its documents.

    Raises:
        DataError: a file, a document or a template is wrong; one line that names it.
    """
    documents = load_documents(task, limit)
    maker = _Maker(task, documents)
    return [maker.question(index, document) for index, document in enumerate(documents.questions)]


class _Maker:
    """Makes questions, one after another."""

    def __init__(self, task: Task, documents: Documents) -> None:
        self._task, self._examples = task, Examples(task, documents)
        self._usual = documents.questions[0].fields

    def question(self, index: int, document: Document) -> Question:
        config, fields = self._task.config, document.fields
        try:
            self._check_fields(config, fields)
            return self._question(config, index, document.origin, fields)
        except DataError as error:
            raise DataError(f"{self._task.path}: {document.origin}: {error}") from error

    def _check_fields(self, config: TaskConfig, fields: Fields) -> None:
        """Refuse a document without a field that a template names: its name would be taken as the text."""
        for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
            template = getattr(config, key)
            if isinstance(template, str) and template in self._usual and template not in fields:
                raise no_field(key, template, fields)

    def _question(self, config: TaskConfig, index: int, origin: str, fields: Fields) -> Question:
        prefix = self._prefix(config, fields)
        target = _target(config, config.doc_to_target, fields)
        if config.output_type == "loglikelihood_rolling":
            return Question(index, origin, fields, text=_text_of("doc_to_target", target))
        choices = _choices(config, config.doc_to_choice, fields)
        asked = _asked(config, config.doc_to_text, fields)
        if config.output_type == "multiple_choice":
            if not choices:
                raise DataError("doc_to_choice: makes no choice")
            if isinstance(asked, int):
                # Each choice is a context, and what follows is the same; doc_to_text is the right one's place.
                end = f"{config.target_delimiter}{_text_of('doc_to_target', target)}"
                pairs = [(prefix + self._with_prefix(config, choice, fields, ""), end) for choice in choices]
                golds = _golds(asked, choices, "doc_to_text")
            else:
                context = prefix + self._with_prefix(config, asked, fields, config.target_delimiter)
                pairs = [(context, f"{config.target_delimiter}{choice}") for choice in choices]
                golds = _golds(target, choices, "doc_to_target")
            return Question(index, origin, fields, tuple(pairs), choices=tuple(choices), golds=golds)
        context = prefix + self._with_prefix(
            config, _text_of("doc_to_text", asked), fields, config.target_delimiter
        )
        if config.output_type == "loglikelihood":
            return Question(index, origin, fields, ((context, _text_of("doc_to_target", target)),))
        if choices and isinstance(target, int):
            target = choices[_golds(target, choices, "doc_to_target")[0]]
        answers = tuple(map(str, target)) if isinstance(target, list | tuple) else (str(target),)
        return Question(index, origin, fields, prompt=context, answers=answers)

    def _prefix(self, config: TaskConfig, fields: Fields) -> str:
        """Return the description and the examples."""
        text = value_of("description", config.description, fields) if config.description else ""
        shown = config.fewshot_config
        delimiter = config.target_delimiter if shown.target_delimiter is None else shown.target_delimiter
        between = config.fewshot_delimiter if shown.fewshot_delimiter is None else shown.fewshot_delimiter
        for example in self._examples.of(fields):
            asked = _asked(config, config.doc_to_text if shown.doc_to_text is None else shown.doc_to_text, example)
            choice = config.doc_to_choice if shown.doc_to_choice is None else shown.doc_to_choice
            choices = _choices(config, choice, example)
            if isinstance(asked, int):
                asked, choices = choices[_golds(asked, choices, "doc_to_text")[0]], []
            target = _target(
                config, config.doc_to_target if shown.doc_to_target is None else shown.doc_to_target, example
            )
            if choices and isinstance(target, int):
                target = choices[_golds(target, choices, "doc_to_target")[0]]
            elif isinstance(target, list | tuple) and target:
                target = target[0]
            answer = str(target)
            if config.gen_prefix:
                answer = _joined(str(value_of("gen_prefix", config.gen_prefix, example)), answer, " ")
            text += f"{asked}{delimiter}{answer}{between}" if answer else f"{asked}"
        return str(text)

    def _with_prefix(self, config: TaskConfig, asked: str, fields: Fields, delimiter: str) -> str:
        """Return a question with what the answer is to begin with."""
        if not config.gen_prefix:
            return asked
        begin = str(value_of("gen_prefix", config.gen_prefix, fields))
        return _joined(asked, begin, delimiter) if begin else asked


def likelihood_values(question: Question, log_likelihoods: list[float], greedy: list[bool]) -> Values:
    """Return the values of a question whose continuations have these likelihoods (sums, in nats)."""
    if question.choices:
        values = choice_values(question.choices, log_likelihoods, greedy, question.golds)
        return {name: (value, 1.0) for name, value in values.items()}
    return {"perplexity": (log_likelihoods[0], 1.0), "acc": (float(greedy[0]), 1.0)}


def rolling_values(question: Question, log_likelihood: float, tokens: int) -> Values:
    """Return the values of a question whose text has this likelihood."""
    assert question.text is not None
    # Words are what lies between white space, the empty ends included, as lm-evaluation-harness counts them.
    words, size = len(_WORDS.split(question.text)), len(question.text.encode())
    return {
        "word_perplexity": (log_likelihood, words),
        "byte_perplexity": (log_likelihood, size),
        "bits_per_byte": (log_likelihood, size),
        "token_perplexity": (log_likelihood, tokens),
    }


def answer_values(task: Task, question: Question, samples: list[str]) -> Values:
    """Return the values of a question that was answered with these samples: those that need no command."""
    values: Values = {}
    for name, chain in chains_of(task.config):
        answers = filtered(chain, samples)
        for metric in task.config.metrics:
            if metric.kind == "exact_match":
                value = exact_match(metric, answers[0] if answers else "", question.answers)
                values[f"exact_match{name}"] = (value, 1.0)
    return values


def chains_of(config: TaskConfig) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the chains of filters, each with what it adds to the names of metrics."""
    if config.filter_list is None:
        return [("", ())]
    return [(f",{each.name}", each.filter) for each in config.filter_list]


def _asked(config: TaskConfig, template: str | int, fields: Fields) -> str | int:
    """Return the question's text, or the place of a choice where the choices are the contexts."""
    if isinstance(template, int):
        return template
    found = value_of("doc_to_text", template, fields)
    if config.output_type == "multiple_choice" and config.doc_to_choice is not None:
        if isinstance(found, int) and not isinstance(found, bool):
            return found
        if isinstance(found, str) and template not in fields and found.isdigit():
            return int(found)
    return _text_of("doc_to_text", found)


def _target(config: TaskConfig, template: str | int | tuple[str, ...], fields: Fields) -> Any:
    if not isinstance(template, str):
        return template
    if template in fields:
        return fields[template]
    text = render("doc_to_target", template, fields)
    if text.isdigit() and config.doc_to_choice is not None:
        return int(text)
    if len(text) >= 2 and text[0] == "[" and text[-1] == "]":
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text
    return text


def _choices(config: TaskConfig, template: str | tuple[str, ...] | None, fields: Fields) -> list[str]:
    if template is None:
        return []
    return list_of("doc_to_choice", template, fields) if isinstance(template, str) else list(template)


def _golds(target: Any, choices: list[str], key: str) -> tuple[int, ...]:
    """Return the places of the right choices."""
    golds = []
    for each in target if isinstance(target, list | tuple) else [target]:
        place = choices.index(each) if isinstance(each, str) and each in choices else each
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(choices):
            raise DataError(f"{key}: {str(each)[:60]!r} is none of the {len(choices)} choices")
        golds.append(place)
    if not golds:
        raise DataError(f"{key}: names no choice")
    return tuple(golds)


def _text_of(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{key}: makes no text: {str(value)[:60]}")
    return value


def _joined(first: str, second: str, delimiter: str) -> str:
    """Join two texts by the delimiter unless there is white space between them already."""
    if not first or first[-1].isspace() or second[:1].isspace():
        return first + second
    return first + delimiter + second
