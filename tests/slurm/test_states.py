"""Every word that Slurm uses for a job's state has a meaning."""

from __future__ import annotations

import pytest

from zslurm.slurm.states import JobState, parse_state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", JobState.RUNNING),
        ("CANCELLED by 1001", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("NODE_FAIL", JobState.NODE_FAIL),
        ("COMPLETING", JobState.COMPLETING),
        ("REQUEUE_HOLD", JobState.REQUEUE_HOLD),
        ("PENDING,REQUEUED", JobState.PENDING),
        ("a word of the year 2040", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_slurms_words_are_understood(text: str, state: JobState) -> None:
    assert parse_state(text) is state


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.UNKNOWN])
def test_a_job_is_over_or_waiting_or_on_nodes(state: JobState) -> None:
    assert [state.is_over, state.is_waiting, state.is_on_nodes].count(True) == 1


def test_what_hides_the_outcome_is_not_the_end() -> None:
    assert JobState.COMPLETING.is_active
    assert JobState.REQUEUED.is_active
    assert JobState.UNKNOWN.is_active
    assert not JobState.NODE_FAIL.is_active
