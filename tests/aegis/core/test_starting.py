"""With which nodes a start of the job begins."""

from __future__ import annotations

import pytest

from tests.aegis.recorded import Recorder
from zslurm.aegis.core.starting import decided_requeue, nodes_to_skip, prefer_others, returned_nodes
from zslurm.run.events import AttemptEnded, AttemptStarted, Decided, Requeued
from zslurm.run.events.event import select
from zslurm.run.exclusions import Exclusion


def test_a_node_has_returned_once_its_exclusion_has_expired() -> None:
    excluded = {
        name: Exclusion((name,), "it died", 1.0, expires) for name, expires in (("n1", 10.0), ("n2", 20.0))
    }
    assert returned_nodes(excluded, 9.0) == frozenset()
    assert returned_nodes(excluded, 10.0) == {"n1"}


@pytest.mark.parametrize(
    ("returned", "needed", "chosen"),
    [
        ({"n1"}, 2, ("n0", "n2")),
        ({"n1"}, 3, ("n0", "n1", "n2")),
        ({"n0", "n1"}, 2, ("n0", "n2")),
        (set(), 2, ("n0", "n1", "n2")),
    ],
)
def test_a_node_that_has_returned_is_a_spare_at_first(
    returned: set[str], needed: int, chosen: tuple[str, ...]
) -> None:
    assert prefer_others(("n0", "n1", "n2"), returned, needed) == chosen


@pytest.mark.parametrize(
    ("nodes", "needed", "allowed", "is_skipped"),
    [
        (8, 6, 3, True),
        (8, 6, 2, False),  # none could be excluded for a fault to come
        (8, 7, 3, False),  # a spare is lacking
        (4, 2, 3, False),  # the site runs something on each
    ],
)
def test_nodes_are_skipped_only_if_spares_and_exclusions_are_left(
    nodes: int, needed: int, allowed: int, is_skipped: bool
) -> None:
    held = {"n0": "held", "n1": "held"}
    assert nodes_to_skip(held, nodes, needed, allowed) == (held if is_skipped else {})


@pytest.mark.parametrize(
    ("rows", "job_id", "is_pending"),
    [
        (Recorder().decided("requeue"), "17", True),
        (
            Recorder().failed("node_dead").event("requeued", excluded="", reason="because").decided("requeue"),
            "17",
            True,
        ),
        (Recorder().decided("requeue"), "18", False),  # that job has ended
        (Recorder().decided("requeue").event("requeued", excluded="", reason="because"), "17", False),
        (Recorder().decided("requeue").started(), "17", False),
        (Recorder().failed("rank_killed"), "17", False),  # the ranks were to start again
    ],
)
def test_a_requeue_that_was_decided_is_pending_until_it_is_recorded_or_ranks_start(
    rows: Recorder, job_id: str, *, is_pending: bool
) -> None:
    events = list(select(rows.rows, AttemptStarted, AttemptEnded, Requeued, Decided))
    assert (decided_requeue(events, job_id) is not None) == is_pending
