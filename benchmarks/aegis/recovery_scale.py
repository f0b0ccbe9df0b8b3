"""Recovery in memory at 64 and 1,024 ranks: how much of it is our own work, by messages; no model and no groups.

The supervisor's plan, the store server and the ranks' parts are the program's own; the ranks are threads of a few
processes on this machine, each with its own watcher, and two connections to the store, as a rank has. One rank is
lost:

    plan        who takes its place (policy/in_memory.py)
    messages    from the generation's publication until every rank has seen it, has checked in, and has been told
                that all others have, and rank 0's report is with the supervisor; all ranks share these cores
    agreement   what a rank computes from what all ranks have: its part of the gathering, the step, its buddy

What a library does is not in it: to abort collectives, to make groups (gloo's and NCCL's), and to move bytes.

All ranks share the cores of this machine, perhaps with others, so the seconds of the clock say little. On a
cluster each rank has a core, and the store one: `own_work_s` is what these do one after the other, in processor
time, with the longest pause between two looks of a rank's watcher for a generation. Idle watchers ask the store as
well, ten times a second each at 1,024 ranks: `store_cpu_idle_percent` of its core.
Beside that, the memory of a rank: its copies of zaya1-8b, and what this process takes for a rank's connections.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from torch.distributed import TCPStore

from benchmarks.common import write_result
from benchmarks.models import recipe
from zslurm.aegis.core.policy.in_memory import Ranks, plan_in_memory
from zslurm.aegis.fault_kinds import RANK_KILLED
from zslurm.aegis.types import Fault
from zslurm.checkpoint_tools import partition
from zslurm.job.in_memory.store_client import StoreClient
from zslurm.run.run_dir import AttemptDir
from zslurm.train.config import OptimConfig
from zslurm.train.optim.sharded import spans_of
from zslurm.train.plan.memory import copies_bytes
from zslurm.train.recovery.copies.agreement import check_in, whole_step
from zslurm.train.recovery.generation import Generation, buddy_of, recovered, result_key, ward_of
from zslurm.train.recovery.watcher import POLL_PER_RANK_S, POLL_S, GenerationWatcher
from zslurm.train.shapes import owned_table

SIZES = (64, 1024)
PER_NODE = 8
PROCESSES = 4
TURNS = 5
LIMIT_S = 600.0
IDLE_S = 3.0
MASTER_BYTES = 4


def run() -> None:
    """Measure, and write the result."""
    rows = [measure(ranks) for ranks in SIZES]
    write_result(
        "recovery_scale",
        {
            "what": "one rank of many is lost: seconds of our own work until all have regrouped by messages",
            "sizes": rows,
            "load_average": round(os.getloadavg()[0], 1),
            "note": "all simulated ranks share the cores of this machine; in messages_s, by the clock, their work "
            "adds up, and that of whatever else runs; own_work_s is processor time of the store and one rank",
        },
    )


def measure(ranks: int) -> dict[str, Any]:
    """The figures of one size."""
    plan_s = statistics.median(_timed(lambda: _plan(ranks)) for _ in range(TURNS))
    agreement_s = agreement(ranks)
    with tempfile.TemporaryDirectory() as directory:
        attempt = AttemptDir(Path(directory) / "000001")
        attempt.path.mkdir()
        found = messages(ranks, attempt)
    look_s = max(POLL_S, ranks * POLL_PER_RANK_S)
    store_s, rank_s = statistics.median(found.store_s), statistics.median(found.rank_s)
    row = {
        "ranks": ranks,
        "plan_s": round(plan_s, 5),
        "messages_s": [round(seconds, 3) for seconds in found.wall_s],
        "store_cpu_s": round(store_s, 4),
        "store_cpu_idle_percent": round(100 * found.idle, 1),
        "cpu_s_per_rank": round(rank_s, 5),
        "longest_pause_s": look_s,
        "agreement_s_per_rank": round(agreement_s, 5),
        "own_work_s": round(plan_s + look_s + store_s + rank_s + agreement_s, 3),
        "copies_bytes_per_rank_zaya1_8b": _copies(ranks),
        "bytes_per_rank_for_connections": found.rank_bytes,
    }
    print(row, file=sys.stderr, flush=True)
    return row


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _members(ranks: int) -> tuple[str, ...]:
    return tuple(f"node{rank // PER_NODE}/{rank % PER_NODE}" for rank in range(ranks))


def _plan(ranks: int) -> None:
    members = _members(ranks)
    nodes = tuple(member.partition("/")[0] for member in members)
    warm = {node: (f"{node}/w{number}",) for number, node in enumerate(dict.fromkeys(nodes))}
    fault = Fault.of_kind(RANK_KILLED, time.time(), "srun", "Killed", rank=5)
    state = Ranks(members, nodes, PER_NODE, frozenset({5}), warm=warm, step=100)
    assert plan_in_memory(state, [fault], most_tries=3).possible


def agreement(ranks: int) -> float:
    """Processor seconds that a rank takes to agree on the step, without the gathering itself."""
    mine = {
        "own": [99, 100], "ward": 3, "held": [99, 100], "address": ("10.0.0.17", 40123, "0" * 32),
        "bytes": 71 << 20, "done": 100, "save": False,
    }  # fmt: skip
    message = pickle.dumps(mine)

    def agree() -> None:
        infos = [pickle.loads(message) | {"ward": ward_of(rank, ranks, PER_NODE)} for rank in range(ranks)]
        buddies = [buddy_of(rank, ranks, PER_NODE) for rank in range(ranks)]
        own = [info["own"] if rank != 5 else [] for rank, info in enumerate(infos)]
        assert whole_step(own, [info["held"] for info in infos], buddies) == 100

    return statistics.median(_timed(agree) for _ in range(TURNS))


class Messages(NamedTuple):
    """What the messages of each turn took.

    Attributes:
        wall_s: seconds by the clock.
        store_s: processor seconds of the store server, with what it does when idle: more if turns take longer.
        rank_s: processor seconds of a rank, its watcher included.
        idle: the store's share of a core while nothing happens.
        rank_bytes: memory of a rank.
    """

    wall_s: list[float]
    store_s: list[float]
    rank_s: list[float]
    idle: float
    rank_bytes: int


def messages(ranks: int, attempt: AttemptDir) -> Messages:
    """Have the ranks go through a generation in each turn."""
    server = StoreClient.start([sys.executable], host="127.0.0.1", attempt=attempt)
    assert server.wait_until_listening(LIMIT_S)
    assert server.port is not None
    context = multiprocessing.get_context("spawn")
    pipes, hosts = [], []
    for number in range(PROCESSES):
        ours, theirs = context.Pipe()
        mine = range(number, ranks, PROCESSES)
        host = context.Process(target=_host, args=(theirs, server.port, ranks, mine), daemon=True)
        host.start()
        pipes.append(ours)
        hosts.append(host)
    try:
        empty = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send("connect")
        full = [pipe.recv() for pipe in pipes]
        store = next(
            child
            for child in psutil.Process().children()
            if "zslurm.job.in_memory.store_server" in child.cmdline()
        )
        processes = [psutil.Process(host.pid) for host in hosts]
        before, started = _cpu(store), time.monotonic()
        time.sleep(IDLE_S)
        idle = (_cpu(store) - before) / (time.monotonic() - started)
        walls, stores, per_rank = [], [], []
        for number in range(1, TURNS + 1):
            before, started = _cpu(store), time.monotonic()
            ranks_before = sum(_cpu(process) for process in processes)
            assert server.generation(Generation(number, _members(ranks), (5,), LIMIT_S))
            _wait_for_result(server, number)
            walls.append(time.monotonic() - started)
            for pipe in pipes:
                pipe.recv()
            per_rank.append((sum(_cpu(process) for process in processes) - ranks_before) / ranks)
            stores.append(_cpu(store) - before)
    finally:
        for host in hosts:
            host.kill()
            host.join()
        server.stop()
    return Messages(walls, stores, per_rank, idle, (sum(full) - sum(empty)) // ranks)


def _wait_for_result(server: StoreClient, number: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for event in server.poll():
            if event.get("number") == number:
                assert event["event"] == "recovered", event
                return
        time.sleep(0.001)
    raise TimeoutError(f"generation {number}: no result in {LIMIT_S:g} s")


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _host(pipe: Connection, port: int, ranks: int, mine: range) -> None:
    """In a process of some ranks: connect when asked to, and take part in each turn."""
    threading.stack_size(256 << 10)
    members, own = _members(ranks), psutil.Process()

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))

    pipe.send(own.memory_info().rss)
    pipe.recv()
    through = 0
    done = threading.Condition()

    def simulate(rank: int) -> None:
        nonlocal through
        store = connect()
        watcher = GenerationWatcher(connect(), members[rank], ranks, lambda _: None)
        with ready:
            here.append(rank)
            ready.notify()
        for number in range(1, TURNS + 1):
            generation = watcher.wait_after(number - 1, LIMIT_S)
            assert generation is not None
            check_in(store, generation, rank, over=lambda: False)
            if rank == 0:
                store.compare_set(result_key(number), "", _report(number))
            with done:
                through += 1
                done.notify()

    ready, here = threading.Condition(), list[int]()
    for rank in mine:
        threading.Thread(target=simulate, args=(rank,), daemon=True).start()
    with ready:
        ready.wait_for(lambda: len(here) == len(mine))
    pipe.send(own.memory_info().rss)
    for turn in range(1, TURNS + 1):
        with done:
            while through < turn * len(mine):
                done.wait()
        pipe.send("done")
    pipe.recv()  # its threads hold connections: it is ended from outside


def _report(number: int) -> str:
    return json.dumps(recovered(number, 100, 0, 0.0))


def _copies(ranks: int) -> int:
    """Bytes of host memory that the copies of zaya1-8b take on the rank that has most."""
    layout = partition(owned_table(recipe("zaya1-8b"), OptimConfig()), ranks)
    spans = (spans_of(layout, rank) for rank in range(ranks))
    state = max(sum(stop - start for start, stop in each.values()) * MASTER_BYTES for each in spans)
    return copies_bytes(state, ranks)
