"""Score weights on tasks, on one rank or on several processes of this machine that divide the questions.

    for result, samples in score_weights(request, ranks): ...

Each rank is a process with all weights, on GPUs one for each. They never talk to each other: each sends what it
found of a task, and the sum of all is the task's.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zslurm.checkpoint_tools import CheckpointError
from zslurm.checkpoint_tools.plain import in_words
from zslurm.train.checkpointing.load_weights import load_model
from zslurm.train.errors import TrainError
from zslurm.train.evaluation.scoring import ModelScorer, PreparedTask, Share
from zslurm.train.evaluation.tasks.scores import Result, result_of
from zslurm.train.evaluation.tasks.task import load_tasks
from zslurm.train.hub import Overrides, TokenizerFiles, open_weights
from zslurm.train.inference.text import TextCoder

_CONTEXT = multiprocessing.get_context("spawn")
_Message = Share | str | None


@dataclass(frozen=True)
class Request:
    """What to score.

    Attributes:
        weights: a checkpoint, or a folder in transformers' format.
        tasks: files of tasks, or names of shipped ones.
        tokenizer: of the weights.
        dtype: to compute in.
        device: `cpu`, or `cuda`: rank r takes GPU r.
        rope_base: of the weights' rotary embedding.
        context: tokens of a sequence at most.
        batch: prompts that are continued at one time on each rank.
        limit: documents of each task at most.
        seed: of draws.
    """

    weights: Path
    tasks: tuple[str, ...]
    tokenizer: TokenizerFiles
    dtype: torch.dtype
    device: str
    rope_base: float
    context: int
    batch: int = 32
    limit: int | None = None
    seed: int = 0


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
    readers: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for rank in range(ranks):
            reader, writer = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank, args=(rank, ranks, request, writer), daemon=True)
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        for rank, reader in enumerate(readers):
            _receive(reader, rank)  # that it is ready
        for each in prepared:
            started = time.monotonic()
            shares = [_receive(reader, rank) for rank, reader in enumerate(readers)]
            found = [share for share in shares if isinstance(share, Share)]
            values = np.sum([share.values for share in found], axis=0)
            tokens = sum(share.tokens for share in found)
            result = result_of(each.task.config, values, tokens, time.monotonic() - started)
            yield result, _in_order([sample for share in found for sample in share.samples])
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _in_order(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda sample: sample["document"])


def _receive(reader: Connection, rank: int) -> _Message:
    try:
        message: _Message = reader.recv()
    except EOFError:
        raise TrainError(f"rank {rank} of --ranks was killed; is there memory for all ranks?") from None
    if isinstance(message, str):
        raise TrainError(f"rank {rank} of --ranks: {message}")
    return message


def _scorer(request: Request, device: torch.device) -> ModelScorer:
    with open_weights(request.weights, Overrides(request.rope_base, request.context)) as weights:
        tokens, vocabulary = weights.settings.tokens, weights.settings.model.vocab_size
        model = load_model(weights, dtype=request.dtype, device=device)
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
    """Score one rank's share of all tasks; send None when it has the weights, then each share, or why not."""
    try:
        device = torch.device(request.device, rank if request.device == "cuda" else 0)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        prepared = [PreparedTask(task, request.limit) for task in load_tasks(request.tasks)]
        scorer = _scorer(request, device)
        answer.send(None)
        for each in prepared:
            answer.send(scorer.share(each, rank, ranks))
    except BrokenPipeError:
        pass  # the result is not wanted any more
    except (CheckpointError, TrainError) as error:
        answer.send(str(error))
    except (RuntimeError, OSError) as error:
        answer.send(in_words(error))
