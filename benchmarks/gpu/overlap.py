"""What of the reduction of gradients and of the gathering of weights a training step waits for.

It takes two ranks: one has nothing to send. Two processes, one for each GPU, over NCCL or RCCL (on CPUs
over gloo), make the same steps in turn: reducing each bucket under backward and waiting for the weights of each
layer under the next forward, or both one after the other. The trainer's own clock gives the seconds that were not
hidden, by events on the stream; the bytes are those that a rank sends.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator
from multiprocessing import get_context
from queue import Empty
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.gpu.step import CONTEXT, CONTEXT_ON_CPU, TrainingStep, config_of, world_on
from zslurm.kernels.harness.timing import wait
from zslurm.train.telemetry.timing import StepClock, StepPart

RANKS = 2
_SAMPLES, _STEPS = 5, 3
_POLL_S = 1.0


class _Times(NamedTuple):
    """Seconds of one step."""

    step_s: float
    reduction_waited_s: float
    gathering_waited_s: float


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the times with and without overlap, or that there are too few GPUs."""
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.device_count() < RANKS:
        yield {"what": "overlap", "problem": f"needs {RANKS} GPUs: this machine has {torch.cuda.device_count()}"}
        return
    context = get_context("spawn")
    queue = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [context.Process(target=_rank, args=(rank, port, on_gpu, queue)) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        yield _first(queue, processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.join(_POLL_S)
                process.kill()


def _first(queue: Any, processes: list[Any]) -> dict[str, Any]:
    """Return what rank 0 found.

    Raises:
        RuntimeError: a rank ended without it.
    """
    while True:
        try:
            found: dict[str, Any] = queue.get(timeout=_POLL_S)
            return found
        except Empty:
            failed = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
            if failed:
                raise RuntimeError(f"a rank ended with status {failed[0]}") from None


def _rank(rank: int, port: int, on_gpu: bool, queue: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    recipe, micro_batch = ("zaya1-1b", 4) if on_gpu else ("zaya1-tiny", 2)
    config = config_of(recipe, micro_batch=micro_batch, context=CONTEXT if on_gpu else CONTEXT_ON_CPU)
    with world_on("cuda" if on_gpu else "cpu") as world:
        step = TrainingStep(config, world)
        found: dict[bool, list[_Times]] = {True: [], False: []}
        for sample in range(_SAMPLES + 1):
            for overlap, times in found.items():
                each = _timed(step, overlap=overlap)
                if sample:  # the first compiles, and connects
                    times.append(each)
        steps = len(found) * (_SAMPLES + 1) * _STEPS
        if rank == 0:
            queue.put(
                {
                    "what": "overlap",
                    "model": recipe,
                    "ranks": RANKS,
                    "tokens_per_rank": step.tokens,
                    "overlapped": _medians(found[True]),
                    "one_after_the_other": _medians(found[False]),
                    "sent_bytes_per_step": {
                        name: round(sent / steps) for name, sent in step.shards.comm.sent.items()
                    },
                }
            )


def _timed(step: TrainingStep, *, overlap: bool) -> _Times:
    """Return the seconds of a step, and of the waits for both kinds of collectives in it."""
    device, shards = step.world.device, step.shards
    shards.overlap = overlap
    dist.barrier()
    wait(device)
    started, clock = time.perf_counter(), StepClock(device)

    def wait_for_weights(module: str | None) -> None:
        if shards.is_gathering(module if overlap else None):
            with clock.within(StepPart.OPTIMIZER):
                shards.wait_for_weights(module if overlap else None)

    step.model.call_before(wait_for_weights)
    step.marked = lambda name: clock.within(StepPart.REDUCE if name == "reduction" else StepPart.OTHER)
    for _ in range(_STEPS):
        step.run()
    wait_for_weights(None)
    wait(device)
    seconds = time.perf_counter() - started
    split = clock.end_step()
    return _Times(*(each / _STEPS for each in (seconds, split[StepPart.REDUCE], split[StepPart.OPTIMIZER])))


def _medians(times: list[_Times]) -> dict[str, float]:
    return _Times(*map(statistics.median, zip(*times, strict=True)))._asdict()
