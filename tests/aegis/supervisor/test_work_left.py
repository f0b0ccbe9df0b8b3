"""What the policy learns of the work and the time that are left."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.slurm.recordings import recorded
from tests.submit.specs import run_spec
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.aegis.supervisor.work_left import work_left
from zslurm.aegis.types import WorkLeft
from zslurm.config.spec import RunSpec
from zslurm.core.errors import SlurmUnavailable
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import JobRecord, parse_queue

RECORD = replace(parse_queue(recorded.SQUEUE)["4"], job_id="12", end_time=None)


def two_phases(directory: Path, **sections: dict[str, object]) -> RunSpec:
    """10 steps of 6 sequences, then 4 of 8, whose sequences two ranks share."""
    spec = run_spec(directory, **sections)
    later = {"tokens": 4 * 8 * 16, "global_batch": 8, "micro_batch": 1, "context_parallel": 2}
    return spec.model_copy(update={"phases": (*spec.phases, spec.phases[0].model_copy(update=later))})


@pytest.mark.parametrize(
    ("committed", "batch", "micro_batch", "ranks", "steps_left"),
    [(-1, 6, 2, 4, 14), (0, 6, 2, 4, 14), (9, 6, 2, 4, 5), (10, 8, 1, 2, 4), (14, 8, 1, 2, 0), (99, 8, 1, 2, 0)],
)
def test_the_batch_is_that_of_the_checkpoints_phase_and_the_pace_that_of_the_last_steps(
    tmp_path: Path, committed: int, batch: int, micro_batch: int, ranks: int, steps_left: int
) -> None:
    spec, run = two_phases(tmp_path, slurm={"ranks_per_node": 4}), RunDir(tmp_path)
    known = WorkLeft(batch, micro_batch, ranks, job_s=60.0)
    assert work_left(run, spec, committed, 60.0) == known
    rows = [{"kind": "step", "step": step, "step_time_s": 0.5} for step in range(1, 4)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert work_left(run, spec, committed, 60.0) == replace(known, training_s=0.5 * steps_left)


def test_the_time_limit_is_slurms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[JobRecord | Exception] = [
        replace(RECORD, end_time=datetime.now(UTC) + timedelta(hours=1)),
        RECORD,
        SlurmUnavailable("away"),
    ]

    def queue(self: SlurmClient, job_ids: object = None, user: str | None = None) -> dict[str, JobRecord]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"12": answer}

    monkeypatch.setattr(SlurmClient, "queue", queue)
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node0", "PATH": "/nowhere"}
    nodes = Nodes(run_spec(tmp_path, cluster={"launcher": "slurm"}), environ)
    assert nodes.job_left_s() == pytest.approx(3600, abs=600)
    assert nodes.job_left_s() is None, "no limit"
    assert nodes.job_left_s() is None, "no answer"
    local = Nodes(run_spec(tmp_path, cluster={"launcher": "local"}), {})
    assert local.job_left_s() is None
