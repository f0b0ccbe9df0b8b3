"""Ranks that need not wait for torch: forked from one server process that has imported the trainer.

They run `zslurm.train`'s main with torchrun's variables and a store that the test hosts, so what differs from
torchrun is the import alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed import TCPStore

from tests.forked import server
from tests.train.runs import clean_environment

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.train.preloaded"])
_TIMEOUT_S = 900
"""Only ranks that hang are waited for that long; beside others a run takes minutes."""


class Ranks:
    """The ranks of one run, under way."""

    def __init__(
        self,
        run: Path,
        ranks: int,
        prepare: Callable[[], None] | None = None,
        *,
        local_size: int | None = None,
    ) -> None:
        """Start them, all on one node or `local_size` on each.

        Each calls `prepare`, a function of a module, before it trains.
        """
        self._outputs = [run / f"rank-{rank}.{stream}" for rank in range(ranks) for stream in ("out", "err")]
        for output in self._outputs:
            output.unlink(missing_ok=True)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[ForkServerProcess] = []
        for rank in range(ranks):
            environment = clean_environment() | _torchruns_variables(
                rank, ranks, local_size or ranks, self._store.port
            )
            arguments = (run, rank, environment, prepare)
            self.processes.append(_CONTEXT.Process(target=_rank, args=arguments, daemon=True))
        for process in self.processes:
            process.start()

    def send_signal(self, signum: int) -> None:
        """Send a signal to every rank."""
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, signum)

    def wait(self, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """The highest exit code, and what the ranks printed."""
        for process in self.processes:
            process.join(timeout_s)
            assert process.exitcode is not None, "a rank hangs"
        out, err = ("".join(path.read_text() for path in self._outputs[start::2]) for start in (0, 1))
        codes = [process.exitcode or 0 for process in self.processes]
        return subprocess.CompletedProcess([], max(codes), out, err)


def train_on(
    run: Path, ranks: int, prepare: Callable[[], None] | None = None, *, local_size: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Train on so many ranks to the end, all on one node or `local_size` on each."""
    return Ranks(run, ranks, prepare, local_size=local_size).wait()


def train_from_server(
    run: Path, ranks: int, *, local_size: int | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`train_on` with ranks of the server that all processes of the tests share (tests/forked).

    A process of tests that trains once need not start a server of its own, and modules of a test may be on the
    PYTHONPATH of `env`.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def train(rank: int) -> subprocess.CompletedProcess[str]:
        variables = _torchruns_variables(rank, ranks, local_size or ranks, store.port)
        environment = clean_environment() | variables | dict(env or {})
        return server(torch=True).run(
            [str(run)], module="zslurm.train", env=environment, cwd=run, timeout=_TIMEOUT_S
        )

    with ThreadPoolExecutor(ranks) as pool:
        done = list(pool.map(train, range(ranks)))
    out, err = ("".join(parts) for parts in zip(*((each.stdout, each.stderr) for each in done), strict=True))
    return subprocess.CompletedProcess([], max(each.returncode for each in done), out, err)


def _torchruns_variables(rank: int, ranks: int, local_size: int, port: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _rank(run: Path, rank: int, environment: dict[str, str], prepare: Callable[[], None] | None) -> None:
    from zslurm.train.main import main

    os.environ.clear()
    os.environ.update(environment)
    for descriptor, stream in ((1, "out"), (2, "err")):
        file = os.open(run / f"rank-{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    if prepare is not None:
        prepare()
    sys.exit(main([str(run)]))


def asked_to_stop(signum: signal.Signals, step: int) -> None:
    """Let a signal reach this rank in the middle of a step; a `prepare` of ranks."""
    from zslurm.train.loop import Trainer

    train_step = Trainer.train_step

    def asked(self: Trainer, here: Any) -> Any:
        if self.step + 1 == step:
            os.kill(os.getpid(), signum)
        return train_step(self, here)

    patch.object(Trainer, "train_step", asked).start()


def forked(function: Callable[..., Any], *arguments: Any) -> int:
    """The exit code of a process that has torch behind it and calls `function(*arguments)`, one of a module."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join(_TIMEOUT_S)
    assert process.exitcode is not None, "a process hangs"
    return process.exitcode


def in_group(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """What `function(group, *arguments)` returns on each rank of a gloo group: numbers and arrays, no tensors."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    readers = []
    for rank in range(ranks):
        reader, writer = _CONTEXT.Pipe(duplex=False)
        arguments_of_rank = (function, rank, ranks, store.port, writer, arguments)
        _CONTEXT.Process(target=_member, args=arguments_of_rank, daemon=True).start()
        writer.close()
        readers.append(reader)
    for reader in readers:
        assert reader.poll(_TIMEOUT_S), "a rank hangs"
    return [reader.recv() for reader in readers]


def _member(function: Callable[..., Any], rank: int, ranks: int, port: int, answer: Any, arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    answer.send(function(dist.group.WORLD, *arguments))
    dist.barrier()
    # Without destructors: that of a group waits for an operation that hangs in it, for half an hour by default.
    os._exit(0)
