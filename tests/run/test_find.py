"""What is said of a job id that is none of ours: whose it is, and what the forms with `_`, `+` and `.` mean.

squeue here says what the real one was recorded to say; tests/on_slurm has the real one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.submit.scripted_slurm import FORGOTTEN, ScriptedSlurm
from zslurm.core.errors import NotFound
from zslurm.run.find import find, find_all
from zslurm.run.index import IndexedJob, record
from zslurm.run.run_dir import RunDir


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    return ScriptedSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    record(IndexedJob("41", path, "lab", "slurm", 0.0))
    return RunDir(path)


@pytest.mark.usefixtures("slurm")
def test_a_run_is_found_by_its_job_and_by_a_step_of_it(run: RunDir) -> None:
    assert find("41") == find("41.0") == find("41.batch") == find("mine") == run
    assert find_all(["mine", "41", "41.0"]) == [run]


def complaint(reference: str) -> str:
    with pytest.raises(NotFound) as caught:
        find(reference)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_job_that_slurm_does_not_know(slurm: ScriptedSlurm) -> None:
    slurm.gives(FORGOTTEN)
    assert complaint("999") == "999: no run of yours has this job id; `zslurm status` lists them"
    assert complaint("999.0") == "999: no run of yours has this job id; `zslurm status` lists them"
    assert complaint("999_3") == "999_3: a task of a job array, and no run: a run is one plain job"
    assert complaint("999_[0-3]").startswith("999_[0-3]: a task of a job array, and no run")
    assert complaint("999+1") == "999+1: a part of a heterogeneous job, and no run: a run is one plain job"


def test_somebody_elses_job_is_named(slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job of recorded.SQUEUE is number 6, of user zslurm-test."""
    slurm.gives("6")
    assert complaint("6") == (
        "6: zslurm-test's job `cancelled`, cancelled, and no run of yours; `zslurm status` lists your runs"
    )
    assert complaint("6_1").endswith("a run is one plain job (zslurm-test's job `cancelled`, cancelled)")
    monkeypatch.setenv("LOGNAME", "zslurm-test")
    assert complaint("6").startswith("6: a job of yours `cancelled`, cancelled, and no run of yours")


def test_where_slurm_does_not_answer_the_message_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert complaint("999") == "999: no run of yours has this job id; `zslurm status` lists them"
    assert complaint("nonesuch").startswith("nonesuch: no run with this name, path or job id")
