"""Configuration of a run of another program, as commands show and refuse it; nothing is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Shell

PROGRAM = (
    "run: {name: mine}\ntrainer: {command: ['true', --lr, 1e-3, --on, true], steps: 7}\ncluster: {name: local}\n"
)


@pytest.fixture
def run_file(shell: Shell) -> Path:
    path = shell.directory / "program.yaml"
    path.write_text(PROGRAM)
    return path


def test_only_sections_that_the_run_uses_are_shown(shell: Shell, run_file: Path) -> None:
    lines = shell.zslurm("config", "show", run_file).stdout.splitlines()
    assert {line.partition(".")[0] for line in lines} == {"run", "trainer", "slurm", "cluster", "aegis"}
    body = json.loads(shell.zslurm("config", "show", run_file, "--json").stdout)
    assert set(body) == {"run", "trainer", "slurm", "cluster", "aegis"}
    assert body["trainer"]["command"] == ["true", "--lr", "0.001", "--on", "true"]
    shown = shell.zslurm("config", "show", run_file, "--set", "parallel.device=cpu").stdout
    assert [line for line in shown.splitlines() if line.startswith("parallel")] == ["parallel.device = cpu"]


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("optim.weight_decay=0.5", "optim: belongs to zslurm's own trainer"),
        ("checkpoint.every_steps=3", "checkpoint: belongs to zslurm's own trainer"),
        ("trainer.stop_s=700", "trainer.stop_s (700 s) must be less than aegis.save_s (600 s)"),
        ("trainer.progress.rank=-2", "greater than or equal to -1"),
        ("trainer.command=[]", "at least one item"),
    ],
)
def test_what_the_program_would_not_see_is_refused(shell: Shell, run_file: Path, setting: str, why: str) -> None:
    code, message = shell.fails("config", "show", run_file, "--set", setting)
    assert (code, why in message, len(message.splitlines())) == (2, True, 1), message


def test_a_dry_run_has_the_steps_of_the_program_and_notes_on_its_hangs(shell: Shell, run_file: Path) -> None:
    body = json.loads(shell.zslurm("submit", run_file, "--dry-run", "--json").stdout)
    assert body["steps"] == 7
    assert any("a hang is noticed only if" in note for note in body["notes"])
    grows = shell.zslurm("submit", run_file, "--dry-run", "--json", "--set", "trainer.progress.grows=log").stdout
    assert "180 s without growth count as a hang (aegis.hang.step_s)" in grows


def test_a_stop_that_slurm_would_not_wait_for_is_noted_in_seconds(shell: Shell, run_file: Path) -> None:
    on_slurm = ("--set", "cluster.launcher=slurm", "--set", "trainer.stop_s=400")
    body = json.loads(shell.zslurm("submit", run_file, "--dry-run", "--json", *on_slurm).stdout)
    (note,) = (note for note in body["notes"] if "trainer.stop_s" in note)
    assert note.startswith("trainer.stop_s (400 s) is longer than slurm.save_margin_s (300 s): ")
