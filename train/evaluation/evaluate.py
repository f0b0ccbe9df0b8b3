"""Measure the validation loss: the same sequences every time, divided over the ranks, and no change in training.

The sequences lie evenly over the whole of evaluation.data. They are taken in microbatches, which the ranks share
as they share those of a step; every microbatch's loss is put at its own place in one vector, the vectors are
summed over ranks (adding zeros, which is exact) and then over microbatches in their order. So the result does
not depend on the number of ranks, and is the same bits wherever one microbatch's loss is.

Training continues as if nothing had been: no gradient is taken, no random number is drawn, loads are not counted.
Cost: a forward pass over the sequences and one all-reduce of a few numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from zslurm.train.config import EvaluationConfig, PhaseConfig, TrainConfig
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.sampler import rank_microbatches
from zslurm.train.errors import DataError
from zslurm.train.evaluation.validation_data import evenly, open_validation_data
from zslurm.train.model.head import IGNORED_TARGET
from zslurm.train.model.packing import documents_of
from zslurm.train.model.zaya import Zaya
from zslurm.train.parallel.world import World
from zslurm.train.schedule import due


@dataclass(frozen=True)
class Best:
    """The checkpoint with the lowest loss so far, among those that were evaluated at this context."""

    step: int
    loss: float
    context: int

    def record(self) -> dict[str, Any]:
        """Return it as plain JSON, for a checkpoint's cursor."""
        return {"step": self.step, "loss": self.loss, "context": self.context}

    @staticmethod
    def of(record: dict[str, Any] | None) -> Best | None:
        """Read it from a checkpoint's cursor; None where it has none."""
        return Best(**record) if record else None


def better(now: Best, before: Best | None) -> Best | None:
    """Return the better one of two; losses at another context do not compare, so the newer one wins then."""
    if not math.isfinite(now.loss):
        return before
    return before if before is not None and before.context == now.context and before.loss <= now.loss else now


@dataclass(frozen=True)
class Evaluation:
    """One evaluation; the same on every rank.

    Attributes:
        loss: mean cross-entropy of a token, in nats.
        tokens: how many were predicted; masked targets are not.
        sequences: in how many sequences.
        context: of how many tokens each.
        seconds: how long it took.
    """

    loss: float
    tokens: int
    sequences: int
    context: int
    seconds: float

    def fields(self) -> dict[str, Any]:
        """Return its fields in metrics.jsonl."""
        return {
            "loss": self.loss,
            "perplexity": math.exp(min(self.loss, 700.0)),
            "bits_per_token": self.loss / math.log(2),
            "tokens": self.tokens,
            "sequences": self.sequences,
            "context": self.context,
            "seconds": self.seconds,
        }


class Validation:
    """The validation data of a run."""

    def __init__(self, corpus: Corpus, config: EvaluationConfig, *, isolate_documents: bool) -> None:
        """Evaluate on `corpus`, keeping documents apart where the training does."""
        self.corpus, self._config, self._isolate_documents = corpus, config, isolate_documents

    @classmethod
    def open(cls, config: TrainConfig, tokenizer_sha256: str) -> Validation | None:
        """Open evaluation.data; None for a run that has none.

        Args:
            config: the run.
            tokenizer_sha256: that of its data.

        Raises:
            DataError: see `open_validation_data`.
        """
        if config.evaluation.data is None:
            return None
        corpus = open_validation_data(
            config.evaluation.data,
            tokenizer_sha256=tokenizer_sha256,
            model=config.model,
            phases=config.phases,
        )
        return cls(corpus, config.evaluation, isolate_documents=config.data.isolate_documents)

    @torch.no_grad()
    def evaluate(self, model: Zaya, phase: PhaseConfig, world: World, alive: Callable[[], None]) -> Evaluation:
        """Measure the model's loss with the context and the RoPE base of `phase`. All ranks call it together.

        Args:
            model: with the weights to evaluate.
            phase: the phase of training that it is in.
            world: who takes part.
            alive: called before each of this rank's microbatches.

        Raises:
            DataError: a token id is beyond the vocabulary, or no target counts.
        """
        started = time.monotonic()
        indices = evenly(self.corpus.sequences(phase.context), self._config.sequences)
        micro_batch = self._config.micro_batch or phase.micro_batch
        microbatches = -(-len(indices) // micro_batch)
        sums_2M = torch.zeros(2, microbatches, dtype=torch.float64, device=world.device)
        for j in rank_microbatches(microbatches, world.rank, world.size):
            alive()
            chosen = indices[j * micro_batch : (j + 1) * micro_batch]
            tokens_BS, targets_BS = self._microbatch(chosen, phase.context, world.device)
            document_BS = (
                documents_of(tokens_BS, self.corpus.header.end_token) if self._isolate_documents else None
            )
            sums_2M[0, j], _ = model(tokens_BS, targets_BS, rope_base=phase.rope_base, document_BS=document_BS)
            sums_2M[1, j] = (targets_BS != IGNORED_TARGET).sum()
        dist.all_reduce(sums_2M, group=world.dp_group)
        loss_sum, tokens = (math.fsum(sums_M) for sums_M in sums_2M.tolist())
        if not tokens:
            raise DataError(f"evaluation.data: {self.corpus.path}: none of its tokens counts as a target")
        return Evaluation(loss_sum / tokens, int(tokens), len(indices), phase.context, time.monotonic() - started)

    def _microbatch(self, indices: NDArray[np.int64], context: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some sequences [B, S]; IGNORED_TARGET where a target does not count."""
        windows_BS = torch.from_numpy(self.corpus.windows(indices, context)).to(device)
        targets_BS = windows_BS[:, 1:]
        mask_BS = self.corpus.target_mask(indices, context)
        if mask_BS is not None:
            targets_BS = targets_BS.masked_fill(torch.from_numpy(mask_BS).to(device) == 0, IGNORED_TARGET)
        return windows_BS[:, :-1], targets_BS


class Evaluator:
    """When a run is evaluated, and which of its checkpoints is the best; never, and none, without validation data.

    Attributes:
        best: the best checkpoint so far; it goes into each checkpoint's cursor, and back from there.
    """

    def __init__(self, validation: Validation | None, every: int) -> None:
        """Evaluate on `validation` every so many steps (0: only at the end)."""
        self._validation, self._every = validation, every
        self._last: Best | None = None
        self.best: Best | None = None

    def is_due(self, step: int, *, last: bool, stop: bool) -> bool:
        """Return whether to evaluate after `step`.

        A run that was asked to stop saves first of all; an evaluation that it leaves out is not made up for.
        """
        return self._validation is not None and (last or (due(self._every, step) and not stop))

    def evaluate(
        self, step: int, model: Zaya, phase: PhaseConfig, world: World, alive: Callable[[], None]
    ) -> Evaluation:
        """Measure the loss; see `Validation.evaluate`; `step` steps are done."""
        assert self._validation is not None
        found = self._validation.evaluate(model, phase, world, alive)
        self._last = Best(step, found.loss, found.context)
        return found

    def will_save(self, step: int) -> Best | None:
        """Return the best checkpoint, that of `step`, which is about to be made, included."""
        if self._last is not None and self._last.step == step:
            self.best = better(self._last, self.best)
        return self.best
