"""Score a model on tasks: the trainer's own weights, questions in batches, divided over ranks.

    likelihoods     questions are sorted by their length and cut into groups of some GROUP_TOKENS, which are dealt
                    out to the ranks. A group is computed as a whole, so that its bits do not depend on the number
                    of ranks.
    generation      each rank continues its share of the prompts by continuous batching
    commands        run on the rank that generated, several at a time

Each rank returns a row of values for each of its documents and zeros for the others: summed over the ranks (adding
zeros is exact) they are those of all documents. From these every rank computes the same scores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.errors import DataError
from zslurm.train.evaluation.tasks.metrics import pass_at_k
from zslurm.train.evaluation.tasks.questions import (
    Question,
    Values,
    answer_values,
    likelihood_values,
    questions_of,
    rolling_values,
)
from zslurm.train.evaluation.tasks.sandbox import Sandbox, open_sandbox
from zslurm.train.evaluation.tasks.scores import Result, names_of, result_of
from zslurm.train.evaluation.tasks.task import Task
from zslurm.train.evaluation.tasks.template import render
from zslurm.train.inference.batch_generation import Prompt, Stops, generate_batch, tokens_that_fit
from zslurm.train.inference.likelihood import Asked, LikelihoodScorer
from zslurm.train.inference.text import StopStrings, TextCoder, until
from zslurm.train.model.zaya import Zaya

GROUP_TOKENS = 2048
"""Tokens of the documents whose likelihoods are computed together."""
_Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a context, and of what follows."""
_SHARED_TOKENS = 32  # tokens that all contexts begin with, from which on they are read once


@dataclass
class Share:
    """What one rank found.

    Attributes:
        values: of each document and metric the value and its weight; zeros for documents of other ranks.
        tokens: that were computed.
        samples: of each document of this rank what was asked and answered, as JSON has it.
    """

    values: NDArray[np.float64]
    tokens: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)


class PreparedTask:
    """A task with its questions, made before a model is there: whatever is wrong with the files shows here.

    Attributes:
        task: the task.
        questions: of its documents.
        names: of its scores.
        sandbox: runs what is generated, where the task has a command.
    """

    def __init__(self, task: Task, limit: int | None = None) -> None:
        """Read the task's documents, at most `limit` of them.

        Raises:
            DataError: something is wrong with them; or the command of a task cannot be run with its limits here.
        """
        self.task, self.questions = task, questions_of(task, limit)
        self.sandbox: Sandbox | None = None
        if task.config.execution is not None:
            _program(
                task, self.questions[0], ""
            )  # a template that lacks a field shows before anything is generated
            self.sandbox = open_sandbox(task.config.execution, str(task.path))

        self.names = names_of(task.config)


class ModelScorer:
    """Scores a model whose weights do not change meanwhile."""

    def __init__(
        self,
        model: Zaya,
        coder: TextCoder,
        *,
        rope_base: float,
        context: int,
        batch: int = 32,
        seed: int = 0,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare.

        Args:
            model: the model, on any device.
            coder: its tokenizer.
            rope_base: base of its rotary embedding.
            context: tokens of a sequence at most; longer contexts lose their beginning.
            batch: prompts that are continued at one time.
            seed: of the draws, where a task has any.
            alive: called before each pass.
        """
        self._model, self._coder, self._rope_base = model, coder, rope_base
        self._context, self._batch, self._seed, self._alive = context, batch, seed, alive

    def share(self, prepared: PreparedTask, rank: int = 0, ranks: int = 1) -> Share:
        """Score this rank's share of a task.

        Raises:
            DataError: a question has no tokens to score, or no room in the context.
        """
        found = Share(np.zeros((len(prepared.questions), len(prepared.names), 2)))
        if prepared.task.config.output_type == "generate_until":
            self._generate(prepared, rank, ranks, found)
        else:
            self._likelihoods(prepared, rank, ranks, found)
        return found

    def score(self, prepared: PreparedTask) -> tuple[Result, Share]:
        """Score a whole task on this rank."""
        started = time.monotonic()
        share = self.share(prepared)
        seconds = time.monotonic() - started
        return result_of(prepared.task.config, share.values, share.tokens, seconds), share

    # --- likelihoods ------------------------------------------------------------------------------------------

    def _likelihoods(self, prepared: PreparedTask, rank: int, ranks: int, found: Share) -> None:
        rolling = prepared.task.config.output_type == "loglikelihood_rolling"
        if rolling:
            pairs = [self._windows(each) for each in prepared.questions]
        else:
            encoded = iter(self._coder.pairs([pair for each in prepared.questions for pair in each.pairs]))
            pairs = [self._pairs(each, [next(encoded) for _ in each.pairs]) for each in prepared.questions]
        # Contexts that are the same, as those of the choices of one document are, are read once.
        asked = [_by_context(those) for those in pairs]
        common = _common([each.context for those in asked for each, _ in those])
        sizes = [sum(each.tokens - len(common) for each, _ in those) for those in asked]
        groups = _groups(sorted(range(len(asked)), key=lambda index: -sizes[index]), sizes)
        scorer = LikelihoodScorer(self._model, self._rope_base, self._alive)
        scorer.share(common)
        for chosen in groups[rank::ranks]:
            scores = iter(scorer.score([each for index in chosen for each, _ in asked[index]]))
            for index in chosen:
                likely = [0.0] * len(pairs[index])
                greedy = [True] * len(pairs[index])
                for _, places in asked[index]:
                    for place, one in zip(places, next(scores), strict=True):
                        likely[place], greedy[place] = one
                question = prepared.questions[index]
                if rolling:
                    tokens = sum(len(continuation) for _, continuation in pairs[index])
                    values = rolling_values(question, sum(likely), tokens)
                else:
                    values = likelihood_values(question, likely, greedy)
                _keep(prepared, question, values, found, {"log_likelihoods": likely})
        found.tokens = scorer.computed_tokens

    def _pairs(self, question: Question, encoded: Sequence[_Pair]) -> list[_Pair]:
        """Return the tokens of contexts and continuations; both fit into the context but for the last token."""
        made: list[_Pair] = []
        for place, (context_ids, ids) in enumerate(encoded):
            if not ids:
                raise DataError(
                    f"{question.origin}: choice {place + 1} ({question.pairs[place][1][:40]!r}) adds no token to "
                    "its question"
                )
            if len(ids) > self._context:
                raise DataError(
                    f"{question.origin}: choice {place + 1} has {counted(len(ids), 'token')}, "
                    f"the context {self._context}"
                )
            room = self._context + 1 - len(ids)
            made.append((context_ids[-room:], ids))
        return made

    def _windows(self, question: Question) -> list[_Pair]:
        """Cut a text into windows of the context's length, each token in one of them with all before it there.

        The first begins with the token that begins a text. The last one is as long as the others, and counts only
        what those did not.
        """
        assert question.text is not None
        ids, size = self._coder.encode(question.text), self._context
        if not ids:
            raise DataError(f"{question.origin}: its text has no token")
        made: list[_Pair] = [((self._coder.prefix,), ids[:size])]
        for start in range(size, len(ids), size):
            end = min(len(ids), start + size)
            first = max(0, end - size - 1)
            made.append((ids[first:start], ids[start:end]))
        return made

    # --- generation -------------------------------------------------------------------------------------------

    def _generate(self, prepared: PreparedTask, rank: int, ranks: int, found: Share) -> None:
        config = prepared.task.config
        settings, repeats = config.generation_kwargs, config.repeats
        new = settings.max_gen_toks
        if new >= self._context:
            raise DataError(
                f"{prepared.task.path}: generation_kwargs.max_gen_toks ({new}) leaves no room for a prompt in the "
                f"context of {self._context}"
            )
        mine = prepared.questions[rank::ranks]
        encoded = {each.index: self._prompt(each, self._context - new) for each in mine}
        order = sorted(
            mine, key=lambda each: -len(encoded[each.index])
        )  # the long ones first: less is idle at the end
        prompts = [
            Prompt(
                encoded[each.index],
                new,
                settings.drawn_at,
                settings.top_p,
                seed=((self._seed * 1_000_003 + each.index) * 10_007 + sample) % 2**63,
            )
            for each in order
            for sample in range(repeats)
        ]

        def stopper(index: int, prompt: Prompt) -> Stops:
            return StopStrings(self._coder.tokenizer, config.stops)

        answers: dict[int, list[str]] = {each.index: [""] * repeats for each in order}
        missing = {each.index: repeats for each in order}
        by_index = {each.index: each for each in order}
        counting = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0))))
        pending = []
        with counting:
            made = generate_batch(
                self._model,
                prompts,
                rope_base=self._rope_base,
                eos_ids=self._coder.end,
                most=self._batch,
                most_tokens=tokens_that_fit(self._model, self._context),
                stopper=stopper,
                alive=self._alive,
            )
            for each in made:
                question = order[each.index // repeats]
                text = until(self._coder.decode(each.tokens), config.stops)
                answers[question.index][each.index % repeats] = text
                found.tokens += len(each.tokens) + len(prompts[each.index].ids)
                missing[question.index] -= 1
                if not missing[question.index]:
                    samples = answers[question.index]
                    pending.append((question.index, counting.submit(_count, prepared, question, samples)))
            for index, counted in sorted(pending, key=lambda each: each[0]):
                while not counted.done():
                    self._alive()
                    time.sleep(0.05)
                values, runs = counted.result()
                _keep(prepared, by_index[index], values, found, {"answers": answers[index], **runs})

    def _prompt(self, question: Question, room: int) -> tuple[int, ...]:
        assert question.prompt is not None
        ids = self._coder.encode(question.prompt) or (self._coder.prefix,)
        return ids[-room:]


def _count(prepared: PreparedTask, question: Question, samples: list[str]) -> tuple[Values, dict[str, Any]]:
    """Return the values of a question's samples, and how the commands went."""
    values, config = answer_values(prepared.task, question, samples), prepared.task.config
    if prepared.sandbox is None or config.execution is None:
        return values, {}
    runs = []
    for sample in samples:
        runs.append(prepared.sandbox.run(_program(prepared.task, question, sample)))
    passed = sum(run.passed for run in runs)
    for metric in config.metrics:
        if metric.kind == "pass@k":
            values[metric.metric] = pass_at_k(len(samples), passed, metric.k), 1.0
    return values, {"runs": [run._asdict() for run in runs]}


def _program(task: Task, question: Question, sample: str) -> str:
    """Return the program of a sample.

    Raises:
        DataError: its template names a field that the document does not have.
    """
    assert task.config.execution is not None
    try:
        fields = {**question.fields, "completion": sample}
        return render("execution.program", task.config.execution.program, fields)
    except DataError as error:
        raise DataError(f"{task.path}: {question.origin}: {error}") from error


def _keep(
    prepared: PreparedTask, question: Question, values: Values, found: Share, details: dict[str, Any]
) -> None:
    names = prepared.names
    for column, name in enumerate(names):
        found.values[question.index, column] = values[name]
    asked = question.prompt or question.text or [context for context, _ in question.pairs]
    counted = {name: values[name][0] for name in names}
    found.samples.append({"document": question.index, "asked": asked, **details, "values": counted})


def _groups(order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Cut documents into groups of GROUP_TOKENS tokens at most, or one document."""
    groups, total = list[list[int]](), 0
    for index in order:
        total += sizes[index]
        if not groups or total > GROUP_TOKENS:
            groups.append([])
            total = sizes[index]
        groups[-1].append(index)
    return groups


def _by_context(
    pairs: Sequence[_Pair],
) -> list[tuple[Asked, list[int]]]:
    """Put the continuations of one context together, with their places among all."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, (context, _) in enumerate(pairs):
        places.setdefault(context, []).append(place)
    return [
        (Asked(context, tuple(pairs[place][1] for place in those)), those) for context, those in places.items()
    ]


def _common(contexts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return what all contexts begin with, if reading it once is worth it; every context continues after it."""
    if len(contexts) < 2:
        return ()
    least, most = min(contexts), max(contexts)
    length = 0
    while length < min(len(least), len(most)) - 1 and least[length] == most[length]:
        length += 1
    return least[:length] if length >= _SHARED_TOKENS else ()
