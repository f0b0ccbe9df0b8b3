"""Sweep all pairs: of the ranks in each node, and of the nodes along each rail; so a slow one shows itself.

Everyone has one partner in each round (peers.py), and all pairs of a round exchange messages in both directions at
the same time. On CPUs the pairs of a node take turns instead: they share its cores and its memory, and would
measure each other. The whole sweep is repeated, and every repetition kept: what pairs add is compared moment by
moment (findings.py). A moment's time is the fastest of several exchanges: what is slow is slow each time, while a
process that is interrupted is not.

After each exchange that is timed, both of a pair exchange one number: so an exchange takes until both have ended,
and they begin the next one together. Else the faster one would begin it earlier, and its messages would travel
while the slower one is still busy with the exchange before: what the slow one takes longer would be hidden in its
partner's wait.

Ranks on CPUs are compared by their processor time for an exchange too, as in mlp.py: by the clock, ranks that
share cores with each other and with other programs take as long as these please. The clock shows a slow link, the
processor time a rank that is slow itself.

A sweep is repeated until a slowdown of VISIBLE would be seen, MOST_LOOKS times at most. On CPUs, where other
programs may hide it from the clock for good, the processor time alone decides after MOST_S seconds. A sweep ends
by the noise, not by whether someone is slow, and names are looked for once, at its end.

The ranks that exchange are those of one process group, so a sweep opens no communicator for each pair.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from zslurm.bench.measurement import Row
from zslurm.bench.ranks import Ranks
from zslurm.bench.result import Machine
from zslurm.bench.results.findings import compare_members, compare_own_time
from zslurm.bench.results.peers import fewest_moments, rounds
from zslurm.bench.run.timing import summarize

GPU_PAIR, NODE_PAIR = "gpu_pair", "node_pair"
"""The two scopes."""

VISIBLE = 0.15
MOST_LOOKS = 16
MOST_S = {"cuda": math.inf, "cpu": 30.0}
"""See above."""
_MOMENTS = 20
_MOMENT_S = {"cuda": 0.02, "cpu": 0.02}
_BETWEEN_S = 0.005
_LEAST_TIMES, _MOST_TIMES = 4, 1000


def sweeps(machine: Machine, wanted: list[str]) -> Iterator[tuple[str, int]]:
    """Return the sweeps that this machine has, each with how many rounds it takes."""
    local, nodes = machine.ranks_per_node, len(machine.nodes)
    for scope, members in ((GPU_PAIR, local), (NODE_PAIR, nodes)):
        if scope in wanted and members > 2:
            yield scope, members - 1 + members % 2


def sweep_seconds(machine: Machine, scope: str, sweep_rounds: int) -> float:
    """Return about how long a sweep takes up to its first look."""
    members = machine.ranks_per_node if scope == GPU_PAIR else len(machine.nodes)
    turns = members // 2 if _takes_turns(machine.device, scope) else 1
    return _moments(members) * sweep_rounds * turns * (_MOMENT_S[machine.device] + _BETWEEN_S)


def _takes_turns(device: str, scope: str) -> bool:
    """Return whether the pairs of a round exchange one after the other."""
    return device == "cpu" and scope == GPU_PAIR


def _moments(members: int) -> int:
    """Return after how many moments it is looked whether they are enough."""
    return max(_MOMENTS, fewest_moments(members))


def sweep(values: dict[str, Any], ranks: Ranks) -> list[Row]:
    """Exchange `values["bytes"]` in both directions between all pairs; rank 0 gets a row for each."""
    in_node = values["scope"] == GPU_PAIR
    local = ranks.local_size
    if in_node:
        first = ranks.node * local
        members, own, count = list(range(first, first + local)), ranks.local_rank, local
    else:
        members, own, count = list(range(ranks.local_rank, ranks.size, local)), ranks.node, len(ranks.nodes)
    group = ranks.group(members)
    elements = max(1, values["bytes"] // 4)
    source = torch.full((elements,), float(ranks.rank + 1), device=ranks.device)
    out = torch.zeros_like(source)
    ready, other_ready = torch.zeros(2, 1, device=ranks.device)

    def exchange(partner: int, sent: torch.Tensor, received: torch.Tensor) -> None:
        operations = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=partner),
            dist.P2POp(dist.irecv, received, group=group, group_peer=partner),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        ranks.synchronize()

    def timed(partner: int, times: int) -> tuple[float, float]:
        """Return the time of the fastest exchange, and the least processor time that this rank took for one."""
        fastest = own = math.inf
        exchange(partner, ready, other_ready)  # both begin together
        for _ in range(times):
            began, own_began = time.perf_counter(), time.process_time()
            exchange(partner, source, out)
            exchange(partner, ready, other_ready)  # until both have ended
            fastest = min(fastest, time.perf_counter() - began)
            own = min(own, time.process_time() - own_began)
        return fastest, own

    partners: list[int | None] = []
    for at_once in _turns(count, one_at_a_time=_takes_turns(ranks.device.type, values["scope"])):
        partners.append(next((a + b - own for a, b in at_once if own in (a, b)), None))
    wrong: dict[int, bool] = {}
    fastest = math.inf
    for partner in partners:  # unmeasured: connections are opened
        if partner is not None:
            timed(partner, 2)
            out.zero_()
            fastest = min(fastest, timed(partner, 3)[0])
            wrong[partner] = not bool((out == members[partner] + 1).all())
    found = ranks.gather(fastest)
    in_a_moment = int(_MOMENT_S[ranks.device.type] / median(found)) if found else 0
    times = ranks.share(max(_LEAST_TIMES, min(_MOST_TIMES, in_a_moment)))
    seconds: dict[int, list[tuple[float, float]]] = {partner: [] for partner in partners if partner is not None}
    of_pair: dict[tuple[int, int], list[float]] = {}
    bad: set[tuple[int, int]] = set()
    own_s: dict[tuple[int, int], list[list[float]]] = {}
    began = time.perf_counter()
    for _ in range(MOST_LOOKS):
        for _ in range(_moments(count)):
            for partner in partners:
                ranks.barrier()
                if partner is not None:
                    seconds[partner].append(timed(partner, times))
        gathered = ranks.gather([[partner, seconds[partner], wrong[partner]] for partner in seconds])
        if gathered is not None:
            of_pair, own_s, bad = _by_pair(gathered, ranks, in_node=in_node)
        enough = _enough(of_pair) or time.perf_counter() - began > MOST_S[ranks.device.type]
        if own_s and in_node and not ranks.on_gpu:
            enough = enough and _enough_of_own(own_s)
        if ranks.share(enough):
            break
    if not ranks.is_first:
        return []
    rows = [_row(values, pair, of_pair[pair], ranks, wrong=pair in bad) for pair in sorted(of_pair)]
    if in_node and not ranks.on_gpu:
        rows = [row | {"own_s": own_s[pair]} for row, pair in zip(rows, sorted(of_pair), strict=True)]
    return rows


def _turns(count: int, *, one_at_a_time: bool) -> list[list[tuple[int, int]]]:
    """Return all pairs of so many members, in lists of those that exchange at the same time."""
    found = [[(int(a), int(b)) for a, b in pairs] for pairs in rounds([str(number) for number in range(count)])]
    return [[pair] for pairs in found for pair in pairs] if one_at_a_time else found


def _enough(of_pair: dict[tuple[int, int], list[float]]) -> bool:
    """Return whether a small slowdown would be seen."""
    rates = {(str(a), str(b)): [1 / each for each in seconds] for (a, b), seconds in of_pair.items()}
    return not rates or compare_members(rates).visible <= VISIBLE


def _enough_of_own(own_s: dict[tuple[int, int], list[list[float]]]) -> bool:
    """Return whether a small difference in the ranks' processor time would be seen."""
    return compare_own_time({(str(a), str(b)): of_two for (a, b), of_two in own_s.items()}).visible <= VISIBLE


def _by_pair(
    gathered: list[Any], ranks: Ranks, *, in_node: bool
) -> tuple[dict[tuple[int, int], list[float]], dict[tuple[int, int], list[list[float]]], set[tuple[int, int]]]:
    """Return the times of each pair of ranks, the processor times of its two, and the pairs that got wrong data.

    Both of a pair measured the same exchanges: the slower one's time holds.
    """
    local = ranks.local_size
    found: dict[tuple[int, int], list[float]] = {}
    own: dict[tuple[int, int], list[list[float]]] = {}
    bad: set[tuple[int, int]] = set()
    for rank, of_rank in enumerate(gathered):
        for partner, measured, is_wrong in of_rank:
            times, of_processor = ([each[place] for each in measured] for place in range(2))
            other = rank // local * local + partner if in_node else partner * local + rank % local
            pair = (min(rank, other), max(rank, other))
            found[pair] = [max(two) for two in zip(found.get(pair, times), times, strict=True)]
            own.setdefault(pair, []).append(of_processor)  # of the rank with the lower number first
            if is_wrong:
                bad.add(pair)
    return found, own, bad


def _row(values: dict[str, Any], pair: tuple[int, int], times: list[float], ranks: Ranks, *, wrong: bool) -> Row:
    (node_a, local_a), (node_b, local_b) = (divmod(rank, ranks.local_size) for rank in pair)
    names = ranks.nodes
    in_node = values["scope"] == GPU_PAIR
    where = (
        f"{names[node_a]} {local_a}-{local_b}" if in_node else f"{names[node_a]}-{names[node_b]} rail {local_a}"
    )
    timing, size = summarize(times), max(1, values["bytes"] // 4) * 4
    rate = size / timing.seconds / 1e9
    return {
        **values, "bytes": size, "where": where, "seconds": timing.seconds, "spread": timing.spread,
        "samples": timing.samples, "us": timing.seconds * 1e6, "algbw_gb_s": rate, "busbw_gb_s": rate,
        "wrong": int(wrong), "data": f"wrong between ranks {pair[0]} and {pair[1]}" if wrong else "right",
        "pair": list(pair), "figures": [size / each / 1e9 for each in times],
    }  # fmt: skip
