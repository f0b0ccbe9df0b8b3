"""Continue a prompt on several ranks of this machine, which divide the keys and values among them.

    for token in generate_on_ranks(request, ranks): ...

Each rank is a process with all weights; what is divided is the cache, so that a context fits that is too long for
one device, and its reading, which is what a token of a long context takes. On GPUs each rank has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from zslurm.checkpoint_tools import CheckpointError
from zslurm.checkpoint_tools.plain import in_words
from zslurm.train.checkpointing.load_weights import load_model
from zslurm.train.context.tree_attention import DividedCache
from zslurm.train.errors import TrainError
from zslurm.train.hub import Overrides, open_weights
from zslurm.train.model.generate import generate
from zslurm.train.parallel.local_ranks import local_ranks, take_device, was_killed

_READY = -1


@dataclass(frozen=True)
class Request:
    """What to generate; the last fields are the arguments of `train.model.generate.generate`.

    Attributes:
        weights: a checkpoint, or a folder in transformers' format.
        dtype: to compute in.
        device: `cpu`, or `cuda`: rank r takes GPU r.
    """

    weights: Path
    dtype: torch.dtype
    device: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    eos_ids: tuple[int, ...]
    rope_base: float


def generate_on_ranks(request: Request, ranks: int) -> Iterator[int]:
    """Start the ranks, wait until all have the weights, and return an iterator of the tokens as they are chosen.

    Raises:
        TrainError: a rank failed, here or in the iterator; the others are ended.
    """
    tokens = _generated(request, ranks)
    next(tokens)
    return tokens


def _generated(request: Request, ranks: int) -> Iterator[int]:
    """Yield a number that is no token when all ranks are ready, then the tokens."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with local_ranks(_rank, ranks, store.port, request) as readers:
        yield from received(readers)


def received(readers: list[Connection]) -> Iterator[int]:
    """Yield `_READY` when every rank has sent it, then the first rank's tokens, until all have ended in order."""
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
            if isinstance(message, str):
                raise TrainError(f"rank {rank} of --ranks: {message}")
            if message == _READY:
                ready += 1
                if ready == len(readers):
                    yield _READY
                    yield from early
            elif message is None:
                del open_readers[reader]
            elif ready < len(readers):
                early.append(message)  # the other ranks' messages were sent before, and are not read yet
            else:
                yield message


def _rank(rank: int, ranks: int, port: int, request: Request, answer: Connection) -> None:
    """Generate on one rank, which sends `_READY`, the first one each token, and None; or why it failed."""
    try:
        device = take_device(request.device, rank, ranks)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        with open_weights(request.weights, Overrides(request.rope_base)) as weights:
            model = load_model(weights, dtype=request.dtype, device=device)
        assert dist.group.WORLD is not None
        answer.send(_READY)
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
            if rank == 0:
                answer.send(token)
        answer.send(None)
        dist.destroy_process_group()
    except BrokenPipeError:
        pass  # the text is not wanted any more
    except (CheckpointError, TrainError) as error:
        answer.send(str(error))
    except (RuntimeError, OSError) as error:
        answer.send(in_words(error))
