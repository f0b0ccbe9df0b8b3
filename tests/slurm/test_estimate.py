"""The words of `sbatch --test-only`."""

from __future__ import annotations

from datetime import UTC, datetime

from zslurm.slurm.client import StartEstimate, parse_estimate

# Recorded with TZ=UTC from the test cluster, Slurm 22.05.8: `sbatch --test-only -N2 -n2`, and `-N1`.
TWO = "sbatch: Job 2 to start at 2026-11-22T05:57:29 using 2 processors on nodes node[2-3] in partition batch\n"
ONE = "sbatch: Job 3 to start at 2026-11-22T05:57:29 using 1 processors on nodes node2 in partition batch\n"
# The same of more nodes than there are.
NEVER = "allocation failure: Requested node configuration is not available\n"


def test_when_and_where() -> None:
    start = datetime(2026, 11, 22, 5, 57, 29, tzinfo=UTC)
    assert parse_estimate(TWO) == StartEstimate(start, "node[2-3]", "batch")
    assert parse_estimate(f"sbatch: note\n{ONE}") == StartEstimate(start, "node2", "batch")


def test_other_words_are_no_estimate() -> None:
    for text in ("", NEVER, "Submitted batch job 5", TWO.replace("2026-11-22T05:57:29", "Unknown")):
        assert parse_estimate(text) is None
