"""Continue a prompt on several ranks of this machine, which divide the keys and values among them.

    for token in generate_on_ranks(request, ranks): ...

Each rank is a process with all weights; what is divided is the cache, so that a context fits that is too long for
one device, and its reading, which is what a token of a long context takes. On GPUs each rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zslurm.checkpoint_tools import CheckpointError
from zslurm.checkpoint_tools.plain import in_words
from zslurm.train.checkpointing.load_weights import load_model
from zslurm.train.context.tree_attention import DividedCache
from zslurm.train.errors import TrainError
from zslurm.train.hub import Overrides, open_weights
from zslurm.train.model.generate import generate
from zslurm.train.parallel.local_ranks import Failure, RankOf, local_ranks, take_device, was_killed
from zslurm.train.parallel.world import DTYPES

READY = -1
"""What a rank sends when it has the weights; no token."""


@dataclass(frozen=True)
class DecodingRequest:
    """What to generate; the last fields are the arguments of `train.model.generate.generate`.

    Attributes:
        weights: a checkpoint, or a folder in transformers' format.
        dtype: to compute in, as `parallel.dtype` names it.
        device: `cpu`, or `cuda`: rank r takes GPU r.
    """

    weights: Path
    dtype: str
    device: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    eos_ids: tuple[int, ...]
    rope_base: float

    def fields(self) -> dict[str, Any]:
        """Return the request as JSON has it."""
        return asdict(self) | {"weights": str(self.weights)}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> DecodingRequest:
        """Return the request that JSON has as `fields`."""
        lists = {key: tuple(fields[key]) for key in ("prompt_ids", "eos_ids")}
        return cls(**fields | lists | {"weights": Path(fields["weights"])})


def generate_on_ranks(request: DecodingRequest, ranks: int) -> Iterator[int]:
    """Start the ranks, wait until all have the weights, and return an iterator of the tokens as they are chosen.

    Raises:
        TrainError: a rank failed, here or in the iterator; the others are ended.
    """
    tokens = _generated(request, ranks)
    next(tokens)
    return tokens


def _generated(request: DecodingRequest, ranks: int) -> Iterator[int]:
    """Yield a number that is no token when all ranks are ready, then the tokens."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with local_ranks(_rank, ranks, store.port, request) as readers:
        yield from received(readers)


def received(readers: list[Connection]) -> Iterator[int]:
    """Yield `READY` when every rank has sent it, then the first rank's tokens, until all have ended in order."""
    open_readers = dict(zip(readers, range(len(readers)), strict=True))
    ready, early = 0, list[int]()
    while open_readers:
        for reader in connection.wait(list(open_readers)):
            assert isinstance(reader, connection.Connection)
            rank = open_readers[reader]
            try:
                message = reader.recv()
            except EOFError:
                raise was_killed(rank) from None
            if isinstance(message, Failure):
                raise message.error(f"rank {rank} of --ranks")
            if message == READY:
                ready += 1
                if ready == len(readers):
                    yield READY
                    yield from early
            elif message is None:
                del open_readers[reader]
            elif ready < len(readers):
                early.append(message)  # the other ranks' messages were sent before, and are not read yet
            else:
                yield message


def _rank(rank: int, ranks: int, port: int, request: DecodingRequest, answer: Connection) -> None:
    """Generate on one rank of this machine; see `generate_as_rank`."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with suppress(BrokenPipeError):  # the text is not wanted any more
        generate_as_rank(RankOf(rank, ranks, rank, ranks), request, store, answer.send)


def generate_as_rank(
    who: RankOf, request: DecodingRequest, store: dist.Store, send: Callable[[int | Failure | None], None]
) -> None:
    """Generate on one rank, which sends `READY`, the first one each token, and None; or why it failed."""
    try:
        device = take_device(request.device, who.local_rank, who.local_ranks)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=who.rank, world_size=who.ranks)
        with open_weights(request.weights, Overrides(request.rope_base)) as weights:
            model = load_model(weights, dtype=DTYPES[request.dtype], device=device)
        assert dist.group.WORLD is not None
        send(READY)
        made = generate(
            model,
            request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            eos_ids=request.eos_ids,
            rope_base=request.rope_base,
            divided=DividedCache(dist.group.WORLD),
        )
        for token in made:
            if who.rank == 0:
                send(token)
        send(None)
        dist.destroy_process_group()
    except BrokenPipeError:
        raise
    except (CheckpointError, TrainError) as error:
        send(Failure(str(error), usage=False))
    except (RuntimeError, OSError) as error:
        send(Failure(in_words(error), usage=False))
