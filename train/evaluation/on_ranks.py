"""Score weights on tasks, on one rank or on several that divide the questions.

    for result, samples in score_weights(request, prepared, ranks): ...            ranks of this machine
    for result, samples in results_of(prepared, shares): ...                       ranks that are elsewhere

Each rank is a process with all weights, on GPUs one for each. They never talk to each other: each sends what it
found of a task (`score_as_rank`), and the sum of all is the task's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from zslurm.checkpoint_tools import CheckpointError
from zslurm.checkpoint_tools.plain import in_words
from zslurm.train.checkpointing.load_weights import load_model
from zslurm.train.errors import DataError, TrainError
from zslurm.train.evaluation.scoring import ModelScorer, PreparedTask, Share
from zslurm.train.evaluation.tasks.scores import Result, result_of
from zslurm.train.evaluation.tasks.task import load_tasks
from zslurm.train.hub import Overrides, TokenizerFiles, open_weights
from zslurm.train.inference.text import TextCoder
from zslurm.train.parallel.local_ranks import local_ranks, take_device, was_killed
from zslurm.train.parallel.world import DTYPES


@dataclass(frozen=True)
class Request:
    """What to score.

    Attributes:
        weights: a checkpoint, or a folder in transformers' format.
        tasks: files of tasks, or names of shipped ones.
        tokenizer: of the weights.
        dtype: to compute in, as `parallel.dtype` names it.
        device: `cpu`, or `cuda`: each rank of a node takes the GPU of its number there.
        rope_base: of the weights' rotary embedding.
        context: tokens of a sequence at most.
        batch: prompts that are continued at one time on each rank.
        limit: documents of each task at most.
        seed: of draws.
    """

    weights: Path
    tasks: tuple[str, ...]
    tokenizer: TokenizerFiles
    dtype: str
    device: str
    rope_base: float
    context: int
    batch: int = 32
    limit: int | None = None
    seed: int = 0

    def fields(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        found = asdict(self) | {"weights": str(self.weights)}
        found["tokenizer"] |= {
            "file": str(self.tokenizer.file),
            "others": [str(each) for each in self.tokenizer.others],
        }
        return found

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Request:
        """Return what `fields` are of."""
        files = fields["tokenizer"]
        others = tuple(Path(each) for each in files["others"])
        tokenizer = TokenizerFiles(Path(files["file"]), others, files["adds_special_tokens"])
        changed = {"weights": Path(fields["weights"]), "tasks": tuple(fields["tasks"]), "tokenizer": tokenizer}
        return cls(**fields | changed)


class RankOf(NamedTuple):
    """Which rank a process is: among all, and among those of its node."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


class Failure(NamedTuple):
    """Why a rank gave up; `usage` where what was asked is wrong, and not what happened."""

    text: str
    usage: bool

    def error(self, who: str) -> TrainError:
        """Return it as an error; what is wrong with a task is so on every rank."""
        return DataError(self.text) if self.usage else TrainError(f"{who}: {self.text}")


Message = Share | Failure | None
"""What a rank sends: None when it has the weights, then a share of each task; or why not."""


def score_weights(
    request: Request, prepared: list[PreparedTask], ranks: int = 1
) -> Iterator[tuple[Result, list[dict[str, Any]]]]:
    """Yield the result of each task, and its samples in the order of the documents.

    Raises:
        TrainError: a rank failed; the others are ended.
    """
    if ranks == 1:
        scorer = _scorer(request, torch.device(request.device))
        for each in prepared:
            result, share = scorer.score(each)
            yield result, _in_order(share.samples)
        return
    yield from results_of(prepared, _of_processes(request, len(prepared), ranks))


def results_of(
    prepared: list[PreparedTask], received: Iterator[list[Message]]
) -> Iterator[tuple[Result, list[dict[str, Any]]]]:
    """Yield the result of each task from what all ranks send: first that they are ready, then shares of a task."""
    next(received)
    for each in prepared:
        started = time.monotonic()
        shares = [share for share in next(received) if isinstance(share, Share)]
        values = np.sum([share.values for share in shares], axis=0)
        tokens = sum(share.tokens for share in shares)
        result = result_of(each.task.config, values, tokens, time.monotonic() - started)
        yield result, _in_order([sample for share in shares for sample in share.samples])


def _of_processes(request: Request, tasks: int, ranks: int) -> Iterator[list[Message]]:
    """Start ranks on this machine, and yield what all of them send, message by message.

    Raises:
        TrainError: a rank failed; it is noticed at once, whatever the others do.
    """
    with local_ranks(_rank, ranks, request) as readers:
        waiting: dict[Connection, deque[Message]] = {reader: deque() for reader in readers}
        left = dict.fromkeys(waiting, tasks + 1)
        while open_readers := [reader for reader, count in left.items() if count]:
            for ready in connection.wait(open_readers):
                reader = cast(Connection, ready)
                try:
                    message: Message = reader.recv()
                except EOFError:
                    raise was_killed(readers.index(reader)) from None
                if isinstance(message, Failure):
                    raise message.error(f"rank {readers.index(reader)} of --ranks")
                waiting[reader].append(message)
                left[reader] -= 1
            while all(waiting.values()):
                yield [messages.popleft() for messages in waiting.values()]


def _in_order(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda sample: sample["document"])


def _scorer(request: Request, device: torch.device) -> ModelScorer:
    with open_weights(request.weights, Overrides(request.rope_base, request.context)) as weights:
        tokens, vocabulary = weights.settings.tokens, weights.settings.model.vocab_size
        model = load_model(weights, dtype=DTYPES[request.dtype], device=device)
    coder = TextCoder.open(request.tokenizer, vocabulary, tokens.end, tokens.begin)
    return ModelScorer(
        model,
        coder,
        rope_base=request.rope_base,
        context=request.context,
        batch=request.batch,
        seed=request.seed,
    )


def _rank(rank: int, ranks: int, request: Request, answer: Connection) -> None:
    with suppress(BrokenPipeError):  # the result is not wanted any more
        score_as_rank(RankOf(rank, ranks, rank, ranks), request, answer.send)


def score_as_rank(who: RankOf, request: Request, send: Callable[[Message], None]) -> None:
    """Score one rank's share of all tasks, and send each as soon as it is there."""
    try:
        device = take_device(request.device, who.local_rank, who.local_ranks)
        prepared = [PreparedTask(task, request.limit) for task in load_tasks(request.tasks)]
        scorer = _scorer(request, device)
        send(None)
        for each in prepared:
            send(scorer.share(each, who.rank, who.ranks))
    except BrokenPipeError:
        raise
    except DataError as error:
        send(Failure(str(error), usage=True))
    except (CheckpointError, TrainError) as error:
        send(Failure(str(error), usage=False))
    except (RuntimeError, OSError) as error:
        send(Failure(in_words(error), usage=False))
