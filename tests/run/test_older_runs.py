"""Run directories that an earlier version wrote: without what this one records, and with what this one refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.submit.scripted_slurm import RUNNING, ScriptedSlurm
from tests.submit.specs import run_spec
from tests.train.runs import make_corpus
from zslurm.config.load import load_spec
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.run.find import find
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import last_job, look
from zslurm.submit.control import cancel
from zslurm.submit.submit import spec_of, submit
from zslurm.train.jsonl import read_jsonl


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of an active job, as the version before left it: no submission names a directory."""
    make_corpus(tmp_path / "tokens.h5")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    slurm.write_program("scancel", f"echo $0 $* >> {tmp_path}/done")
    slurm.gives(RUNNING)
    run = submit(run_spec(tmp_path, cluster={"name": "lab", "launcher": "slurm"})).run
    rows: list[dict[str, Any]] = list(read_jsonl(run.submissions))
    for row in rows:
        del row["run_dir"], row["inode"]
    run.submissions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_copy_does_not_act_on_the_job_of_the_original(tmp_path: Path, older: RunDir) -> None:
    twin = RunDir(older.path.with_name("twin"))
    shutil.copytree(older.path, twin.path)
    assert look(older).active
    assert (look(twin).state, look(twin).active) == ("copied", False)
    with pytest.raises(ZslurmError, match=f"is a copy of {older.path}, and has no job to cancel"):
        cancel(twin)
    assert not (tmp_path / "done").exists(), "Slurm was asked for nothing"
    assert find(RUNNING) == older


def test_a_run_that_was_moved_keeps_its_job(older: RunDir) -> None:
    moved = RunDir(older.path.rename(older.path.with_name("moved")))
    assert look(moved).active
    assert find(RUNNING) == moved


def test_a_run_without_a_sound_configuration_keeps_its_job(older: RunDir) -> None:
    older.config.write_text("[]")
    assert last_job(older) is not None


@pytest.mark.parametrize("name", ["2026", "local-3"])
def test_a_run_that_is_named_like_a_job_can_still_be_read_and_continued(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path / "runs" / name)
    run.create(group_readable=False)
    body = run_spec(tmp_path).model_dump(mode="json")
    body["run"]["name"] = name
    run.config.write_text(json.dumps(body))
    assert load_spec(run.config).run.name == name
    assert spec_of(run).run.name == name
    moved = RunDir(run.path.rename(run.path.with_name("17")))
    with pytest.raises(ConfigError, match=r"/17: rename the directory: run\.name must not be a job id"):
        spec_of(moved)
