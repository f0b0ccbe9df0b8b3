"""Which elements of the state go to whom if the number of ranks changes; no ranks and no collectives."""

from __future__ import annotations

import numpy as np
import pytest

from tests.train.runs import MODEL
from zslurm.checkpoint_tools import partition
from zslurm.train.config import ModelConfig, OptimConfig
from zslurm.train.optim.sharded import spans_of
from zslurm.train.parallel.topology import Topology
from zslurm.train.recovery.resplit import Holding, Owned, givers, moves, newest_whole, why_none
from zslurm.train.shapes import owned_table


def owners(size: int, topology: Topology | None = None) -> list[Owned]:
    layout = partition(owned_table(ModelConfig.model_validate(MODEL), OptimConfig()), size)
    positions = [rank if topology is None else topology.position(rank) for rank in range(size)]
    return [Owned(layout.extents(position), spans_of(layout, position)) for position in positions]


def parameters(owner: Owned, state: str) -> dict[int, tuple[str, int]]:
    """Which element of which tensor each element of a state is of; padding is of none."""
    found = {}
    for extents in owner.of(state).values():
        for extent in extents:
            first = extent.offset_in_chunk - owner.spans[state][0]
            found |= {first + i: (extent.tensor, extent.start + i) for i in range(extent.numel)}
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (owners(4), owners(3)),
        (owners(3), owners(4)),
        (owners(6, Topology(3, 2)), owners(4, Topology(2, 2))),
        (owners(2), owners(1)),
    ],
)
def test_every_element_reaches_its_new_owner_and_none_comes_twice(before: list[Owned], after: list[Owned]) -> None:
    for state in ("master", "exp_avg", "exp_avg_sq", "momentum"):
        for new in after:
            wanted, got = parameters(new, state), {}
            for former in before:
                has = parameters(former, state)
                for taken, put in moves(state, former, new):
                    indices = zip(np.arange(taken.start, taken.stop), np.arange(put.start, put.stop), strict=True)
                    for source, target in indices:
                        assert int(target) not in got
                        got[int(target)] = has[int(source)]
            assert got == wanted


def test_the_state_of_a_lost_rank_comes_from_its_buddy() -> None:
    # Rank 1 of four is lost; rank 2 keeps its copies. Rank 3 is a step ahead.
    members = [Holding(0, [7], 3, [7]), Holding(2, [7], 1, [6, 7]), Holding(3, [7, 8], 2, [7])]
    assert newest_whole(members, 4) == 7
    assert givers(members, 4, 7) == [0, 1, 1, 2]


def test_without_a_copy_of_a_lost_rank_there_is_no_way_on() -> None:
    members = [Holding(0, [7], 3, [7]), Holding(3, [7], 2, [7])]  # ranks 1 and 2 are lost
    assert newest_whole(members, 4) == -1
    assert "no copy of rank 1's state is left" in why_none(members, 4)
    assert why_none([Holding(0, [7], 1, [6]), Holding(2, [6], None, [])], 3) == "the ranks have no step in common"
