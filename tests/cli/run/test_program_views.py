"""Commands that show a run of another program: what there is, and what the program does not show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.stories import Story
from zslurm.aegis.core.policy.outcome import Cause
from zslurm.cli.run.dashboard import RunPicture, draw_run
from zslurm.cli.run.run_rows import as_json, as_row
from zslurm.cli.run.status import details
from zslurm.cli.run.why import explain_run
from zslurm.config.spec import ProgramSpec
from zslurm.run.state.run_state import RunState, look


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """A run of a program that shows nothing, after its start."""
    told = Story(tmp_path / "mute")
    spec = ProgramSpec.model_validate({"run": {"name": "mute"}, "trainer": {"command": ["true"]}})
    told.run.config.write_text(spec.model_dump_json())
    return told.submitted().started()


def text_of(state: RunState) -> str:
    lines = ("".join(part for part, _ in line) for line in details(state, width=100))
    return " ".join(" ".join(lines).split())


def test_what_is_missing_is_stated_everywhere(story: Story) -> None:
    story.ended("failed", 3, Cause("Exited with exit code 3", rank=1))
    state = look(story.run)
    assert "not shown no steps (zslurm.progress.step was not called" in text_of(state)
    assert "no checkpoints (trainer.checkpoints is not set)" in text_of(state)
    assert as_row(state)[4] == "-"
    assert len(as_json(state)["not_shown"]) == 2
    answer = explain_run(state)
    assert "It shows no checkpoints (trainer.checkpoints is not set)." in answer.text
    assert "continues it from what the program itself has saved" in answer.advice
    drawn = ["".join(part for part, _ in line) for line in draw_run(RunPicture.read(state), 200, 20)]
    assert any(line.startswith("not shown: no steps") for line in drawn)
    assert not any("step 0/" in line for line in drawn)


def test_what_it_shows_is_shown(story: Story) -> None:
    story.trained(1, 2, saved=2)
    state = look(story.run)
    assert "step 2" in text_of(state)
    assert "no time left (trainer.steps is not set)" in text_of(state)
    assert as_row(state)[4] == "2/?"


def test_a_run_of_zslurms_own_trainer_misses_nothing(tmp_path: Path) -> None:
    state = look(Story(tmp_path / "ours").submitted().started().run)
    assert state.not_shown == ()
    assert "not shown" not in text_of(state)
