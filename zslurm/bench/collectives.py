"""Collectives between ranks: time, algorithm and bus bandwidth, and whether the data is right.

With n ranks, S bytes and t seconds (rccl-tests, doc/PERFORMANCE.md, and src/*.cu for what S is):

    operation        S                                        bus bandwidth
    all_reduce       of each rank's buffer                    S/t * 2 (n-1)/n
    reduce_scatter   of each rank's whole input               S/t * (n-1)/n
    all_gather       of the whole output                      S/t * (n-1)/n
    broadcast        of the root's buffer                     S/t
    all_to_all       of each rank's input, all parts of it    S/t * (n-1)/n
    send_recv        to the next rank, while as many arrive   S/t

Algorithm bandwidth is S/t. The bus bandwidth is what the slowest link must carry whatever the number of ranks, and
can be compared with the link's speed.

Groups of ranks (the column `scope`):

    node     the first k ranks of each node, every node at the same time; a row for each node
    all      all ranks of the first m nodes
    rail     the ranks of equal number on each node, every rail at the same time; a row for each rail
    gpu_pair, node_pair    all pairs, in rounds: pairs.py

`two_level` runs the operation as the trainer does with two levels (zslurm/train/parallel/two_level.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zslurm.bench import pairs
from zslurm.bench.measurement import CannotMeasure, MeasurementPlan, Options, Point, Row
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine, Skipped
from zslurm.bench.run.timing import time_together
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.train.parallel.comm import all_gather_into, reduce_scatter_into
from zslurm.train.parallel.levels import Levels, make_levels
from zslurm.train.parallel.topology import Topology
from zslurm.train.parallel.two_level import TwoLevel

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")
"""All that can be measured."""
TWO_LEVEL = ("all_reduce", "reduce_scatter", "all_gather")
"""Those that the trainer has in two levels."""

_ITEM = 4  # fp32, as rccl-tests' default
_VALUES = 17
_PART = 1 << 22
_POINT_S = 1.0
_SHORTEST_S = {"cuda": 0.2, "cpu": 1.0}  # cores that others use too take all the time that a point has
# For the first estimate; it is corrected by what the points take.
_GUESS = {"cuda": (5e-5, 50e9), "cpu": (1e-3, 5e8)}
_PAIR_BYTES = {"cuda": 64 << 20, "cpu": 2 << 20}
_QUICK_BYTES = 64 << 20
_COPIES = {"all_reduce": 1, "broadcast": 1, "send_recv": 2, "reduce_scatter": 2, "all_gather": 2, "all_to_all": 2}


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth: see the table above."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", "send_recv") else (ranks - 1) / ranks


@dataclass(frozen=True)
class _Scope:
    """Groups that measure at the same time."""

    scope: str
    nodes: int
    ranks: int


def scopes(machine: MeasuredMachine, wanted: Sequence[str]) -> Iterator[_Scope]:
    """Return the groups that this machine has, the smaller ones first."""
    local, nodes = machine.ranks_per_node, len(machine.nodes)
    if "node" in wanted:
        for ranks in range(2, local + 1):
            yield _Scope("node", 1, ranks)
    if "all" in wanted:
        for count in sorted({*(2**power for power in range(1, nodes.bit_length())), nodes} - {1}):
            if count <= nodes:
                yield _Scope("all", count, count * local)
    if "rail" in wanted and nodes > 1 and local > 1:
        yield _Scope("rail", nodes, nodes)


def points(options: Options, machine: MeasuredMachine) -> MeasurementPlan:
    """Return operations x groups x levels x sizes; sizes whose buffers do not fit into memory are skipped."""
    if machine.ranks < 2:
        what = "one GPU" if machine.device == "cuda" else "one rank"
        raise CannotMeasure(f"a collective needs two ranks at least, and this is {what}; see --ranks and --nodes")
    planned: list[Point] = []
    skipped: list[Skipped] = []
    latency, bandwidth = _GUESS[machine.device]
    sizes = options["sizes"]
    if options.get("quick") and machine.device == "cpu":  # gloo takes minutes for a GiB
        sizes = [size for size in sizes if size <= _QUICK_BYTES] or sizes[:1]
    for scope in scopes(machine, options["scopes"]):
        for operation in options["operations"]:
            for levels in options["levels"]:
                if levels == "two_level" and (scope.scope != "all" or operation not in TWO_LEVEL):
                    continue
                if levels == "two_level" and machine.ranks_per_node == 1:
                    continue
                for size in sizes:
                    values: dict[str, Any] = {
                        "operation": operation, "scope": scope.scope, "nodes": scope.nodes, "ranks": scope.ranks,
                        "levels": levels, "bytes": size,
                    }  # fmt: skip
                    needed = size * (_COPIES[operation] + (levels == "two_level"))
                    if needed > 0.9 * machine.gpu_memory:
                        free = show_bytes(machine.gpu_memory)
                        reason = f"its buffers are {show_bytes(needed)} for each rank, of {free} that are free"
                        skipped.append(Skipped(point=values, reason=reason))
                        continue
                    once = latency * scope.ranks + size * bus_factor(operation, scope.ranks) / bandwidth
                    planned.append(
                        Point(values, max(_SHORTEST_S[machine.device], min(_POINT_S, 60 * once), 8 * once))
                    )
    for name, rounds in pairs.sweeps(machine, options["scopes"]):
        values = {
            "operation": "send_recv", "scope": name, "nodes": 1 if name == pairs.GPU_PAIR else 2, "ranks": 2,
            "levels": "flat", "bytes": _PAIR_BYTES[machine.device],
        }  # fmt: skip
        planned.append(Point(values, pairs.sweep_seconds(machine, name, rounds)))
    return MeasurementPlan(planned, skipped)


def run(point: Point, ranks: BenchRanks) -> list[Row]:
    """Measure one operation in all groups of its scope at once; rank 0 returns the rows of all groups."""
    values = point.values
    if values["scope"] in (pairs.GPU_PAIR, pairs.NODE_PAIR):
        return pairs.sweep(values, ranks)
    members, where = _members(values, ranks)
    row = None
    if ranks.rank in members:
        group = ranks.group(members)
        levels = _levels(values, ranks) if values["levels"] == "two_level" else None
        operation = _Operation(values["operation"], values["bytes"], group, levels, ranks)
        operation.fill()
        timing = time_together(operation.call, group=group, device=ranks.device, seconds=_POINT_S)
        wrong = operation.wrong()
        size, n = operation.bytes, len(members)
        row = {
            **values,
            "bytes": size,
            "where": where,
            "seconds": timing.seconds,
            "spread": timing.spread,
            "samples": timing.samples,
            "us": timing.seconds * 1e6,
            "algbw_gb_s": size / timing.seconds / 1e9,
            "busbw_gb_s": size / timing.seconds / 1e9 * bus_factor(values["operation"], n),
            "wrong": wrong,
        }
    gathered = ranks.gather(row)
    if gathered is None:
        return []
    rows: dict[str, Row] = {}
    for number, result in enumerate(gathered):
        if result is None:
            continue
        kept = rows.setdefault(result["where"], result | {"wrong": 0, "data": "right"})
        kept["wrong"] += result["wrong"]
        if result["wrong"]:
            before = "wrong on" if kept["data"] == "right" else f"{kept['data']},"
            kept["data"] = f"{before} rank {number}"
    return list(rows.values())


def _members(values: dict[str, Any], ranks: BenchRanks) -> tuple[list[int], str]:
    """Return the ranks of this rank's group, and what the group is called."""
    local = ranks.local_size
    if values["scope"] == "node":
        first = ranks.node * local
        return list(range(first, first + values["ranks"])), ranks.nodes[ranks.node]
    if values["scope"] == "rail":
        return list(range(ranks.local_rank, ranks.size, local)), f"rail {ranks.local_rank}"
    return list(range(values["nodes"] * local)), ""


_made: dict[int, Levels] = {}


def _levels(values: dict[str, Any], ranks: BenchRanks) -> Levels:
    """Return this rank's groups of two levels over the first nodes; made once for each number of nodes."""
    nodes = values["nodes"]
    if nodes not in _made:
        _made[nodes] = make_levels(Topology(nodes, ranks.local_size), ranks.rank, ranks.timeout)
    return _made[nodes]


class _Operation:
    """One collective with its buffers.

    Attributes:
        bytes: S of the table above: the size that was asked for, rounded up to whole parts for all ranks.
    """

    def __init__(
        self, name: str, size: int, group: dist.ProcessGroup, levels: Levels | None, ranks: BenchRanks
    ) -> None:
        self.name, self.group, self.device = name, group, ranks.device
        self.rank, self.n = dist.get_rank(group), dist.get_world_size(group)
        self.comm = None if levels is None else TwoLevel(group, levels, ranks.device)
        share_of_rank = -(-size // (_ITEM * self.n))
        self.elements = share_of_rank * self.n
        self.bytes = self.elements * _ITEM
        full, piece = self.elements, share_of_rank
        sizes = {
            "all_reduce": (full, 0), "broadcast": (full, 0), "send_recv": (full, full),
            "reduce_scatter": (full, piece), "all_gather": (piece, full), "all_to_all": (full, full),
        }[name]  # fmt: skip
        self.source, self.out = (torch.empty(count, device=self.device) for count in sizes)
        if self.comm is not None:
            self.comm.reserve(torch.empty(2 * full // self.comm.node.size, device=self.device))
        # Sums over all ranks depend only on the residue of the place.
        residues = range(_VALUES)
        sums = [float(sum((residue + rank * 5) % _VALUES for rank in range(self.n))) for residue in residues]
        self.sums = torch.tensor(sums, device=self.device)
        rank_at = [
            position if self.comm is None else self.comm.topology.rank(position) for position in range(self.n)
        ]
        self.rank_at = torch.tensor(rank_at, device=self.device)
        self.position = self.rank if self.comm is None else self.comm.position
        self.call = self._call()

    def fill(self) -> None:
        """Fill the source with what depends on the rank and the place; sums of it are exact."""
        for places, chunk in self._parts(self.source):
            chunk.copy_(_value(self.rank, places))
        if self.name == "broadcast" and self.rank:  # every 17th rank would have the root's numbers
            self.source.fill_(-1.0)
        self.out.zero_()

    def _parts(self, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return a tensor in parts, each with its places: what is computed of them needs little memory then."""
        for start in range(0, len(whole), _PART):
            chunk = whole[start : start + _PART]
            yield torch.arange(start, start + len(chunk), device=self.device), chunk

    def _call(self) -> Callable[[], object]:
        source, out, group, comm = self.source, self.out, self.group, self.comm
        if comm is not None:
            return {
                "all_reduce": lambda: comm.all_reduce(source),
                "reduce_scatter": lambda: comm.reduce_scatter(out, source).wait(),
                "all_gather": lambda: comm.all_gather(out, source).wait(),
            }[self.name]
        first = dist.get_global_rank(group, 0)
        after, before = ((self.rank + step) % self.n for step in (1, -1))

        def send_recv() -> None:
            operations = [  # receive first: pairs.py states why
                dist.P2POp(dist.irecv, out, group=group, group_peer=before),
                dist.P2POp(dist.isend, source, group=group, group_peer=after),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return {
            "all_reduce": lambda: dist.all_reduce(source, group=group),
            "reduce_scatter": lambda: reduce_scatter_into(out, source, group=group),
            "all_gather": lambda: all_gather_into(out, source, group=group),
            "broadcast": lambda: dist.broadcast(source, first, group=group),
            "all_to_all": lambda: dist.all_to_all_single(out, source, group=group),
            "send_recv": send_recv,
        }[self.name]

    def wrong(self) -> int:
        """Run it again on fresh data, and return how many elements of this rank's result are wrong."""
        self.fill()
        self.call()
        output = self.source if self.name in ("all_reduce", "broadcast") else self.out
        return sum(int((chunk != self._expected(places)).sum().item()) for places, chunk in self._parts(output))

    def _expected(self, places: torch.Tensor) -> torch.Tensor:
        """Return what the result must hold at these places."""
        elements_of_rank = self.elements // self.n
        if self.name == "all_reduce":
            return self.sums[_residue(places)]
        if self.name == "reduce_scatter":
            return self.sums[_residue(places + self.position * elements_of_rank)]
        if self.name == "broadcast":
            return _value(0, places)
        if self.name == "send_recv":
            return _value((self.rank - 1) % self.n, places)
        if self.name == "all_to_all":
            return _value(places // elements_of_rank, self.rank * elements_of_rank + places % elements_of_rank)
        return _value(self.rank_at[places // elements_of_rank], places % elements_of_rank)


def _residue(places: torch.Tensor) -> torch.Tensor:
    return places * 7 % _VALUES


def _value(rank: int | torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what a rank's source holds at these places: small whole numbers."""
    return ((_residue(places) + rank * 5) % _VALUES).to(torch.float32)
