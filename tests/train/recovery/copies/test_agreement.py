from __future__ import annotations

import pytest

from zslurm.train.recovery.abort import crashes
from zslurm.train.recovery.copies.agreement import whole_step, why_none
from zslurm.train.recovery.generation import buddy_of, ward_of


@pytest.mark.parametrize(("size", "local_size"), [(2, 1), (4, 2), (4, 4), (16, 8), (1024, 8)])
def test_buddies_are_a_ring_over_all_ranks_and_on_another_node_where_there_is_one(
    size: int, local_size: int
) -> None:
    buddies = [buddy_of(rank, size, local_size) for rank in range(size)]
    assert sorted(each for each in buddies if each is not None) == list(range(size))
    for rank, buddy in enumerate(buddies):
        assert buddy is not None
        assert ward_of(buddy, size, local_size) == rank
        assert local_size == size or buddy // local_size != rank // local_size
        assert local_size == size or buddy % local_size == rank % local_size, "it is on the same rail"


def test_one_rank_has_no_buddy() -> None:
    assert buddy_of(0, 1, 1) is None
    assert ward_of(0, 1, 1) is None
    assert why_none([[]], [[]], [None]) == "rank 0 was lost, and has no buddy"


BUDDIES: list[int | None] = [1, 2, 3, 0]


def test_the_newest_step_that_all_can_have_again_is_taken() -> None:
    # Rank 2 was replaced; its buddy, rank 3, has step 7 of it, and not yet 8, which all others have.
    assert whole_step([[7, 8], [7, 8], [], [7, 8]], [[7, 8], [7, 8], [], [7]], BUDDIES) == 7
    # The buddy of the replaced rank was faster than rank 0, which is still at 7.
    assert whole_step([[6, 7], [7, 8], [], [7, 8]], [[], [], [], [7, 8]], BUDDIES) == 7


def test_a_pair_without_a_copy_is_named() -> None:
    own, held = [[7], [], [], [7]], [[7], [], [], [7]]
    assert whole_step(own, held, BUDDIES) == -1
    assert why_none(own, held, BUDDIES).startswith("rank 1 and its buddy, rank 2, were both lost")
    own, held = [[7], [7], [], [7]], [[7], [7], [], []]
    assert why_none(own, held, BUDDIES).endswith("before its buddy, rank 3, had a whole copy of its state")
    assert why_none([[7], [6], [5], [7]], [[], [], [], []], BUDDIES) == "the ranks have no step in common"


def test_versions_that_crash_on_abort_are_refused_by_name() -> None:
    assert crashes((2, 28, 2)) is None
    assert crashes((2, 28, 9)) is None
    assert "NCCL 2.28.3 crashes" in str(crashes((2, 28, 3)))
    assert crashes((2, 28, 8)) is not None
