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
processor time a rank that is slow itself. It is taken of messages of OWN_BYTES, right after those that the clock
times: they fit into caches, so it depends less on how much of the memory others use, and many of them fit into a
moment. Both begin these together as well: a rank that is late finds all of a message there, and needs less
processor time to take it.

A sweep is repeated until a slowdown of VISIBLE would be seen, MOST_LOOKS times at most. On CPUs, where other
programs may hide it from the clock for good, only the processor time decides after MOST_S seconds. A sweep ends
by the noise, not by whether someone is slow, and names are looked for once, at its end.

The ranks that exchange belong to one process group, so a sweep opens no communicator for each pair.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zslurm.bench.measurement import Row
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine
from zslurm.bench.results.findings import compare_members, compare_own_time
from zslurm.bench.results.peers import fewest_moments, rounds
from zslurm.bench.run.timing import summarize

GPU_PAIR, NODE_PAIR = "gpu_pair", "node_pair"
"""The two scopes."""

VISIBLE = 0.15
MOST_LOOKS = 16
MOST_S = {"cuda": math.inf, "cpu": 45.0}
OWN_BYTES = 512 << 10
"""See above."""
_MOMENTS = 20
_MOMENT_S = {"cuda": 0.02, "cpu": 0.02}
_BETWEEN_S = 0.005
_LEAST_TIMES, _MOST_TIMES = 4, 1000


class _Moment(NamedTuple):
    """What a rank measured with one partner at one moment.

    Attributes:
        wall_s: of the fastest exchange.
        own_s: least processor time of this rank for a short one; 0 if it is not taken.
    """

    wall_s: float
    own_s: float


def sweeps(machine: MeasuredMachine, wanted: list[str]) -> Iterator[tuple[str, int]]:
    """Return the sweeps that this machine has, each with how many rounds it takes."""
    local, nodes = machine.ranks_per_node, len(machine.nodes)
    for scope, members in ((GPU_PAIR, local), (NODE_PAIR, nodes)):
        if scope in wanted and members > 2:
            yield scope, members - 1 + members % 2


def sweep_seconds(machine: MeasuredMachine, scope: str, sweep_rounds: int) -> float:
    """Return about how long a sweep takes up to its first look."""
    members = machine.ranks_per_node if scope == GPU_PAIR else len(machine.nodes)
    turns = members // 2 if _takes_turns(machine.device, scope) else 1
    of_a_pair = _MOMENT_S[machine.device] * (2 if _compares_own_time(machine.device, scope) else 1) + _BETWEEN_S
    return _moments(members) * sweep_rounds * turns * of_a_pair


def _takes_turns(device: str, scope: str) -> bool:
    """Return whether the pairs of a round exchange one after the other."""
    return device == "cpu" and scope == GPU_PAIR


def _compares_own_time(device: str, scope: str) -> bool:
    """Return whether the processor time of ranks is compared."""
    return device == "cpu" and scope == GPU_PAIR


def _moments(members: int) -> int:
    """Return after how many moments it is looked whether they are enough."""
    return max(_MOMENTS, fewest_moments(members))


def sweep(values: dict[str, Any], ranks: BenchRanks) -> list[Row]:
    """Exchange `values["bytes"]` in both directions between all pairs; rank 0 gets a row for each."""
    in_node = values["scope"] == GPU_PAIR
    local = ranks.local_size
    if in_node:
        first = ranks.node * local
        members, own_index, count = list(range(first, first + local)), ranks.local_rank, local
    else:
        members, own_index, count = list(range(ranks.local_rank, ranks.size, local)), ranks.node, len(ranks.nodes)
    group = ranks.group(members)
    takes_own = _compares_own_time(ranks.device.type, values["scope"])
    exchanges = _Exchanges(ranks, group, values["bytes"])
    partners: list[int | None] = []
    for at_once in _turns(count, one_at_a_time=_takes_turns(ranks.device.type, values["scope"])):
        partners.append(next((a + b - own_index for a, b in at_once if own_index in (a, b)), None))
    wrong: dict[int, bool] = {}
    fastest = math.inf
    for partner in partners:  # unmeasured: connections are opened
        if partner is not None:
            exchanges.timed(partner, 2, 2 * takes_own)
            fastest = min(fastest, exchanges.timed(partner, 3, 0).wall_s)
            wrong[partner] = not exchanges.gives(partner, members[partner] + 1)
    seconds_of_ranks = ranks.gather(fastest)
    in_a_moment = int(_MOMENT_S[ranks.device.type] / median(seconds_of_ranks)) if seconds_of_ranks else 0
    times = ranks.share(max(_LEAST_TIMES, min(_MOST_TIMES, in_a_moment)))
    own_times = takes_own * times * exchanges.short_in_whole
    seconds: dict[int, list[_Moment]] = {partner: [] for partner in partners if partner is not None}
    of_pair: dict[tuple[int, int], list[float]] = {}
    bad: set[tuple[int, int]] = set()
    own_s: dict[tuple[int, int], list[list[float]]] = {}
    began = time.perf_counter()
    for _ in range(MOST_LOOKS):
        for _ in range(_moments(count)):
            for partner in partners:
                ranks.barrier()
                if partner is not None:
                    seconds[partner].append(exchanges.timed(partner, times, own_times))
        gathered = ranks.gather([[partner, seconds[partner], wrong[partner]] for partner in seconds])
        if gathered is not None:
            of_pair, own_s, bad = _by_pair(gathered, ranks, in_node=in_node)
        enough = _enough(of_pair) or time.perf_counter() - began > MOST_S[ranks.device.type]
        if own_s and takes_own:
            enough = enough and _enough_of_own(own_s)
        if ranks.share(enough):
            break
    if not ranks.is_first:
        return []
    rows = [_row(values, pair, of_pair[pair], ranks, wrong=pair in bad) for pair in sorted(of_pair)]
    if takes_own:
        rows = [row | {"own_s": own_s[pair]} for row, pair in zip(rows, sorted(of_pair), strict=True)]
    return rows


class _Exchanges:
    """Exchanges of one rank with its partners.

    Attributes:
        short_in_whole: how many short messages are as much as a whole one.
    """

    def __init__(self, ranks: BenchRanks, group: dist.ProcessGroup, size: int) -> None:
        self._ranks, self._group = ranks, group
        self._source = torch.full((max(1, size // 4),), float(ranks.rank + 1), device=ranks.device)
        self._out = torch.zeros_like(self._source)
        self._ready, self._other_ready = torch.zeros(2, 1, device=ranks.device)
        self._short = min(len(self._source), OWN_BYTES // 4)
        self.short_in_whole = len(self._source) // self._short

    def timed(self, partner: int, times: int, own_times: int) -> _Moment:
        """Time exchanges with a partner, and short ones by this rank's processor time."""
        full_exchange = self._exchange(partner, self._source, self._out)
        signal = self._exchange(partner, self._ready, self._other_ready)
        wall: list[float] = []
        signal()  # both begin together
        for _ in range(times):
            began = time.perf_counter()
            full_exchange()
            signal()  # until both have ended
            wall.append(time.perf_counter() - began)
        own_seconds: list[float] = []
        short = self._exchange(partner, self._source[: self._short], self._out[: self._short])
        for _ in range(own_times):
            signal()
            own_began = time.process_time()
            short()
            own_seconds.append(time.process_time() - own_began)
        return _Moment(min(wall), min(own_seconds, default=0.0))

    def gives(self, partner: int, value: float) -> bool:
        """Return whether an exchange brings this value everywhere."""
        self._out.zero_()
        self._exchange(partner, self._source, self._out)()
        return bool((self._out == value).all())

    def _exchange(self, partner: int, sent: Tensor, received: Tensor) -> Callable[[], None]:
        """Return what makes one exchange; making its list of operations is not part of it.

        It receives first: gloo has one connection for both directions and writes to the other rank, on the same
        one, that this rank is ready to receive. Behind a message that is being sent this would wait for its end,
        and now and then the two directions would go one after the other.
        """
        operations = [
            dist.P2POp(dist.irecv, received, group=self._group, group_peer=partner),
            dist.P2POp(dist.isend, sent, group=self._group, group_peer=partner),
        ]

        def once() -> None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            self._ranks.synchronize()

        return once


def _turns(count: int, *, one_at_a_time: bool) -> list[list[tuple[int, int]]]:
    """Return all pairs of a number of members, in lists of pairs that exchange at the same time."""
    pairs_by_round = [
        [(int(a), int(b)) for a, b in pairs] for pairs in rounds([str(number) for number in range(count)])
    ]
    return [[pair] for pairs in pairs_by_round for pair in pairs] if one_at_a_time else pairs_by_round


def _enough(of_pair: dict[tuple[int, int], list[float]]) -> bool:
    """Return whether a small slowdown would be seen."""
    rates = {(str(a), str(b)): [1 / duration for duration in seconds] for (a, b), seconds in of_pair.items()}
    return not rates or compare_members(rates).visible <= VISIBLE


def _enough_of_own(own_s: dict[tuple[int, int], list[list[float]]]) -> bool:
    """Return whether a small difference in the ranks' processor time would be seen."""
    return compare_own_time({(str(a), str(b)): of_two for (a, b), of_two in own_s.items()}).visible <= VISIBLE


def _by_pair(
    gathered: list[Any], ranks: BenchRanks, *, in_node: bool
) -> tuple[dict[tuple[int, int], list[float]], dict[tuple[int, int], list[list[float]]], set[tuple[int, int]]]:
    """Return the times of each pair of ranks, the processor times of its two, and the pairs that got wrong data.

    Both of a pair measured the same exchanges: the slower one's time holds.
    """
    local = ranks.local_size
    wall_by_pair: dict[tuple[int, int], list[float]] = {}
    processor_by_pair: dict[tuple[int, int], list[list[float]]] = {}
    bad: set[tuple[int, int]] = set()
    for rank, of_rank in enumerate(gathered):
        for partner, measured, is_wrong in of_rank:
            times, of_processor = ([kinds[kind] for kinds in measured] for kind in range(2))
            peer = rank // local * local + partner if in_node else partner * local + rank % local
            pair = (min(rank, peer), max(rank, peer))
            wall_by_pair[pair] = [max(two) for two in zip(wall_by_pair.get(pair, times), times, strict=True)]
            processor_by_pair.setdefault(pair, []).append(of_processor)  # of the rank with the lower number first
            if is_wrong:
                bad.add(pair)
    return wall_by_pair, processor_by_pair, bad


def _row(
    values: dict[str, Any], pair: tuple[int, int], times: list[float], ranks: BenchRanks, *, wrong: bool
) -> Row:
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
        "pair": list(pair), "figures": [size / duration / 1e9 for duration in times],
    }  # fmt: skip
