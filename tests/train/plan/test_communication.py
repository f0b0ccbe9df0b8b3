"""The model of a step's communication: its bytes are those that are sent, and buckets follow from it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from zslurm.checkpoint_tools import partition
from zslurm.train.config import ModelConfig, TrainConfig
from zslurm.train.parallel.buckets import MatrixSpace
from zslurm.train.parallel.route import Level, plan_route
from zslurm.train.parallel.topology import Path, Topology
from zslurm.train.plan.communication import (
    FEWEST_BUCKETS,
    LATENCY_SHARE,
    SMALLEST_BUCKET,
    Links,
    RankGroup,
    bucket_bytes,
    collective,
    context_traffic,
    exchange,
    step_traffic,
)
from zslurm.train.shapes import owned_table, parameter_counts

PHASE = {"tokens": 10**9, "context": 4096, "global_batch": 4096, "micro_batch": 4, "lr": 1e-3}
LONG = PHASE | {"context": 32768, "global_batch": 512, "micro_batch": 1, "context_parallel": 8}
PARAMETERS = 8_840_488_784


def zaya1(phase: dict[str, Any] | None = None, **parallel: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"model": {}, "phases": [phase or PHASE], "parallel": {"dtype": "bf16", **parallel}}
    )


def sent_by_pairs(size: float, group: RankGroup) -> tuple[float, float, float]:
    """Bytes of rank 0 by level, counted rank by rank: it sends an equal part to each other one."""
    inside = rail = off_rail = 0.0
    for other in range(1, group.ranks):
        node, local = divmod(other, group.local)
        if node == 0:
            inside += size / group.ranks
        elif local == 0:
            rail += size / group.ranks
        else:
            off_rail += size / group.ranks
    return inside, rail, off_rail


@pytest.mark.parametrize(("nodes", "local"), [(1, 8), (2, 8), (16, 4), (128, 8), (5, 1)])
def test_a_flat_exchange_sends_what_each_pair_of_ranks_does(nodes: int, local: int) -> None:
    group = RankGroup(nodes, local, two_level=False)
    sent = exchange(1e9, group, Links())
    assert (sent.inside, sent.rail, sent.off_rail) == pytest.approx(sent_by_pairs(1e9, group))
    assert sent.messages == group.ranks - 1


def test_two_levels_never_leave_their_rail_between_nodes_and_need_fewer_messages() -> None:
    two, flat = (RankGroup.of(1024, 8, collectives) for collectives in ("two_level", "flat"))
    assert exchange(1e9, two, Links()).off_rail == 0
    assert exchange(1e9, flat, Links()).off_rail == pytest.approx(7 / 8 * 1e9, rel=0.01)
    assert exchange(1e9, two, Links()).messages == 127 + 7
    assert exchange(1e9, flat, Links()).messages == 1023
    assert collective(1e9, two, Links()).rail == pytest.approx(1e9 / 8 * 127 / 128)
    assert collective(1e9, two, Links()).inside == pytest.approx(1e9 * 7 / 8)


@pytest.mark.parametrize("collectives", ["flat", "two_level"])
def test_a_collective_sends_all_but_what_the_rank_has(collectives: str) -> None:
    """(W - 1)/W of the bytes in a ring over all ranks; two levels send what is summed once less often."""
    group = RankGroup.of(64, 8, collectives)
    sent = collective(1e9, group, Links())
    assert sent.inside + sent.rail == pytest.approx(1e9 * 63 / 64)


def test_nodes_that_are_not_full_have_one_level() -> None:
    assert RankGroup.of(12, 8, "auto") == RankGroup(12, 1, False)
    assert RankGroup.of(3, 8, "auto") == RankGroup(1, 3, False)
    assert RankGroup.of(8, 8, "two_level") == RankGroup(1, 8, False)
    assert RankGroup.of(16, 8, "two_level") == RankGroup(2, 8, True)
    assert RankGroup.of(16, 8, "auto") == RankGroup(2, 8, False), "the trainer's default, see zslurm.config.load"
    assert RankGroup.of(16, 8, "flat") == RankGroup(2, 8, False)


@pytest.mark.parametrize("nodes", [1, 2, 16, 64, 128])
def test_the_automatic_bucket_is_the_smallest_with_a_tenth_of_latency(nodes: int) -> None:
    group = RankGroup.of(8 * nodes, 8, "two_level")
    traffic = step_traffic(zaya1(), group)
    share = traffic.total.latency_s / traffic.total.seconds
    assert share <= LATENCY_SHARE
    smaller = 0.8 * traffic.bucket_bytes / 2**20
    if smaller * 2**20 >= SMALLEST_BUCKET:
        more = step_traffic(zaya1(bucket_mb=smaller), group).total
        assert more.latency_s / more.seconds > LATENCY_SHARE, "a smaller bucket has more"


def test_buckets_of_64_mib_were_mostly_latency_on_1024_ranks() -> None:
    """495 reduce-scatters, flat, are about 2 s (a flat ring of 1,023 hops of about 4 us each)."""
    flat = step_traffic(zaya1(bucket_mb=64), RankGroup.of(1024, 8, "flat"))
    assert flat.buckets == 495
    assert flat.reduce_scatter.latency_s == pytest.approx(2.0, rel=0.05)
    automatic = step_traffic(zaya1(), RankGroup.of(1024, 8, "two_level"))
    assert automatic.total.seconds < flat.total.seconds / 10


@pytest.mark.parametrize(("ranks", "local"), [(8, 8), (128, 8), (1024, 8), (6, 3), (1024, 1)])
def test_the_buckets_of_the_model_are_those_of_the_run(ranks: int, local: int) -> None:
    config = zaya1()
    group = RankGroup.of(ranks, local, "two_level")
    table = owned_table(config.model, config.optim)
    space = MatrixSpace(table, partition(table, ranks), int(bucket_bytes(config, group) / 4))
    assert abs(len(space.buckets) - step_traffic(config, group).buckets) <= 1
    lengths = [bucket.stop - bucket.start for bucket in space.buckets]
    assert min(lengths) > 0.5 * max(lengths) or len(lengths) > 50, "no last bucket that is next to nothing"


def test_the_bytes_of_a_step_are_all_parameters_both_ways() -> None:
    traffic = step_traffic(zaya1(), RankGroup.of(1024, 8, "flat"))
    sent = [part.inside + part.rail + part.off_rail for part in (traffic.reduce_scatter, traffic.all_gather)]
    assert sent == pytest.approx([4 * PARAMETERS * 1023 / 1024, 2 * PARAMETERS * 1023 / 1024], rel=1e-3)
    matrices = parameter_counts(ModelConfig()).matrices
    swapped = traffic.exchange.inside + traffic.exchange.rail + traffic.exchange.off_rail
    assert swapped == pytest.approx(6 * matrices / 1024, rel=2e-3)


@pytest.mark.parametrize(("nodes", "two_level"), [(128, False), (1024, True)])
def test_a_few_buckets_are_left_to_hide_where_none_is_large_enough(nodes: int, two_level: bool) -> None:
    traffic = step_traffic(zaya1(), RankGroup(nodes, 8, two_level))
    assert traffic.buckets == FEWEST_BUCKETS
    assert traffic.total.latency_s > LATENCY_SHARE * traffic.total.seconds


@pytest.mark.parametrize("collectives", ["flat", "two_level"])
def test_the_exchange_sends_what_the_plan_of_the_run_does(collectives: str) -> None:
    """In the mean over ranks; the plan (route.py) has every piece, from its holder to its owner."""
    config, group = zaya1(), RankGroup.of(32, 4, collectives)
    table = owned_table(config.model, config.optim)
    space = MatrixSpace(table, partition(table, group.ranks), int(bucket_bytes(config, group) / 4))
    topology = Topology(group.nodes, group.local)
    sent: Counter[Path] = Counter()
    messages = []
    for rank in range(group.ranks):
        position = topology.position(rank) if group.two_level else rank
        route = plan_route(space, position, topology if group.two_level else None)
        for piece in route.held:
            owner = topology.rank(piece.owner) if group.two_level else piece.owner
            ways = [(rank, owner)]
            if group.two_level:  # by the rank of this node that is on the owner's rail
                ways = [(rank, between := rank - rank % 4 + owner % 4), (between, owner)]
            for sender, receiver in ways:
                if sender != receiver:
                    sent[topology.path(sender, receiver)] += piece.numel * 4
        members = {Level.ALL: rank, Level.NODE: rank % 4, Level.RAIL: rank // 4}
        messages.append(sum(hop.messages(members[hop.level]) for hop in route.hops))
    planned = step_traffic(config, group).to_owners
    assert sent[Path.NODE] / group.ranks == pytest.approx(planned.inside, rel=0.15)
    assert sent[Path.RAIL] / group.ranks == pytest.approx(planned.rail, rel=0.15)
    assert sent[Path.OFF_RAIL] / group.ranks == pytest.approx(planned.off_rail, rel=0.15)
    assert sum(sent.values()) / group.ranks == pytest.approx(
        planned.inside + planned.rail + planned.off_rail, rel=0.05
    )
    assert max(messages) <= planned.messages


def test_one_rank_and_adamw_alone_need_no_case_of_their_own() -> None:
    assert step_traffic(zaya1(), RankGroup.of(1, 8, "auto")).total.seconds == 0
    assert bucket_bytes(zaya1(), RankGroup.of(1, 8, "auto")) == SMALLEST_BUCKET
    config = zaya1().model_copy(update={"optim": zaya1().optim.model_copy(update={"matrices": "adamw"})})
    traffic = step_traffic(config, RankGroup.of(16, 8, "auto"))
    assert traffic.buckets == 0
    assert traffic.exposed_s(1.0, 2.0) == pytest.approx(traffic.total.seconds), "nothing is beside it"


def test_what_is_exposed_is_what_no_computation_covers() -> None:
    traffic = step_traffic(zaya1(), RankGroup.of(1024, 8, "two_level"))
    assert traffic.exposed_s(0.0, 0.0) == pytest.approx(traffic.total.seconds)
    ends = (
        traffic.reduce_bucket,
        traffic.reduce_flat,
        traffic.exchange,
        traffic.gather_flat,
        traffic.gather_bucket,
    )
    assert traffic.exposed_s(100.0, 200.0) == pytest.approx(sum(part.seconds for part in ends))


def test_a_context_group_moves_keys_and_values_over_all_links_in_the_same_time() -> None:
    """A larger group moves more bytes for the same batch, over as many more links."""
    took = []
    for size in (2, 4, 8):
        config = zaya1(LONG | {"context_parallel": size})
        sequences = 512 // (128 // size)
        sent = context_traffic(config, config.phases[0], sequences)
        once = 40 * sequences * 32768 * 1024 * (size - 1) / size
        assert sent.inside == pytest.approx(4 * once, rel=0.01), "forward, again in backward, gradients in fp32"
        assert (sent.rail, sent.off_rail) == (0, 0)
        took.append(sent.transfer_s)
    assert took == pytest.approx([took[0]] * 3, rel=0.01)
    assert context_traffic(zaya1(), zaya1().phases[0], 4).seconds == 0


@pytest.mark.parametrize(("recompute", "times"), [(False, 4), (True, 5)])
def test_a_ring_sends_the_same_over_one_link(recompute: bool, times: int) -> None:
    ring, gathered = (
        zaya1(LONG, recompute=recompute, context_attention=attention) for attention in ("ring", "all_gather")
    )
    around, once = (context_traffic(config, config.phases[0], 4) for config in (ring, gathered))
    assert around.inside == once.inside == pytest.approx(times * 40 * 4 * 32768 * 1024 * 7 / 8, rel=0.01)
    assert around.transfer_s == pytest.approx(7 * once.transfer_s)
