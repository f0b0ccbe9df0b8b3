"""What sacct's answer about the steps of a job becomes."""

from __future__ import annotations

import pytest

from zslurm.core.errors import SlurmRefused
from zslurm.slurm.accounting import FIELDS, parse_usage
from zslurm.slurm.jobs import FIELD_END


def _answer(*rows: str) -> str:
    return "".join(row.replace("|", FIELD_END) + "\n" for row in rows)


def test_the_steps_of_a_job_with_their_figures() -> None:
    job, batch, step = parse_usage(
        _answer(
            "7|first|65|02:10.500||||2|3600000",
            "7.batch|batch|65|00:00.500|20480K|1|1|1|0",
            "7.1|attempt-1|60|1-01:02:10|1.5G|4|64|2|0",
        )
    )
    assert (job.step, job.cpu_s, job.energy_j) == ("", 130.5, 3.6e6)
    assert (batch.step, batch.max_rss) == ("batch", 20480 << 10)
    assert (step.job_id, step.step, step.name) == ("7", "1", "attempt-1")
    assert (step.elapsed_s, step.cpu_s, step.max_rss) == (60, 86400 + 3730, 3 << 29)
    assert (step.tasks, step.cores, step.nodes) == (4, 64, 2)


def test_what_was_not_gathered_is_zero() -> None:
    (step,) = parse_usage(_answer(f"7.1|attempt-1|60|00:00:00||2|2|2|{(1 << 64) - 2}"))
    assert (step.cpu_s, step.max_rss, step.energy_j) == (0, 0, 0)


def test_other_fields_than_those_asked_for_are_refused() -> None:
    with pytest.raises(SlurmRefused, match=rf"expected {len(FIELDS)} fields, got 3: 7\|first\|65"):
        parse_usage(_answer("7|first|65"))
