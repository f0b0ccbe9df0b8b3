"""The per-user index finds a run again by its name, its path or a job id, from any directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zslurm.core.errors import NotFound, ZslurmError
from zslurm.run import index
from zslurm.run.index import IndexedJob, claim_local_id, find_run, jobs, known_runs, record
from zslurm.run.run_dir import RunDir


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is none in which runs lie."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def make_run(path: Path) -> RunDir:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return RunDir(path)


def submitted(path: Path, job_id: str, *, at: float = 0.0, cluster: str = "lab") -> RunDir:
    run = RunDir(path) if path.exists() else make_run(path)
    record(IndexedJob(job_id, path, cluster, "local" if cluster == "local" else "slurm", at))
    return run


def test_a_run_is_found_by_name_path_and_job_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(tmp_path / "runs" / "first", "41")
    assert find_run("first") == find_run("41") == find_run(str(run.path)) == run
    monkeypatch.chdir(tmp_path)
    assert find_run("runs/first") == run
    monkeypatch.chdir(run.path)
    assert find_run(".").path.samefile(run.path)


def test_a_run_below_the_working_directory_wins_over_others_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(tmp_path / "a" / "runs" / "same", "1", at=2.0)
    near = make_run(tmp_path / "b" / "runs" / "same")
    assert find_run("same").path == tmp_path / "a" / "runs" / "same"
    monkeypatch.chdir(tmp_path / "b")
    assert find_run("same") == near


def test_the_newest_submission_of_a_name_or_id_wins(tmp_path: Path) -> None:
    submitted(tmp_path / "old" / "same", "7", at=1.0, cluster="lab")
    newer = submitted(tmp_path / "new" / "same", "7", at=2.0, cluster="farm")
    assert find_run("same") == find_run("7") == newer
    assert [job.cluster for job in jobs()] == ["farm", "lab"], "one id on two clusters is two jobs"


def test_a_continued_run_is_found_by_each_of_its_jobs(tmp_path: Path) -> None:
    run = submitted(tmp_path / "r", "1", at=1.0)
    submitted(tmp_path / "r", "2", at=2.0)
    assert find_run("1") == find_run("2") == run
    assert known_runs() == [run]


def test_known_runs_are_newest_first_and_include_those_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = submitted(tmp_path / "old", "1", at=1.0), submitted(tmp_path / "new", "2", at=2.0)
    monkeypatch.chdir(tmp_path)
    here = make_run(tmp_path / "runs" / "copied")
    assert known_runs() == [new, old, here]


def test_a_run_that_was_deleted_is_forgotten(tmp_path: Path) -> None:
    run = submitted(tmp_path / "gone", "5")
    run.config.unlink()
    assert jobs() == known_runs() == []
    with pytest.raises(NotFound):
        find_run("gone")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("fisrt", "fisrt: no run with this name, path or job id; did you mean `first`?"),
        ("zzz", "zzz: no run with this name, path or job id; `zslurm status` lists your runs"),
        ("12", "12: no run of yours has this job id; `zslurm status` lists them"),
        ("local-12", "local-12: no run of yours has this job id; `zslurm status` lists them"),
        ("~nobodyatall", "~nobodyatall: no run with this name, path or job id; `zslurm status` lists your runs"),
    ],
)
def test_an_unknown_reference_says_what_to_do(tmp_path: Path, reference: str, message: str) -> None:
    submitted(tmp_path / "first", "41")
    with pytest.raises(NotFound) as caught:
        find_run(reference)
    assert str(caught.value) == message


def test_local_ids_are_never_given_twice(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_local_id(RunDir(tmp_path / "r")), range(40)))
    assert sorted(claimed, key=lambda job_id: int(job_id.split("-")[1])) == [f"local-{n}" for n in range(1, 41)]
    assert jobs() == [], "a claim is no submission"
    submitted(tmp_path / "r", "local-40", cluster="local")
    assert claim_local_id(RunDir(tmp_path / "r")) == "local-41"
    assert find_run("local-40").path == tmp_path / "r"


def test_an_unreadable_entry_hides_no_other(tmp_path: Path) -> None:
    run = submitted(tmp_path / "r", "5")
    folder = index.state_dir() / "jobs"
    (folder / "lab-6.json").write_text("{")
    (folder / "lab-7.json").write_text("[]")
    (folder / "lab-8.json").write_text(json.dumps({"job_id": "8"}))
    assert known_runs() == [run]


def test_looking_up_writes_nothing() -> None:
    assert jobs() == known_runs() == []
    assert not index.state_dir().exists()


@pytest.fixture
def no_place_for_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    return


@pytest.mark.usefixtures("no_place_for_state")
def test_state_that_cannot_be_kept_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    with pytest.raises(
        ZslurmError, match=r"file/zslurm/jobs: cannot be made: Not a directory; set XDG_STATE_HOME"
    ):
        record(IndexedJob("5", run.path, "lab", "slurm", 0.0))


@pytest.mark.usefixtures("no_place_for_state")
def test_without_an_index_the_numbers_go_by_the_files_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    assert claim_local_id(run) == "local-1"
    run.logs.mkdir()
    run.job_log("local-3").touch()
    assert claim_local_id(run) == "local-4"


def test_state_lies_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert index.state_dir() == Path(os.environ["XDG_STATE_HOME"]) / "zslurm"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert index.state_dir() == Path.home() / ".local" / "state" / "zslurm"
