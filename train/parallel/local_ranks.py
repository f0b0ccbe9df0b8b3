"""Ranks that a command starts on its own machine, each a process with a pipe on which it answers.

They are forked from one process that has imported what they run, and has done nothing else: torch is imported
once for all of them, and they share the memory of its code. The command itself cannot be forked: it has threads,
and may have used a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

import torch

from zslurm.train.errors import DataError, TrainError

_CONTEXT = multiprocessing.get_context("forkserver")
_SAFE_PATH = "PYTHONSAFEPATH"


class RankOf(NamedTuple):
    """Which rank a process is: among all, and on its node."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


class Failure(NamedTuple):
    """Why a rank gave up; `usage` if what was asked is wrong, and not what happened."""

    text: str
    usage: bool

    def error(self, who: str) -> TrainError:
        """Return the failure as an error; what is wrong with a request is so on every rank."""
        return DataError(self.text) if self.usage else TrainError(f"{who}: {self.text}")


@contextmanager
def local_ranks(work: Callable[..., None], ranks: int, *arguments: Any) -> Iterator[list[Connection]]:
    """Start the ranks, each with `work(rank, ranks, *arguments, answer)`, and end them afterwards.

    Returns a pipe to each rank, in their order: what a rank answers is read there, and it reads what is sent.

    Raises:
        TrainError: the process from which they are forked was killed.
    """
    _start_server(work.__module__)
    environment = dict(os.environ)
    readers: list[Connection] = []
    processes: list[ForkServerProcess] = []
    try:
        for rank in range(ranks):
            reader, writer = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_begin, args=(environment, work, rank, ranks, *arguments, writer), daemon=True
            )
            try:
                process.start()
            except (EOFError, ConnectionError):
                raise was_killed(rank) from None
            writer.close()
            readers.append(reader)
            processes.append(process)
        yield readers
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _start_server(module: str) -> None:
    """Start the process that ranks are forked from, unless it runs: it imports `module` first.

    Python puts the working directory before its own modules there, where a json.py may be; a rank's path is the
    command's.
    """
    _CONTEXT.set_forkserver_preload([module])
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def _begin(environment: dict[str, str], work: Callable[..., None], *arguments: Any) -> None:
    """Work in the command's environment as it is now: the server's is from its start."""
    os.environ.clear()
    os.environ.update(environment)
    work(*arguments)


def was_killed(rank: int) -> TrainError:
    """Return the error of a rank whose pipe ends before it has answered."""
    return TrainError(f"rank {rank} of --ranks was killed; is there memory for all ranks?")


def take_device(kind: str, rank: int, ranks: int) -> torch.device:
    """Return the device of a rank on its node: the GPU of its number, or its part of the cores."""
    device = torch.device(kind, rank if kind == "cuda" else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    return device
