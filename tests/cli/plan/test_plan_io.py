"""`zslurm plan io`: what a run will ask of its storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.cli.test_output import json_of
from zslurm.cli.plan import _times
from zslurm.core.errors import Exit
from zslurm.train.config import ModelConfig

PHASES = [
    {
        "name": "pretrain",
        "tokens": 8 * 10**12,
        "context": 4096,
        "global_batch": 4096,
        "micro_batch": 4,
        "lr": 1e-3,
    },
    {"name": "long", "tokens": 10**12, "context": 32768, "global_batch": 512, "micro_batch": 1, "lr": 1e-4},
]


@pytest.fixture
def run_file(shell: Shell) -> Path:
    """ZAYA1-base with a first and a long phase."""
    return shell.write_run(model=ModelConfig().model_dump(mode="json"), phases=PHASES)


def test_it_gives_the_published_figures(shell: Shell, run_file: Path) -> None:
    found = json_of(shell.zslurm("plan", "io", run_file, "--step-time", "2.5", "--json"))
    pretrain, long = found["reads"]
    assert (pretrain["bytes_per_step"], pretrain["pages_per_step"]) == (64 << 20, 16_384)
    assert pretrain["iops_per_sigma"] == 6553.6
    assert (pretrain["sigma"], long["sigma"]) == (1.25, 1.03125)
    assert pretrain["of_budget"] == pytest.approx(1.25 * 6553.6 / 70_000)
    assert found["checkpoint"]["every_s"] == 1250
    assert found["budget_from"] == "published"
    assert pretrain["break_even_s"] == pytest.approx(1.25 * 16_384 / 70_000)
    assert pretrain["margin"] == pytest.approx(2.5 / pretrain["break_even_s"])


def test_a_table_and_what_checkpoints_need(shell: Shell, run_file: Path) -> None:
    done = shell.zslurm("plan", "io", run_file, "--step-time", "2.5")
    columns, pretrain, long = (line.split("\t") for line in done.stdout.splitlines())
    assert dict(zip(columns, pretrain, strict=True)) == {
        "phase": "pretrain",
        "a step": "64.0 MiB",
        "pages": "20,480",
        "sigma": "1.25",
        "IOPS": "8,192",
        "of budget": "11.7 %",
        "IOPS, sigma 1": "6,554",
        "2": "13,107",
        "8": "52,429",
    }
    assert long[0] == "long"
    budget, first, second, saves = done.stderr.splitlines()
    assert budget.startswith("budget: 70k pages/s, what ZAYA1's cluster gave; `zslurm bench storage` measures")
    assert first == (
        "phase pretrain: break-even at steps of 0.293 s, margin 8.54 "
        "(1.87 s and 1.34 for fragmented data, sigma 8)"
    )
    assert second.startswith("phase long: break-even at steps of 0.241 s, margin 10.4 ")
    assert saves.startswith("a checkpoint has ")
    assert "is due every 20m 50s: saving must reach " in done.stderr
    assert "note:" not in done.stderr


def test_a_run_that_asks_for_too_much_is_reported(shell: Shell, run_file: Path) -> None:
    done = shell.zslurm("plan", "io", run_file, "--step-time", "2.5", "--iops", "8000")
    assert done.stderr.splitlines()[-1] == (
        "note: phase pretrain reads more than the 8k pages/s of the budget; copy the data to disks of the nodes"
    )
    assert "phase pretrain: break-even at steps of 2.56 s, margin 0.977 " in done.stderr
    assert "phase long reads more" not in done.stderr


def test_the_budget_is_what_was_measured_on_the_cluster(shell: Shell, run_file: Path) -> None:
    profile = ("--set", "cluster.storage_iops=8000")
    done = shell.zslurm("plan", "io", run_file, "--step-time", "2.5", *profile)
    assert done.stderr.splitlines()[0] == "budget: 8k pages/s, cluster.storage_iops of the profile"
    assert done.stderr.splitlines()[-1].startswith("note: phase pretrain reads more than the 8k pages/s")
    given = shell.zslurm("plan", "io", run_file, "--step-time", "2.5", "--iops", "9000", *profile)
    assert given.stderr.splitlines()[0] == "budget: 9k pages/s, as given with --iops"


@pytest.mark.parametrize("step_time", ["0", "-1", "inf", "soon"])
def test_a_step_takes_some_time(shell: Shell, run_file: Path, step_time: str) -> None:
    code, line = shell.fails("plan", "io", run_file, f"--step-time={step_time}")
    assert code == Exit.USAGE
    assert "'--step-time'" in line


def test_large_margins_are_written_in_whole_numbers() -> None:
    assert [_times(value) for value in (0.977, 8.543, 20_612.4)] == ["0.977", "8.54", "20,612"]
