"""Runs from Python: submitted, waited for, looked at, stopped; and what is wrong is one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import zslurm
from tests.programs import TOY
from tests.run.stories import Story
from tests.submit.local_runs import LocalUser
from tests.waiting import wait_for
from zslurm.run.events import AttemptEnded, AttemptStarted, Submitted

QUICK = {"grace_s": 1, "poll_s": 0.05, "settle_s": 0.5}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalUser]:
    """This process is the user's program."""
    person = LocalUser(tmp_path)
    for name, value in person.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield person
    person.close()


def toy(steps: int, **trainer: Any) -> dict[str, Any]:
    """What would be in a run file."""
    command = [sys.executable, TOY, steps]
    return {
        "run": {"name": "toy"},
        "trainer": {"command": [str(word) for word in command], "steps": steps, **trainer},
        "aegis": QUICK,
    }


def test_a_program_is_submitted_waited_for_and_read(user: LocalUser) -> None:
    run = zslurm.submit(command=[sys.executable, TOY, "12"], cluster="local", overrides={"aegis": QUICK})
    assert (run.name, run.path) == ("toy_program", user.directory / "runs" / "toy_program")
    assert run.job_id is not None and run.job_id.startswith("local-")
    end = run.wait(timeout_s=300)
    assert (end.state, end.step) == ("completed", 12)
    assert run.status().state == "completed"
    assert zslurm.load_run("toy_program") == zslurm.load_run(run.path) == run
    assert zslurm.runs() == [run]
    kinds = [type(event) for event in run.events()]
    assert (kinds[0], AttemptStarted in kinds, AttemptEnded in kinds) == (Submitted, True, True)
    assert run.events(since=datetime.now(UTC)) == []
    assert run.metrics().steps["loss"][-1] == pytest.approx(4.2 * 0.99**12)
    assert run.config.trainer is not None and run.config.trainer.command[-1] == "12"
    assert run.cancel() is None


def test_a_run_is_what_would_be_in_its_file_and_is_stopped_and_continued(user: LocalUser) -> None:
    run = zslurm.submit(toy(100_000, directory=user.directory), cluster="local")
    wait_for(lambda: run.status().step is not None, "the first step")
    with pytest.raises(zslurm.WaitTimeout, match=r"toy: still running after 0\.1 seconds"):
        run.wait(timeout_s=0.1)
    with pytest.raises(zslurm.ZslurmError, match="toy"):
        zslurm.submit(toy(50), cluster="local")  # it is active
    assert run.cancel(wait=True) == run.job_id
    assert run.status().state == "cancelled"
    table = run._repr_html_()
    assert "<td>cancelled</td>" in table
    assert repr(run) == f"Run({str(run.path)!r}, job {run.job_id})"


def test_metrics_checkpoints_and_a_notebook_s_table_of_a_run_that_is_over(tmp_path: Path) -> None:
    story = Story(tmp_path / "runs" / "first").submitted().started()
    run = zslurm.load_run(story.run.path)
    assert run.metrics().steps == {}
    assert run.checkpoints() == []
    with pytest.raises(zslurm.NotFound, match="no complete checkpoint in"):
        run.checkpoint()
    with pytest.raises(zslurm.Error):
        run.checkpoint(step=400)
    assert "<th>run</th><td>first</td>" in run._repr_html_()
    assert "Metrics(" in repr(run.metrics())
    assert "<attempt_started of " in repr(run.events())


WRONG: dict[str, tuple[dict[str, Any], type[zslurm.Error], str]] = {
    "nothing": ({}, zslurm.ConfigError, "give a run file, or a program"),
    "no file": ({"run": "nix.yaml"}, zslurm.NotFound, "nix.yaml"),
    "a text": ({"command": ["a"], "overrides": "a=1"}, zslurm.ConfigError, "expected a dictionary or a list"),
    "a key": (
        {"run": toy(3) | {"slrm": {}}, "cluster": "local"},
        zslurm.ConfigError,
        "run: slrm: unknown key; did you mean `slurm`?",
    ),
    "an override": (
        {"run": toy(3), "cluster": "local", "overrides": {"slurm.nods": 2}},
        zslurm.ConfigError,
        "slurm.nods: unknown key; did you mean `nodes`",
    ),
    "a value": (
        {"run": {"run": {"name": object()}}},
        zslurm.ConfigError,
        "run: holds a value that no run file",
    ),
    "a profile": ({"run": toy(3), "cluster": "nix"}, zslurm.NotFound, "nix: no cluster profile has this name"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_and_nothing_is_written(case: str, user: LocalUser) -> None:
    arguments, kind, line = WRONG[case]
    before = sorted(user.directory.iterdir())
    with pytest.raises(kind) as raised:
        zslurm.submit(**arguments)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert sorted(user.directory.iterdir()) == before


def test_a_run_that_is_not_there_is_not_found(user: LocalUser) -> None:
    with pytest.raises(zslurm.NotFound, match="nix"):
        zslurm.load_run("nix")
