"""Speeds are measured alike on all ranks, and noise changes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zslurm.train.data.pace import Pace, speeds_of


@pytest.mark.parametrize(
    ("seconds", "speeds"),
    [
        ([1.0, 1.04, 0.97, 1.0], None),  # noise
        ([1.0, 1.25, 1.0, 1.0], (1.0, 0.8, 1.0, 1.0)),
        ([1.0, 1.26, 1.01, 0.99], (1.0, 0.8, 1.0, 1.0)),
        ([1.0, 1.0, 0.8, 1.0], (1.0, 1.0, 1.25, 1.0)),
        ([1.0, 1.0, 1.0, 1e9], (1.0, 1.0, 1.0, 0.25)),
        ([1e-9, 1.0, 1.0, 1.0], (2.0, 1.0, 1.0, 1.0)),
        ([0.0, 1.0, 2.0, 1.0], (1.0, 1.0, 0.5, 1.0)),  # it computed nothing, and is to be measured again
        ([0.0, 0.0], None),
    ],
)
def test_speeds(seconds: list[float], speeds: tuple[float, ...] | None) -> None:
    assert speeds_of(seconds) == (None if speeds is None else pytest.approx(speeds))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_speeds_are_finite_and_positive_and_come_back_from_a_checkpoint(seconds: list[float]) -> None:
    speeds = speeds_of(seconds)
    if speeds is None:
        return
    assert all(0.249 < speed < 2.001 for speed in speeds)
    later = Pace(2, 0, len(seconds))
    later.resume(json.loads(json.dumps(speeds)))
    assert later.speeds == speeds


def test_ranks_measure_in_every_nth_step_what_they_did_since_the_last() -> None:
    ranks = [Pace(2, rank, 3) for rank in range(3)]
    seen = []
    for step in range(4):
        for rank, pace in enumerate(ranks):
            # A step is added when it is over, so that the sums of a step hold those before it.
            if step:
                pace.add((1.0 if rank < 2 or step > 1 else 2.0) * 4, 4)
        parts = [pace.signals(step) for pace in ranks]
        sums = [sum(column) for column in zip(*parts, strict=True)]
        for pace in ranks:
            pace.agree(sums)
        assert len({pace.speeds for pace in ranks}) == 1
        seen.append(ranks[0].speeds)
    assert seen == [None, (1.0, 1.0, 0.5), (1.0, 1.0, 0.5), None]
    assert ranks[0].described == "all ranks have equal shares of the batch"


def test_it_is_off_by_default_and_then_takes_nothing_from_a_checkpoint() -> None:
    off = Pace(0, 0, 2)
    off.add(1.0, 1)
    assert [off.signals(step) for step in range(4)] == [[]] * 4
    off.agree([])
    off.resume([1.0, 0.5])
    assert off.speeds is None


@pytest.mark.parametrize("recorded", [None, [1.0], [1.0, 0.5, 1.0]])
def test_speeds_of_another_number_of_ranks_are_of_no_use(recorded: list[float] | None) -> None:
    pace = Pace(5, 1, 2)
    pace.resume(recorded)
    assert pace.speeds is None
    pace.resume([1.0, 0.5])
    assert pace.speeds == (1.0, 0.5)
    assert pace.described == "the batch is divided by speed: rank 1 has 0.50 of the median's"
