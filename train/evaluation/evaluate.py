"""Measure the validation loss: the same sequences every time, divided over the ranks, and no change in training.

The sequences are spread evenly over evaluation.data, and divided over the ranks, or the context groups if ranks
share sequences, in microbatches; these stay whole, unlike a step's (train/data/shares.py).
Every microbatch's loss is one element of a vector; the vectors are summed over ranks (adding zeros, which is
exact), then over microbatches in their order. So the result does not depend on the number of ranks, and is the
same bits wherever one microbatch's loss is.

Training continues as if nothing had been: no gradient is taken, no random number is drawn, loads are not counted.
Cost: a forward pass over the sequences and one all-reduce of a few numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zslurm.train.config import DataConfig, TrainConfig
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.sequences import PackedSequences, Sequences
from zslurm.train.data.training_data import ALONE, TrainingData
from zslurm.train.errors import DataError
from zslurm.train.evaluation.routing import RoutingCounter, RoutingFigures
from zslurm.train.evaluation.token_classes import token_classes
from zslurm.train.evaluation.validation_data import evenly, open_validation_data
from zslurm.train.model.head import IGNORED_TARGET
from zslurm.train.model.packing import document_bounds, documents_by_bounds, documents_of, valid_positions
from zslurm.train.model.zaya import Zaya
from zslurm.train.parallel.world import World
from zslurm.train.schedule import due
from zslurm.train.sections.metrics_config import EvaluationConfig
from zslurm.train.sections.phases import PhaseConfig


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far, among those that were evaluated at this context.

    Attributes:
        step: of the checkpoint.
        loss: on the validation data; of a task's metric its score, negative if a higher one is better.
        context: of the phase.
        metric: `loss`, or TASK/METRIC.
    """

    step: int
    loss: float
    context: int
    metric: str = "loss"


def better(now: Best, before: Best | None) -> Best | None:
    """Return the better one of two; if context or metric are others they do not compare: the newer one wins."""
    if not math.isfinite(now.loss):
        return before
    if before is None or (before.context, before.metric) != (now.context, now.metric):
        return now
    return before if before.loss <= now.loss else now


@dataclass(frozen=True)
class Evaluation:
    """One evaluation; the same on every rank."""

    loss: float  # mean cross-entropy of a token, in nats
    tokens: int  # how many were predicted; masked targets are not
    sequences: int  # in how many sequences
    context: int  # of how many tokens each
    seconds: float  # how long it took

    def fields(self) -> dict[str, Any]:
        """Return its fields in metrics.jsonl."""
        perplexity, bits = math.exp(min(self.loss, 700.0)), self.loss / math.log(2)
        return {"loss": self.loss, "perplexity": perplexity, "bits_per_token": bits, **asdict(self)}


class Evaluator:
    """The validation of a run; there is never one without validation data.

    Attributes:
        last: the newest evaluation, as a checkpoint of its step could be the best.
        routing: how the router routed in the last evaluation; None if that is not counted.
    """

    def __init__(self, corpus: Corpus | None, config: EvaluationConfig, data: DataConfig) -> None:
        """Evaluate on `corpus`, packing documents and keeping them apart if the training does."""
        self.corpus, self._config, self._training = corpus, config, data
        self._data = None if corpus is None else TrainingData({ALONE: corpus}, data.long_documents)
        self.last: Best | None = None
        self.routing: RoutingFigures | None = None

    @classmethod
    def open(cls, config: TrainConfig, tokenizer_sha256: str) -> Evaluator:
        """Open evaluation.data of a run whose data was made with that tokenizer.

        Raises:
            DataError: see `open_validation_data`.
        """
        corpus = None
        if (path := config.evaluation.data) is not None:
            corpus = open_validation_data(
                path,
                tokenizer_sha256=tokenizer_sha256,
                model=config.model,
                phases=config.phases,
                training=config.data,
            )
        return cls(corpus, config.evaluation, config.data)

    def is_due(self, step: int, *, last: bool, stop: bool) -> bool:
        """Return whether to evaluate after `step`.

        A run that was asked to stop saves first of all; an evaluation that it leaves out is not made up for.
        """
        return self.corpus is not None and (last or (due(self._config.every_steps, step) and not stop))

    @torch.no_grad()
    def evaluate(
        self,
        step: int,
        model: Zaya,
        phase: PhaseConfig,
        world: World,
        alive: Callable[[], None],
        context: ContextParallel | None = None,
    ) -> Evaluation:
        """Measure the loss after `step`, with context and RoPE base of `phase`; all ranks call it together.

        `context` are the ranks that share sequences in that phase. `alive` is called before each of this rank's
        microbatches.

        Raises:
            DataError: a token id is beyond the vocabulary, or no target counts.
        """
        assert self.corpus is not None and self._data is not None
        started = time.monotonic()
        packed = (phase.packing or self._training.packing) == "best_fit"
        indices = evenly(self._data.sequences(ALONE, phase.context, packed=packed), self._config.sequences)
        micro_batch = self._config.micro_batch or phase.micro_batch
        microbatches = -(-len(indices) // micro_batch)
        sums_2M = torch.zeros(2, microbatches, dtype=torch.float64, device=world.device)
        together = phase.context_parallel
        counter = self._counter(model)
        for j in range(world.rank // together, microbatches, world.size // together):
            alive()
            chosen = indices[j * micro_batch : (j + 1) * micro_batch]
            sequences = self._data.locate(np.zeros_like(chosen), chosen, phase.context, packed=packed)
            inputs = self._inputs(sequences, world.device)
            with nullcontext() if counter is None else counter.counting(*_routed(inputs, context)):
                sums_2M[0, j], _ = model(**inputs, rope_base=phase.rope_base, context=context)
            if context is None or context.rank == 0:
                sums_2M[1, j] = (inputs["targets_BS"] != IGNORED_TARGET).sum()
        dist.all_reduce(sums_2M, group=world.group)
        loss_sum, tokens = (math.fsum(sums_M) for sums_M in sums_2M.tolist())
        if not tokens:
            raise DataError(f"evaluation.data: {self.corpus.path}: none of its tokens counts as a target")
        self.routing = None if counter is None else counter.figures(world.group)
        self.last = Best(step, loss_sum / tokens, phase.context)
        seconds = time.monotonic() - started
        return Evaluation(loss_sum / tokens, int(tokens), len(indices), phase.context, seconds)

    def _counter(self, model: Zaya) -> RoutingCounter | None:
        """Return what counts the routing of an evaluation; None if nothing does."""
        if not self._config.routing:
            return None
        assert self.corpus is not None
        try:
            path = self.corpus.tokenizer_path()
        except DataError:  # then there are no kinds of tokens; all else can be counted
            return RoutingCounter(model, None)
        classes = torch.from_numpy(token_classes(path, model.config.vocab_size))
        return RoutingCounter(model, classes.to(model.embedding.weight.device))

    def _inputs(self, sequences: Sequences, device: torch.device) -> dict[str, Tensor]:
        """Return what the model takes of sequences: inputs, targets, and, if documents are kept apart, these."""
        assert self._data is not None
        read_BS = self._data.read(sequences)
        windows_BS = torch.from_numpy(read_BS.astype(np.int64)).to(device)
        tokens_BS, targets_BS = windows_BS[:, :-1], windows_BS[:, 1:]
        mask_BS = self._data.target_mask(sequences)
        if mask_BS is not None:
            targets_BS = targets_BS.masked_fill(torch.from_numpy(mask_BS).to(device) == 0, IGNORED_TARGET)
        inputs = {"tokens_BS": tokens_BS, "targets_BS": targets_BS}
        if isinstance(sequences, PackedSequences):
            bounds_N = torch.from_numpy(sequences.bounds()).to(device)
            filled_B = torch.from_numpy(sequences.filled).to(device)
            valid_BS = valid_positions(filled_B, tokens_BS)
            documents = {"document_BS": documents_by_bounds(bounds_N, tokens_BS), "valid_BS": valid_BS}
            return inputs | documents | {"bounds_N": bounds_N}
        if self._training.isolate_documents:
            end_token = self._data.header.end_token
            bounds_N = document_bounds(read_BS[:, :-1], end_token).to(device)
            return inputs | {"document_BS": documents_of(tokens_BS, end_token), "bounds_N": bounds_N}
        return inputs


def _routed(inputs: Mapping[str, Tensor], context: ContextParallel | None) -> tuple[Tensor, Tensor | None]:
    """Return the tokens that this rank's routers see, and which of them are no padding."""
    tokens_BS, valid_BS = inputs["tokens_BS"], inputs.get("valid_BS")
    if context is None:
        return tokens_BS, valid_BS
    every_BS = torch.ones_like(tokens_BS, dtype=torch.bool) if valid_BS is None else valid_BS
    return context.take(tokens_BS), context.take(every_BS, fill=False)
