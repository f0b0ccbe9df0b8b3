"""A lock of another node's job is removed when Slurm calls that job over, and only then."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.submit.scripted_slurm import CANCELLED, FORGOTTEN, RUNNING, ScriptedSlurm
from zslurm.aegis.supervisor.attempt_starter import free_from_dead_job
from zslurm.checkpoint_tools import Holder, InUse, acquire, holder_of
from zslurm.slurm.client import SlurmClient


def locked(root: Path, job: str) -> Holder:
    holder = Holder("another-node", 1, 1, job, 0.0, "n")
    root.mkdir(exist_ok=True)
    (root / ".lock").write_text(json.dumps(asdict(holder)))
    return holder


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    return ScriptedSlurm(tmp_path / "bin", monkeypatch)


@pytest.mark.parametrize("job", [CANCELLED, FORGOTTEN])
def test_the_lock_of_a_job_that_is_over_is_removed(slurm: ScriptedSlurm, tmp_path: Path, job: str) -> None:
    slurm.gives(job)
    holder = locked(tmp_path / "checkpoints", job)
    assert free_from_dead_job(tmp_path / "checkpoints", "17", SlurmClient()) == holder
    assert holder_of(tmp_path / "checkpoints") is None


def test_the_lock_of_a_running_job_stays(slurm: ScriptedSlurm, tmp_path: Path) -> None:
    slurm.gives(RUNNING)
    holder = locked(tmp_path / "checkpoints", RUNNING)
    assert free_from_dead_job(tmp_path / "checkpoints", "17", SlurmClient()) is None
    assert holder_of(tmp_path / "checkpoints") == holder
    with pytest.raises(InUse, match=f"of job {RUNNING}"):
        acquire(tmp_path / "checkpoints", job="17")


def test_what_slurm_does_not_know_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    root = tmp_path / "checkpoints"
    for job in ("5", ""):
        holder = locked(root, job)
        assert free_from_dead_job(root, "17", SlurmClient()) is None
        assert holder_of(root) == holder
    assert free_from_dead_job(root, "", SlurmClient()) is None
    assert free_from_dead_job(tmp_path / "no such directory", "17", SlurmClient()) is None
