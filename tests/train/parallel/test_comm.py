"""Collectives do what they should, on one rank as on several, and count what the best algorithm would send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.ranks import in_group
from zslurm.train.parallel.comm import Comm


def all_of_them(group: dist.ProcessGroup) -> tuple[dict[str, list[float]], dict[str, int]]:
    """What this rank gets of each collective, and what it sent; every rank contributes its number."""
    comm = Comm(group)
    size, rank = comm.size, comm.rank
    found: dict[str, torch.Tensor] = {}

    whole = torch.arange(4.0 * size) + rank
    kept = whole.clone()
    found["reduce_scatter"] = torch.empty(4)
    comm.reduce_scatter(found["reduce_scatter"], whole).wait()
    assert torch.equal(whole, kept)

    found["all_gather"] = torch.zeros(2 * size)
    mine = found["all_gather"][2 * rank : 2 * rank + 2].fill_(rank)
    comm.all_gather(found["all_gather"], mine).wait()

    # rank r sends s times its number to rank s, none to rank 0
    source = torch.full((sum(range(size)),), float(rank))
    found["all_to_all"] = torch.empty(rank * size)
    comm.all_to_all(found["all_to_all"], [rank] * size, source, list(range(size)))

    found["all_reduce"] = torch.tensor([float(rank), 1.0])
    comm.all_reduce(found["all_reduce"])
    comm.all_reduce(smallest := torch.tensor([rank + 5]), dist.ReduceOp.MIN)
    assert smallest.item() == 5
    return {name: value.tolist() for name, value in found.items()}, dict(comm.sent)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_gets_its_part(size: int) -> None:
    for rank, (found, _) in enumerate(in_group(all_of_them, size)):
        others = sum(range(size))
        assert found["reduce_scatter"] == [size * (4 * rank + i) + others for i in range(4)]
        assert found["all_gather"] == [float(i // 2) for i in range(2 * size)]
        assert found["all_to_all"] == [float(other) for other in range(size) for _ in range(rank)]
        assert found["all_reduce"] == [others, size]


def test_bytes_are_those_of_the_best_algorithm() -> None:
    for rank, (_, sent) in enumerate(in_group(all_of_them, 3)):
        assert sent == {
            "reduce_scatter": 4 * 12 * 2 // 3,
            "all_gather": 4 * 6 * 2 // 3,
            "all_to_all": 4 * (sum(range(3)) - rank),
            "all_reduce": round(2 * 4 * 2 * 2 / 3) + round(2 * 8 * 2 / 3),
        }


def test_one_rank_sends_nothing() -> None:
    (_, sent) = in_group(all_of_them, 1)[0]
    assert sent == {}


def nothing(group: dist.ProcessGroup) -> Any:
    """Collectives of no elements."""
    comm, empty = Comm(group), torch.empty(0)
    comm.reduce_scatter(empty, empty).wait()
    comm.all_gather(empty, empty).wait()
    comm.all_to_all(empty, [0, 0], empty, [0, 0])
    return sum(comm.sent.values())


def test_no_elements_are_no_error() -> None:
    assert in_group(nothing, 2) == [0, 0]
