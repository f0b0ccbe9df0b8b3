"""Ranks that a command starts on its own machine, each a process with a pipe on which it answers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from zslurm.train.errors import TrainError

_CONTEXT = multiprocessing.get_context("spawn")


@contextmanager
def local_ranks(work: Callable[..., None], ranks: int, *arguments: Any) -> Iterator[list[Connection]]:
    """Start the ranks, each with `work(rank, ranks, *arguments, answer)`, and end them afterwards.

    Returns the pipes from which their answers are read, in the order of the ranks.
    """
    readers: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for rank in range(ranks):
            reader, writer = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=work, args=(rank, ranks, *arguments, writer), daemon=True)
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        yield readers
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def was_killed(rank: int) -> TrainError:
    """Return the error of a rank whose pipe ends before it has answered."""
    return TrainError(f"rank {rank} of --ranks was killed; is there memory for all ranks?")


def take_device(kind: str, rank: int, ranks: int) -> torch.device:
    """Return the device of a rank among those of its node: the GPU of its number, or its part of the cores."""
    device = torch.device(kind, rank if kind == "cuda" else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    return device
