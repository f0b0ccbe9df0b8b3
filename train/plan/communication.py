"""Bytes and seconds of a step's communication, level by level of the network: a model, without torch.

Ranks are (node, rail): local rank r of every node is on rail r. Three kinds of ways lead from one to another:

    inside     within a node: xGMI, a link from each GPU to each other one, so that n ranks use n - 1 links each
    rail       between nodes, to the same local rank: one NIC each
    off-rail   between nodes, to another local rank: no path on a rails-only network but by another GPU of the node

For n bytes on N nodes of L ranks, W = N L, each rank sends

    reduce-scatter,   two levels   n (L-1)/L inside, then n/L (N-1)/N along its rail, in rings
    all-gather        flat         n (W-1)/W in one ring; 1/L of it leaves the node, along one rail, as in RCCL
    exchange of       two levels   s (L-1)/L to the rail of the owner, then s (N-1)/N along it; s is what the
    matrices                       rank holds: at most N - 1 + L - 1 messages
                      flat         s/W to each in the mean, so s (N-1)(L-1)/W off-rail: at most W - 1 messages

Time is latency plus bytes over bandwidth. A ring of n ranks has n - 1 hops, one after the other; a message is one.
Two levels are one after the other; a flat ring keeps links and NICs busy at once, so that the slower one counts.
`Links` has the assumed values: 3 us and 64 GB/s a link inside a node, 10 us and 400 Gb/s a NIC between nodes. The
mean hop of a ring over nodes of eight is then 3.9 us. Nothing of this was measured on MI300X.

The size of a bucket follows from the model: the smallest one with which at most a tenth of the predicted time of a
step's communication is latency. Larger ones gain nothing and are finished later. If that would be fewer than
FEWEST_BUCKETS (flat collectives on many nodes), it is so many, since a single one would hide under nothing.
If the cluster's profile has a measured size for about as many nodes (cluster.measured.bucket_mb), a run is
resolved with it as its parallel.bucket_mb, and the model is not asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zslurm.train.config import TrainConfig
from zslurm.train.context.bytes import Attention, choose_attention, context_bytes
from zslurm.train.parallel.memory import ITEMSIZE
from zslurm.train.sections.phases import PhaseConfig
from zslurm.train.shapes import owned_table

LATENCY_SHARE = 0.1
"""Largest share of the predicted communication time that may be latency."""

SMALLEST_BUCKET = 64 << 20
"""Bytes; a smaller message does not reach the bandwidths that the model assumes."""

FEWEST_BUCKETS = 4
"""Buckets, if matrices have so many times SMALLEST_BUCKET: what is not the last one can run under backward."""

_MIB = 1 << 20


@dataclass(frozen=True)
class Links:
    """What ranks are joined by: seconds of a hop, and bytes a second in one direction."""

    inside_hop_s: float = 3e-6
    between_hop_s: float = 10e-6
    link_rate: float = 64e9  # from one GPU of a node to one other
    nic_rate: float = 50e9  # 400 Gb/s

    def inside_rate(self, ranks: int) -> float:
        """Return the bytes a second that each of a number of ranks of a node sends to the others."""
        return max(1, ranks - 1) * self.link_rate


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a run: on how many nodes, how many on each, and how their collectives are made."""

    nodes: int
    local: int
    two_level: bool

    @property
    def ranks(self) -> int:
        """Return how many there are."""
        return self.nodes * self.local

    @classmethod
    def of(cls, ranks: int, local: int, collectives: str) -> RankGroup:
        """Return the group of a run, `local` of its ranks on each node, by `parallel.collectives`.

        A run for a rails-only network has `two_level` there when it is resolved; what is still `auto` is flat.
        """
        if ranks <= local:
            return cls(1, ranks, False)
        nodes, rest = divmod(ranks, local)
        if rest or local == 1:
            return cls(ranks, 1, False)
        return cls(nodes, local, nodes > 1 and collectives == "two_level")


@dataclass(frozen=True)
class Traffic:
    """What one rank sends, in bytes by level, and how long it takes."""

    inside: float = 0.0
    rail: float = 0.0
    off_rail: float = 0.0
    messages: int = 0
    latency_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Return latency and transfer together."""
        return self.latency_s + self.transfer_s

    def __add__(self, other: Traffic) -> Traffic:
        """Return both, one after the other."""
        return Traffic(
            self.inside + other.inside,
            self.rail + other.rail,
            self.off_rail + other.off_rail,
            self.messages + other.messages,
            self.latency_s + other.latency_s,
            self.transfer_s + other.transfer_s,
        )

    def __mul__(self, times: int) -> Traffic:
        """Return the same `times` times."""
        return Traffic(
            self.inside * times,
            self.rail * times,
            self.off_rail * times,
            self.messages * times,
            self.latency_s * times,
            self.transfer_s * times,
        )


def collective(size: float, group: RankGroup, links: Links) -> Traffic:
    """Return the traffic of a reduce-scatter or an all-gather of `size` bytes, counted whole."""
    nodes, local, ranks = group.nodes, group.local, group.ranks
    if group.two_level or nodes == 1 or local == 1:
        inside, rail = size * (local - 1) / local, size / local * (nodes - 1) / nodes
        hops, between = local - 1, nodes - 1
        transfer_s = inside / links.inside_rate(local) + rail / links.nic_rate
    else:
        inside, rail = size * (ranks - 1) / ranks * (local - 1) / local, size * (ranks - 1) / ranks / local
        hops, between = nodes * (local - 1), nodes - 1
        transfer_s = max(inside / links.inside_rate(local), rail / links.nic_rate)
    latency_s = hops * links.inside_hop_s + between * links.between_hop_s
    return Traffic(inside, rail, 0.0, hops + between, latency_s, transfer_s)


def exchange(size: float, group: RankGroup, links: Links) -> Traffic:
    """Return the traffic of one way of the exchange of matrices, of which a rank holds `size` bytes."""
    nodes, local, ranks = group.nodes, group.local, group.ranks
    if group.two_level:
        inside, rail, off_rail = size * (local - 1) / local, size * (nodes - 1) / nodes, 0.0
        near, far = local - 1, nodes - 1
    else:
        inside, rail = size * (local - 1) / ranks, size * (nodes - 1) / ranks
        off_rail = size * (nodes - 1) * (local - 1) / ranks
        near, far = local - 1, ranks - local
    transfer_s = inside / links.inside_rate(local) + (rail + off_rail) / links.nic_rate
    latency_s = near * links.inside_hop_s + far * links.between_hop_s
    return Traffic(inside, rail, off_rail, near + far, latency_s, transfer_s)


@dataclass(frozen=True)
class StepTraffic:
    """The communication of ZeRO-1 in one step, of one rank.

    Attributes:
        buckets: reductions of matrices, and as many gathers.
        bucket_bytes: of gradients in each.
        reduce_bucket, reduce_flat: one reduction, and the one of all that is no matrix.
        to_owners, to_holders: the exchange of matrices, one way and back.
        gather_bucket, gather_flat: one gather, and the one of all that is no matrix.
    """

    buckets: int
    bucket_bytes: float
    reduce_bucket: Traffic
    reduce_flat: Traffic
    to_owners: Traffic
    to_holders: Traffic
    gather_bucket: Traffic
    gather_flat: Traffic

    @property
    def reduce_scatter(self) -> Traffic:
        """Return all reductions."""
        return self.reduce_bucket * self.buckets + self.reduce_flat

    @property
    def exchange(self) -> Traffic:
        """Return both ways of the exchange of matrices."""
        return self.to_owners + self.to_holders

    @property
    def all_gather(self) -> Traffic:
        """Return all gathers."""
        return self.gather_bucket * self.buckets + self.gather_flat

    @property
    def total(self) -> Traffic:
        """Return everything."""
        return self.reduce_scatter + self.exchange + self.all_gather

    def exposed_s(self, forward_s: float, backward_s: float) -> float:
        """Return what communication adds to a step whose microbatches compute for some time, in seconds.

        Assumed: the last backward finishes the gradients of one bucket after the other, each in the same time,
        and a bucket's reduction runs from then on, one at a time; the flat space follows, and the exchange. The
        first forward needs the weights of one bucket after the other, in the same way. Communication that
        overlaps with computation slows neither.
        """
        reduced = 0.0
        for number in range(self.buckets):
            ready = backward_s * (number + 1) / self.buckets
            reduced = max(reduced, ready) + self.reduce_bucket.seconds
        reduced = max(reduced, backward_s) + self.reduce_flat.seconds + self.to_owners.seconds
        arrived = self.to_holders.seconds + self.gather_flat.seconds
        computed = arrived
        for _ in range(self.buckets):
            arrived += self.gather_bucket.seconds
            computed = max(computed, arrived) + forward_s / self.buckets
        return reduced - backward_s + computed - (forward_s if self.buckets else 0.0)


def step_traffic(config: TrainConfig, group: RankGroup, links: Links | None = None) -> StepTraffic:
    """Return the communication of a step of ZeRO-1, the same in every phase."""
    links = links or Links()
    matrices, flat, gradient, weight = _sizes(config)
    bucket = bucket_bytes(config, group, links)
    count = max(1, math.ceil(matrices * gradient / bucket)) if matrices else 0
    elements = matrices / max(1, count)  # the last bucket is shorter: counted are equal ones
    return StepTraffic(
        buckets=count,
        bucket_bytes=elements * gradient,
        reduce_bucket=collective(elements * gradient, group, links),
        reduce_flat=collective(flat * gradient, group, links),
        to_owners=exchange(matrices * gradient / group.ranks, group, links),
        to_holders=exchange(matrices * weight / group.ranks, group, links),
        gather_bucket=collective(elements * weight, group, links),
        gather_flat=collective(flat * weight, group, links),
    )


def bucket_bytes(config: TrainConfig, group: RankGroup, links: Links | None = None) -> float:
    """Return the bytes of gradients in one reduction: `parallel.bucket_mb`, or, if that is null, the model's."""
    if config.parallel.bucket_mb is not None:
        return config.parallel.bucket_mb * 2**20
    matrices, flat, gradient, weight = _sizes(config)
    return automatic_bucket_bytes(
        group.nodes,
        group.local,
        matrices * gradient,
        weight_bytes=matrices * weight,
        flat_bytes=flat * (gradient + weight),
        two_level=group.two_level,
        links=links,
    )


def automatic_bucket_bytes(
    nodes: int,
    local: int,
    gradient_bytes: float,
    *,
    weight_bytes: float | None = None,
    flat_bytes: float = 0.0,
    two_level: bool = True,
    links: Links | None = None,
) -> float:
    """Return the smallest bucket with which latency is at most LATENCY_SHARE of the communication of a step.

    Never less than SMALLEST_BUCKET, and never more than a part in FEWEST_BUCKETS.

    Args:
        nodes: how many there are.
        local: ranks on each.
        gradient_bytes: of all matrices, in the format of the reduction.
        weight_bytes: of the same, in the weights' format; default: as many.
        flat_bytes: of all else, gradients and weights together.
        two_level: whether collectives are made in two levels.
        links: what joins the ranks.
    """
    links, group = links or Links(), RankGroup(nodes, local, two_level and nodes > 1 and local > 1)
    weight_bytes = gradient_bytes if weight_bytes is None else weight_bytes
    both_ways = gradient_bytes + weight_bytes
    exchanged = exchange(both_ways / group.ranks, group, links)  # its transfer; each way has the latency
    hops_s = collective(0.0, group, links).latency_s
    transfer_s = collective(both_ways + flat_bytes, group, links).transfer_s + exchanged.transfer_s
    fixed_s = 2 * exchanged.latency_s + 2 * hops_s  # of both flat collectives
    room_s = LATENCY_SHARE / (1 - LATENCY_SHARE) * transfer_s - fixed_s
    count = math.floor(room_s / (2 * hops_s)) if hops_s else math.inf  # one rank reduces nothing
    even = gradient_bytes / max(FEWEST_BUCKETS, count)
    return max(SMALLEST_BUCKET, (even // _MIB + 2) * _MIB)  # buckets are cut down to whole elements of all ranks


def largest_useful_bucket_mb(config: TrainConfig, knee_mb: float) -> float:
    """Return a measured bucket of `knee_mb` MiB, or a part in FEWEST_BUCKETS of the gradients if that is less."""
    matrices, _, gradient, _ = _sizes(config)
    return min(knee_mb, max(1.0, float(math.ceil(matrices * gradient / FEWEST_BUCKETS / _MIB))))


def _sizes(config: TrainConfig) -> tuple[int, int, int, int]:
    """Return the elements of matrices and of all else, and the bytes of an element reduced and gathered."""
    table = owned_table(config.model, config.optim)
    matrices = sum(row.numel for row in table if row.whole)
    parallel = config.parallel
    weight = ITEMSIZE[parallel.dtype]
    gradient = 8 if weight == 8 else ITEMSIZE[parallel.reduce_dtype or parallel.gradient_dtype]
    return matrices, sum(row.numel for row in table) - matrices, gradient, weight


def context_traffic(
    config: TrainConfig, phase: PhaseConfig, sequences: int, links: Links | None = None
) -> Traffic:
    """Return what one rank sends to the others of its context group in a step, with `sequences` of its own.

    The bytes are from `train.context.bytes`, for all layers and microbatches. An all-gather or reduce-scatter
    uses the links to all ranks of the group, a step of the ring one. Latency is that of c - 1 hops for keys and
    values and of one for the halos, in each layer and microbatch, and in backward of c - 1 more for the gradients.
    With `recompute: auto` no layer is taken to be recomputed.
    """
    size, model = phase.context_parallel, config.model
    if size == 1:
        return Traffic()
    links, itemsize = links or Links(), ITEMSIZE[config.parallel.dtype]
    attention = context_attention(config, phase)
    sent = context_bytes(model, phase.context, sequences, size, attention, itemsize)
    asked = config.parallel.recompute
    forwards = model.layers + (model.layers if asked is True else 0 if asked == "auto" else int(asked))
    inside = forwards * sent.forward + model.layers * sent.backward
    hops = (forwards + 2 * model.layers) * (size - 1) + forwards + model.layers
    messages = math.ceil(sequences / phase.micro_batch) * hops
    rate = links.link_rate if attention == "ring" else links.inside_rate(size)
    return Traffic(inside, 0.0, 0.0, messages, messages * links.inside_hop_s, inside / rate)


def context_attention(config: TrainConfig, phase: PhaseConfig) -> Attention:
    """Return how keys and values reach the other ranks of a context group in a phase."""
    configured = config.parallel.context_attention
    if configured != "auto":
        return configured
    itemsize = ITEMSIZE[config.parallel.dtype]
    return choose_attention(config.model, phase.context, phase.micro_batch, phase.context_parallel, itemsize)
