"""Best-fit decreasing: every item in a bin that has room, and just the bins that placing them one by one gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zslurm.train.data.packs.bins import best_fit_decreasing


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """The room that is left in each bin, smallest first, by the definition of best-fit decreasing."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        best = min((room for room in rooms if room >= size), default=None)
        if best is None:
            rooms.append(capacity - size)
        else:
            rooms[rooms.index(best)] -= size
    return sorted(rooms)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), capacity=st.one_of(st.integers(1, 40), st.integers(400, 3000)))
def test_the_bins_are_those_of_placing_items_one_by_one(data: st.DataObject, capacity: int) -> None:
    largest = data.draw(st.integers(1, capacity))
    sizes = data.draw(st.lists(st.integers(1, largest), max_size=60))
    bins, count = best_fit_decreasing(np.array(sizes, np.int64), capacity)
    filled = np.bincount(bins, weights=sizes, minlength=count).astype(int)
    assert len(filled) == count
    assert sorted((capacity - filled).tolist()) == one_by_one(sizes, capacity)


def test_it_is_the_same_every_time() -> None:
    sizes = np.random.default_rng(3).integers(1, 900, 3000)
    first, again = (best_fit_decreasing(sizes.copy(), 1000)[0] for _ in range(2))
    assert np.array_equal(first, again)


@pytest.mark.parametrize("sizes", [[3, 0], [3, 11]])
def test_what_fits_no_bin_is_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="for bins of 10"):
        best_fit_decreasing(np.array(sizes), 10)
