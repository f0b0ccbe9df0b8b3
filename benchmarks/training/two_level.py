"""Reduce-scatter in two levels against one flat ring, with injected latency: a simulation of a network, by gloo.

Sixteen ranks reduce 64 MiB of fp32, as two nodes of eight and as four of four, in one bucket or in smaller ones,
one after the other. gloo's own collectives cannot be delayed from outside, so the reductions here are rings of
point-to-point messages between real processes: one ring over all ranks, node by node, or one ring in each node and
then one along each rail. It is the same function for all rings, and the results are compared with the sum.

Two clocks run. A message takes 10 us between nodes and 3 us inside one, from when it is sent until it can be used:

    network   a simulated clock of each rank, carried by the messages: no processor time, no waiting for cores.
              `network_latency` has no bandwidth. `network` has the links that the plan assumes for MI300X
              (zslurm/train/plan/communication.py), and as many rings at once as there are ways: all xGMI links of
              a GPU, and all NICs of a node where the flat ring leaves it.
    wall      this machine: a receiver waits until the latency is over, then adds up. Sixteen processes share its
              cores, so it shows what messages and copies cost here, not a network.

`gloo` is the trainer's own collectives, flat and in two levels, on the same ranks without injected latency.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Timing, alternate, write_result
from tests.train.ranks import in_group
from zslurm.train.parallel.comm import Comm
from zslurm.train.parallel.levels import make_levels
from zslurm.train.parallel.topology import Path, Topology
from zslurm.train.parallel.two_level import TwoLevel
from zslurm.train.plan.communication import Links

SHAPES = (Topology(2, 8), Topology(4, 4))
ELEMENTS = (64 << 20) // 4
BUCKETS = (1, 16, 128)
RUNS = 2
LINKS = Links()
_STAMPS = 4  # doubles behind the data of a message: when it arrives, by each clock; padded
_WAYS = ("flat", "two_level")

Reduce = Callable[[Tensor], Tensor]


@dataclass
class Ring:
    """Ranks that send to the next one of them, with the clocks of this rank.

    Attributes:
        rates: bytes a second to another rank of the node, and to another node.
        clocks: seconds by the simulated clocks, of the latency alone and of the transfer as well.
    """

    topology: Topology
    ranks: range
    rank: int
    rates: tuple[float, float]
    clocks: dict[str, float]

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Return this rank's chunk, by its number in the ring, of the sum of `whole` over the ring."""
        size, own = len(self.ranks), self.ranks.index(self.rank)
        chunks = whole.chunk(size)
        incoming = torch.empty(len(chunks[0]) + 2 * _STAMPS)
        outgoing = torch.empty_like(incoming)
        part = chunks[(own - 1) % size]
        for step in range(size - 1):
            outgoing[: len(part)] = part
            self._send_and_receive(outgoing, incoming)
            part = chunks[(own - step - 2) % size] + incoming[: len(part)]
        return part

    def _send_and_receive(self, outgoing: Tensor, incoming: Tensor) -> None:
        own = self.ranks.index(self.rank)
        after, before = self.ranks[(own + 1) % len(self.ranks)], self.ranks[own - 1]
        latency_s, transfer_s = self._link(self.rank, after, 4 * (len(outgoing) - 2 * _STAMPS))
        stamps = outgoing[-2 * _STAMPS :].view(torch.float64)
        sent = self.clocks["transfer"] + transfer_s  # the link is busy until then
        stamps[0], stamps[1] = self.clocks["latency"] + latency_s, sent + latency_s
        stamps[2] = time.monotonic() + latency_s
        request = dist.isend(outgoing, after)
        assert request is not None
        dist.recv(incoming, before)
        arrived = incoming[-2 * _STAMPS :].view(torch.float64)
        while time.monotonic() < arrived[2].item():
            pass
        request.wait()
        self.clocks["latency"] = max(self.clocks["latency"], arrived[0].item())
        self.clocks["transfer"] = max(sent, arrived[1].item())

    def _link(self, sender: int, receiver: int, size: int) -> tuple[float, float]:
        inside = self.topology.path(sender, receiver) is Path.NODE
        hop_s = LINKS.inside_hop_s if inside else LINKS.between_hop_s
        return hop_s, size / self.rates[not inside]


def rings(topology: Topology, rank: int, clocks: dict[str, float]) -> tuple[Ring, Ring, Ring]:
    """The flat ring, the node's, and the rail's; they share the clocks."""
    inside = LINKS.inside_rate(topology.local_size)
    flat = Ring(topology, range(topology.ranks), rank, (inside, topology.local_size * LINKS.nic_rate), clocks)
    node = Ring(topology, topology.node_ranks(rank), rank, (inside, 0.0), clocks)
    return flat, node, Ring(topology, topology.rail_ranks(rank), rank, (0.0, LINKS.nic_rate), clocks)


def measured(group: dist.ProcessGroup, topology: Topology) -> list[dict[str, Any]]:
    """Times of all ways by every clock, for each number of buckets; those of the last rank to be done."""
    rank, clocks = dist.get_rank(group), {"latency": 0.0, "transfer": 0.0}
    flat, node, rail = rings(topology, rank, clocks)
    comm, levels = Comm(group), TwoLevel(group, make_levels(topology, rank), torch.device("cpu"))

    def by_rings(whole: Tensor) -> Tensor:
        return rail.reduce_scatter(node.reduce_scatter(whole))

    def by_gloo(each: Comm, whole: Tensor) -> Tensor:
        out = torch.empty(len(whole) // topology.ranks)
        each.reduce_scatter(out, whole).wait()
        return out

    ways: dict[str, Reduce] = {
        "flat": flat.reduce_scatter,
        "two_level": by_rings,
        "gloo flat": partial(by_gloo, comm),
        "gloo two_level": partial(by_gloo, levels),
    }
    rows = []
    for buckets in BUCKETS:
        whole = torch.full((ELEMENTS // buckets,), float(rank))
        levels.reserve(torch.empty(2 * len(whole) // topology.local_size))
        simulated = {}
        for name, reduce in ways.items():
            clocks.update(latency=0.0, transfer=0.0)
            repeat(group, buckets, reduce, whole)
            simulated[name] = slowest(group, [clocks["latency"], clocks["transfer"]])
        actions = {name: partial(repeat, group, buckets, reduce, whole) for name, reduce in ways.items()}
        rows.append(row(topology, buckets, simulated, alternate(actions, runs=RUNS, warm_up=0)))
    return rows


def repeat(group: dist.ProcessGroup, times: int, reduce: Reduce, whole: Tensor) -> None:
    """Reduce all buckets and compare the last one with the sum; ranks begin and end together."""
    dist.barrier(group)
    for _ in range(times):
        part = reduce(whole)
    dist.barrier(group)
    assert bool((part == sum(range(dist.get_world_size(group)))).all())


def slowest(group: dist.ProcessGroup, seconds: list[float]) -> list[float]:
    """The largest of all ranks' times."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    slow: list[float] = values.tolist()
    return slow


def row(
    topology: Topology, buckets: int, simulated: dict[str, list[float]], timings: dict[str, Timing]
) -> dict[str, Any]:
    """Times of all buckets, and how many times as long the flat ring takes."""
    clocks: dict[str, dict[str, float]] = {
        "network_latency": {name: simulated[name][0] for name in _WAYS},
        "network": {name: simulated[name][1] for name in _WAYS},
        "wall": {name: timings[name].median for name in _WAYS},
        "gloo": {name: timings[f"gloo {name}"].median for name in _WAYS},
    }
    figures = {
        clock: {
            "flat_ms": round(1e3 * times["flat"], 3),
            "two_level_ms": round(1e3 * times["two_level"], 3),
            "flat_to_two_level": round(times["flat"] / times["two_level"], 2),
        }
        for clock, times in clocks.items()
    }
    return {
        "nodes": topology.nodes,
        "ranks_per_node": topology.local_size,
        "buckets": buckets,
        "bucket_kib": ELEMENTS * 4 // buckets // 1024,
        **figures,
    }


def run() -> None:
    """Measure and write results/two_level.json."""
    rows = [row for shape in SHAPES for row in in_group(measured, shape.ranks, shape)[0]]
    write_result(
        "two_level",
        {
            "torch": torch.__version__,
            "mib": ELEMENTS * 4 / 2**20,
            "latency_us": {"inside": LINKS.inside_hop_s * 1e6, "between": LINKS.between_hop_s * 1e6},
            "gb_per_s": {"xgmi_link": LINKS.link_rate / 1e9, "nic": LINKS.nic_rate / 1e9},
            "reductions": rows,
        },
    )
