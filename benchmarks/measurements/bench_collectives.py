"""The bus bandwidth of `zslurm bench collectives` beside two that are computed without it, over gloo.

In two ranks of this machine the benchmark's own measurement takes turns with a plain loop over torch.distributed.

    of the same calls   the functions that it calls are wrapped, and keep when each call begins and ends. From
                        these times alone the bus bandwidth is computed again: the measured batches are those
                        between two waits for all ranks; from the first call's begin to the last one's end on the
                        slower rank, over the number of calls; the median of all. Bytes and formula are written out
                        here again. Both see the same calls, so this holds on a loaded machine too
    of the loop         a plain loop, whose buffers, warm-up and median are written out here, with as many calls in
                        a batch, since a loaded machine interrupts long batches more often. Each turn's figure is
                        divided by the mean of the loop's before and after it. The figure is the median of these
                        ratios, with its standard error, which the machine's load decides: turns end at 1 %, or
                        after TURNS

Peer: both of them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.common import ROOT, write_result

if TYPE_CHECKING:
    from zslurm.bench.ranks import Ranks

RANKS = 2
SIZES = (64 << 10, 4 << 20)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
LEAST_TURNS, TURNS, ENOUGH = 11, 15, 0.01
_TURN_S = 0.2
_WARM_UP = 5


def run(turns: int = TURNS) -> None:
    """Measure and write results/bench_collectives.json."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.measurements.bench_collectives", folder, str(rank), str(turns)],
                cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        out = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed")
    rows = json.loads(out[0].splitlines()[-1])
    write_result("bench_collectives", {"load_at_the_start": round(load, 2), "bus_bandwidth": rows})


def _rank(folder: Path, rank: int, turns: int) -> None:
    import torch
    import torch.distributed as dist

    from zslurm.bench import collectives
    from zslurm.bench.ranks import Ranks

    collectives._POINT_S = _TURN_S
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=dist.PrefixStore("groups", store), rank=rank, world_size=RANKS)
    ranks = Ranks(
        rank=rank, local_rank=rank, local_size=RANKS, nodes=["here"], device=torch.device("cpu"),
        store=dist.PrefixStore("control", store), timeout=timedelta(seconds=300),
    )  # fmt: skip
    rows = [_row(operation, size, ranks, turns) for operation in OPERATIONS for size in SIZES]
    if rank == 0:
        print(json.dumps(rows))
    dist.barrier()


def _row(operation: str, size: int, ranks: Ranks, turns: int) -> dict[str, Any]:
    """Return the row of one operation and size, on rank 0."""
    from zslurm.bench import collectives
    from zslurm.bench.measurement import Point

    values = {"operation": operation, "scope": "node", "nodes": 1, "ranks": RANKS, "levels": "flat"}
    ours: list[float] = []
    again: list[float] = []
    plains: list[float] = []
    while True:
        with _recorded() as calls:
            measured = collectives.run(Point({**values, "bytes": size}, 1.0), ranks)
        samples = ranks.share(measured[0]["samples"] if measured else None)
        batches = calls.batches(size, samples)
        gathered = ranks.gather([(each[-1][1] - each[0][0]) / len(each) for each in batches])
        plains.append(plain(operation, size, len(batches[0])))
        if len(plains) == 1:  # a turn is between two of the loop's, which knew no length of batches before
            continue
        if gathered is not None:
            ours += [each["busbw_gb_s"] for each in measured]
            seconds = statistics.median(max(of_ranks) for of_ranks in zip(*gathered, strict=True))
            again.append(size / seconds / 1e9 * _factor(operation))
        found = None if gathered is None else _summary(ours, again, plains)
        ended = found is not None and len(ours) >= LEAST_TURNS and found["standard_error"] < ENOUGH
        if ranks.share(ended or len(plains) > turns):
            break
    if found is None:
        return {}
    row = {"operation": operation, "bytes": size, **found, "turns": len(ours)}
    print(f"bench_collectives: {row}", file=sys.stderr, flush=True)
    return row


def _summary(ours: list[float], again: list[float], plains: list[float]) -> dict[str, Any]:
    same = [mine / other for mine, other in zip(ours, again, strict=True)]
    ratios = [mine / statistics.mean(two) for mine, two in zip(ours, pairwise(plains), strict=True)]
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    return {
        "busbw_gb_s": round(statistics.median(ours), 4),
        "over_that_of_the_same_calls": round(statistics.median(same), 4),
        "least_and_most_of_a_turn": [round(min(same), 4), round(max(same), 4)],
        "over_that_of_the_loop": round(middle, 3),
        "standard_error": round(deviation * math.sqrt(math.pi / 2 / len(ratios)), 3),
    }


def _factor(operation: str) -> float:
    """Return bus bandwidth over algorithm bandwidth (rccl-tests, doc/PERFORMANCE.md)."""
    return {"all_reduce": 2 * (RANKS - 1) / RANKS, "broadcast": 1.0}.get(operation, (RANKS - 1) / RANKS)


@dataclass
class Calls:
    """Calls of torch.distributed in their order: bytes of the largest tensor, when each began and ended."""

    calls: list[tuple[int, float, float]] = field(default_factory=list)

    def batches(self, size: int, count: int) -> list[list[tuple[float, float]]]:
        """Return the measured batches of calls of this size.

        Between batches the ranks wait for each other by a smaller call. The first batches are warm-up, then come
        the `count` that are measured, and at last one call whose data is checked.
        """
        found: list[list[tuple[float, float]]] = [[]]
        for moved, began, ended in self.calls:
            if moved == size:
                found[-1].append((began, ended))
            elif found[-1]:
                found.append([])
        *before, last = [each for each in found if each]
        if len(last) > 1:  # no wait between the last measured batch and the check
            before.append(last[:-1])
        assert len(before) >= count, f"{len(before)} batches were recorded, and {count} measured"
        return before[-count:]


@contextmanager
def _recorded() -> Iterator[Calls]:
    """Record the collectives of this process."""
    import torch
    import torch.distributed as dist

    from zslurm.bench import collectives

    calls = Calls()

    def wrapped(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **options)
            ended = time.perf_counter()
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            calls.calls.append((max(each.nbytes for each in tensors), began, ended))
            return result

        return call

    with ExitStack() as stack:
        for owner, names in (
            (dist, ("all_reduce", "broadcast")),
            (collectives, ("reduce_scatter_into", "all_gather_into")),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name))))
        yield calls


def _newest(operation: str) -> Any:
    """Return torch's function: newer versions have other names."""
    import torch.distributed as dist

    names = {
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    }[operation]
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def plain(operation: str, size: int, batch: int) -> float:
    """Return the bus bandwidth in GB/s by a plain loop of batches of so many calls: no code of zslurm's."""
    import torch
    import torch.distributed as dist

    n = dist.get_world_size()
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // n)

    def call() -> None:
        if operation == "all_reduce":
            dist.all_reduce(whole)
        elif operation == "reduce_scatter":
            _newest(operation)(part, whole)
        elif operation == "all_gather":
            _newest(operation)(whole, part)
        else:
            dist.broadcast(whole, 0)

    for _ in range(_WARM_UP):
        call()
    times: list[float] = []
    # Several batches, and the median of them: other programs on this machine disturb single ones.
    while len(times) < 5 or sum(times) * batch < _TURN_S:
        whole.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(batch):
            call()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(seconds.item() / batch)
    return size / statistics.median(times) / 1e9 * _factor(operation)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
