"""Answer the requests of an evaluation on several processes of this machine, each with all weights.

    with local_answers(request, ranks) as ask: ...

On GPUs each process has its own. They never talk to each other: the command sends requests to all of them, and
each answers its share (`serve`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from zslurm.checkpoint_tools import CheckpointError
from zslurm.checkpoint_tools.plain import in_words
from zslurm.train.checkpointing.load_weights import load_model
from zslurm.train.errors import DataError, TrainError
from zslurm.train.evaluation.scoring import Answers, Ask, ModelScorer, Work
from zslurm.train.hub import Overrides, TokenizerFiles, open_weights
from zslurm.train.inference.text import TextCoder
from zslurm.train.parallel.local_ranks import Failure, RankOf, local_ranks, take_device, was_killed
from zslurm.train.parallel.world import DTYPES


@dataclass(frozen=True)
class ScoringRequest:
    """Whose answers are wanted.

    Attributes:
        weights: a checkpoint, or a folder in transformers' format.
        tokenizer: of the weights.
        dtype: to compute in, as `parallel.dtype` names it.
        device: `cpu`, or `cuda`: each rank of a node takes the GPU of its number there.
        rope_base: of the weights' rotary embedding.
        context: tokens of a sequence at most.
    """

    weights: Path
    tokenizer: TokenizerFiles
    dtype: str
    device: str
    rope_base: float
    context: int

    def fields(self) -> dict[str, Any]:
        """Return the request as JSON has it."""
        fields_of_request = asdict(self) | {"weights": str(self.weights)}
        fields_of_request["tokenizer"] |= {
            "file": str(self.tokenizer.file),
            "others": [str(path) for path in self.tokenizer.others],
        }
        return fields_of_request

    @classmethod
    def of(cls, fields: dict[str, Any]) -> ScoringRequest:
        """Return the request that JSON has as `fields`."""
        files = fields["tokenizer"]
        others = tuple(Path(path) for path in files["others"])
        tokenizer = TokenizerFiles(Path(files["file"]), others, files["adds_special_tokens"])
        return cls(**fields | {"weights": Path(fields["weights"]), "tokenizer": tokenizer})

    def coder(self) -> TextCoder:
        """Return the tokenizer.

        Raises:
            DataError, HubError: it is none, or not this model's.
        """
        with open_weights(self.weights, Overrides(self.rope_base, self.context)) as weights:
            tokens, vocabulary = weights.settings.tokens, weights.settings.model.vocab_size
        return TextCoder.open(self.tokenizer, vocabulary, tokens.end, tokens.begin)


Message = Answers | Failure
"""What a rank sends for each of its requests: its share of the answers, or why there are none."""


@contextmanager
def local_answers(request: ScoringRequest, ranks: int = 1) -> Iterator[Ask]:
    """Return what asks `ranks` processes of this machine; with one rank this process answers by itself.

    Raises:
        TrainError: a rank failed, here or when it is asked; the others are ended.
    """
    if ranks == 1:
        yield _scorer(request, torch.device(request.device)).answer
        return
    with local_ranks(_rank, ranks, request) as pipes:

        def ask(work: Work) -> Answers:
            for pipe in pipes:
                with suppress(OSError):  # it has ended: what it sent before, or did not send, says why
                    pipe.send(work)
            answers: Answers = {}
            waiting = dict(zip(pipes, range(ranks), strict=True))
            while waiting:
                for ready in connection.wait(list(waiting)):
                    rank = waiting.pop(pipe := cast(Connection, ready))
                    try:
                        message: Message = pipe.recv()
                    except (EOFError, ConnectionError):
                        raise was_killed(rank) from None
                    if isinstance(message, Failure):
                        raise message.error(f"rank {rank} of --ranks")
                    answers |= message
            return answers

        yield ask


def _scorer(request: ScoringRequest, device: torch.device) -> ModelScorer:
    coder = request.coder()
    with open_weights(request.weights, Overrides(request.rope_base, request.context)) as weights:
        model = load_model(weights, dtype=DTYPES[request.dtype], device=device)
    return ModelScorer(model, coder, rope_base=request.rope_base, context=request.context)


def _rank(rank: int, ranks: int, request: ScoringRequest, pipe: Connection) -> None:
    with suppress(BrokenPipeError, EOFError):  # nothing more is asked
        serve(RankOf(rank, ranks, rank, ranks), request, pipe.recv, pipe.send)


def serve(
    who: RankOf, request: ScoringRequest, receive: Callable[[], Work | None], send: Callable[[Message], None]
) -> None:
    """Answer this rank's share of the requests, until there are none."""
    try:
        scorer = _scorer(request, take_device(request.device, who.local_rank, who.local_ranks))
        while (work := receive()) is not None:
            send(scorer.answer(work, who.rank, who.ranks))
    except (BrokenPipeError, EOFError):
        raise
    except DataError as error:
        send(Failure(str(error), usage=True))
    except (CheckpointError, TrainError) as error:
        send(Failure(str(error), usage=False))
    except (RuntimeError, OSError) as error:
        send(Failure(in_words(error), usage=False))
