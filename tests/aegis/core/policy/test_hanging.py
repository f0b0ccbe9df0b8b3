"""Which ranks are killed alone if ranks hang: those that the witnesses agree on."""

from __future__ import annotations

import pytest

from zslurm.aegis.core.policy.hanging import Witnesses, who_hangs


def _ranks(*ranks: int) -> frozenset[int]:
    return frozenset(ranks)


@pytest.mark.parametrize(
    ("found", "ranks"),
    [
        (Witnesses(_ranks(1)), _ranks(1)),
        (Witnesses(_ranks(1, 2)), _ranks(1, 2)),
        (Witnesses(_ranks(1), recorded={1: "missing"}), _ranks(1)),
        (Witnesses(_ranks(1, 2), recorded={1: "missing"}), _ranks(1)),
        (Witnesses(unnamed=True, recorded={3: "missing"}), _ranks(3)),
        (Witnesses(_ranks(1), recorded={1: "mismatched"}, behind=_ranks(1, 4)), _ranks(1)),
        (Witnesses(_ranks(1), behind=_ranks(1)), _ranks(1)),
    ],
)
def test_ranks_that_every_witness_names_are_killed_alone(found: Witnesses, ranks: frozenset[int]) -> None:
    assert (who_hangs(found).ranks, who_hangs(found).reason) == (ranks, "")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Witnesses(unnamed=True), "no rank lags behind the others, so none can be replaced alone"),
        (Witnesses(), "no rank lags behind the others, so none can be replaced alone"),
        (
            Witnesses(_ranks(1), recorded={1: "stuck"}),
            "rank 1 did not finish an operation that another rank has finished: it hangs inside a device call, "
            "which nothing can interrupt",
        ),
        (
            Witnesses(_ranks(1), recorded={3: "missing"}),
            "the witnesses do not agree who hangs: rank 1 by their progress; rank 3 by the flight recorders",
        ),
        (
            Witnesses(unnamed=True, behind=_ranks(2)),
            "only the RAS service names a rank, and one witness is not enough where none lags",
        ),
    ],
)
def test_otherwise_every_rank_is_started_again_and_the_reason_is_known(found: Witnesses, reason: str) -> None:
    assert (who_hangs(found).ranks, who_hangs(found).reason) == (frozenset(), reason)
