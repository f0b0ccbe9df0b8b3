"""`python -m zslurm.bench.run.rank`: what each rank does; its node's task (node.py) starts it.

It meets the others at a store next to rank 0, measures every point of the plan together with them, and prints
messages (messages.py) on stdout. Rank 0 makes the plan, and before each point decides whether time is left for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import BaseModel

from zslurm import __version__
from zslurm.bench.measurement import BENCHMARKS, CannotMeasure, MeasurementPlan, Point
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.run.machine import (
    MachineFacts,
    facts,
    kinds_that_differ,
    machine_of,
    variables_in_force,
    versions,
)
from zslurm.bench.run.messages import (
    TASK_VARIABLE,
    Address,
    Failed,
    NoTimeLeft,
    Planned,
    PointDone,
    PointMeasured,
    Task,
)
from zslurm.bench.run.store import StoreNotStarted, host_store
from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import ZslurmError
from zslurm.hardware import compiler_caches
from zslurm.job.own_address import rendezvous_host
from zslurm.job.rank_setup import keep_one_of_visible


class CannotJoin(Exception):
    """This rank cannot take part, for a reason that one line explains."""


def _print(message: BaseModel) -> None:
    sys.__stdout__.write(json.dumps(message.model_dump()) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def meet(rank: int, timeout: timedelta) -> dist.Store:
    """Return a connection to the store next to rank 0; its address travels through the messages.

    Raises:
        CannotJoin: the store cannot be started, or the benchmark was stopped.
    """
    if rank == 0:
        host = rendezvous_host(os.environ)
        try:
            port = host_store(host)
        except StoreNotStarted as error:
            raise CannotJoin(str(error)) from error
        _print(Address(host=host, port=port))
    else:
        line = sys.stdin.readline()
        if not line:
            raise CannotJoin("the benchmark was stopped")
        address = Address.model_validate_json(line)
        host, port = address.host, address.port
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _device(local_rank: int, local_size: int) -> torch.device:
    """Return this rank's GPU; the CPU if torch sees no GPU at all.

    Raises:
        CannotJoin: there are GPUs, but fewer than ranks.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
        return torch.device("cpu")
    if gpus < local_size:
        raise CannotJoin(
            f"torch sees {gpus} of the GPUs of this node, and {counted(local_size, 'rank')} need one each"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def join(task: Task) -> BenchRanks:
    """Join the others.

    Raises:
        CannotJoin: there are GPUs, but fewer than ranks.
    """
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    timeout = timedelta(seconds=task.timeout_s)
    store = meet(rank, timeout)  # before anything of a GPU is in this process, which rank 0 copies for the store
    device = _device(local_rank, task.ranks_per_node)
    ranks = BenchRanks(
        rank=rank,
        local_rank=local_rank,
        local_size=task.ranks_per_node,
        nodes=task.nodes,
        device=device,
        store=dist.PrefixStore("control", store),
        timeout=timeout,
    )
    if BENCHMARKS[task.benchmark].communicates:
        dist.init_process_group(
            "nccl" if ranks.on_gpu else "gloo",
            store=dist.PrefixStore("groups", store),
            rank=rank,
            world_size=ranks.size,
            timeout=timeout,
            device_id=device if ranks.on_gpu else None,
        )
    return ranks


def measure(task: Task, ranks: BenchRanks) -> None:
    """Measure every point that there is time for."""
    measurement = BENCHMARKS[task.benchmark].load()
    gathered = ranks.gather(facts(ranks.device, ranks.local_size).model_dump())
    plan = MeasurementPlan([])
    if gathered is not None:
        of_ranks = [MachineFacts.model_validate(item) for item in gathered]
        if task.benchmark != "storage" and (mixed := kinds_that_differ(task, of_ranks)) is not None:
            raise CannotMeasure(mixed)
        machine = machine_of(task, of_ranks)
        plan = measurement.points(task.options, machine).within(task.seconds)
        if not plan.points:
            reason = plan.skipped[0].reason if plan.skipped else "no point is left by these options"
            raise CannotMeasure(f"there is nothing to measure: {reason}")
        planned = Planned(
            machine=machine,
            versions=versions(ranks.device) | {"zslurm": __version__},
            environment=variables_in_force(os.environ),
            points=len(plan.points),
            seconds=sum(point.seconds for point in plan.points),
            skipped=list(plan.skipped),
        )
        _print(planned)
    shared = ranks.share([[point.values, point.seconds] for point in plan.points])
    began = time.monotonic()
    points = list(enumerate(Point(values, seconds) for values, seconds in shared))
    if task.seconds is not None:  # what there is no time for after all shall be the longest
        points.sort(key=lambda item: item[1].seconds)
    for index, point in points:
        late = task.seconds is not None and time.monotonic() - began + point.seconds > task.seconds
        if ranks.share(late):
            if ranks.is_first:
                reason = "no time was left for it"
                _print(NoTimeLeft(point=point.values, reason=reason, expected=point.seconds))
            continue
        point_began = time.monotonic()
        rows = measurement.run(point, ranks)
        if ranks.is_first:
            rows = [rows] if isinstance(rows, dict) else rows or []
            took = time.monotonic() - point_began
            _print(PointMeasured(rows=rows, index=index, seconds=took, expected=point.seconds))
    ranks.barrier()
    if ranks.is_first:
        _print(PointDone())


def _end_with_node() -> None:
    """End this process when its node's task has ended, even by SIGKILL; a collective would wait for minutes."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> int:
    """Measure; returns the exit code."""
    task = Task.model_validate_json(os.environ[TASK_VARIABLE])
    keep_one_of_visible(os.environ)
    compiler_caches.ready(os.environ)
    try:
        ranks = join(task)
        threading.Thread(target=_end_with_node, daemon=True).start()
        measure(task, ranks)
    except CannotMeasure as error:
        _print(Failed(why=str(error), refused=True))
        return 1
    except (CannotJoin, ZslurmError) as error:
        _print(Failed(why=str(error)))
        return 1
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        _print(Failed(why=why[:500]))
        raise
    sys.stdout.flush()
    # Without destroying the groups: what they measured is reported, and NCCL waits for peers there.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
