"""The sweep of pairs: what the times of a rank that is slow by itself must show, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zslurm.bench import pairs
from zslurm.bench.ranks import BenchRanks

EXCHANGE_S, SMALL_S, OWN_S, RATE = 0.004, 1e-5, 0.001, 0.8
MEMBERS = 3


class SlowRank:
    """Rank 0 of three, all of whose exchanges take 1 / RATE of the time from its call to its end.

    `own` and `partner` are when either is ready for the next exchange: messages are on their way from their
    sender's call on, so those of a partner that waits are there already when this rank asks for them.
    """

    def __init__(self) -> None:
        self.own = self.partner = 0.0
        self.device, self.nodes = torch.device("cpu"), ["n0"]
        self.rank = self.local_rank = self.node = 0
        self.size = self.local_size = MEMBERS
        self.is_first, self.on_gpu = True, False

    def exchange(self, operations: list[Any]) -> list[Any]:
        received, sent = operations
        assert (received.kind, sent.kind) == (dist.irecv, dist.isend), "gloo's two directions would queue up"
        took = EXCHANGE_S if sent.tensor.numel() > 1 else SMALL_S
        received.tensor.fill_(received.group_peer + 1)
        called, partner_called = self.own, self.partner
        # Each has its data when the other has sent it, which begins at the other's call.
        self.own = called + (max(called, partner_called + took) - called) / RATE
        self.partner = max(partner_called, called + took)
        return [SimpleNamespace(wait=lambda: None)] * 2

    def barrier(self) -> None:
        self.own = self.partner = max(self.own, self.partner)

    def gather(self, value: Any) -> list[Any]:
        """Add what the others measured: exchanges with each other, and with this rank, as they see them."""
        if not isinstance(value, list):
            return [value] * MEMBERS
        count = len(value[0][1])
        others = [
            [[partner, [(EXCHANGE_S, OWN_S)] * count, False] for partner in range(MEMBERS) if partner != rank]
            for rank in range(1, MEMBERS)
        ]
        return [value, *others]

    def share(self, value: Any = None) -> Any:
        return value

    def group(self, members: list[int]) -> None:
        assert members == list(range(MEMBERS))

    def synchronize(self) -> None:
        pass


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowRank:
    rank = SlowRank()
    clock: Callable[[], float] = lambda: rank.own  # noqa: E731
    monkeypatch.setattr(pairs, "time", SimpleNamespace(perf_counter=clock, process_time=clock))
    monkeypatch.setattr(dist, "P2POp", lambda kind, tensor, **of: SimpleNamespace(kind=kind, tensor=tensor, **of))
    monkeypatch.setattr(dist, "batch_isend_irecv", rank.exchange)
    return rank


def test_what_a_slow_rank_takes_longer_is_not_hidden_by_partners_that_wait_for_it(slow: SlowRank) -> None:
    values = {"scope": pairs.GPU_PAIR, "nodes": 1, "ranks": 2, "bytes": 1 << 20}
    ranks: BenchRanks = slow  # type: ignore[assignment]
    rates = {tuple(row["pair"]): row["figures"] for row in pairs.sweep(values, ranks)}
    assert set(rates) == {(0, 1), (0, 2), (1, 2)}
    healthy = rates[1, 2][0]
    for pair in ((0, 1), (0, 2)):
        assert rates[pair] == [pytest.approx(RATE * healthy, rel=0.02)] * len(rates[pair])
