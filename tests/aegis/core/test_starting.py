"""With which nodes a start of the job begins."""

from __future__ import annotations

import pytest

from zslurm.aegis.core.starting import nodes_to_skip, prefer_others, returned_nodes
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


def test_no_more_nodes_are_skipped_than_may_be_excluded() -> None:
    held = {"n0": "held", "n1": "held"}
    assert nodes_to_skip(held, 8, allowed=2) == held
    assert nodes_to_skip(held, 8, allowed=1) == {}
