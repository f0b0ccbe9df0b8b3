"""The newest checkpoint of a program, by the pattern of its paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zslurm.config.trainer import TrainerSection
from zslurm.run.program_checkpoints import newest_step
from zslurm.run.run_dir import RunDir


@pytest.mark.parametrize(
    ("pattern", "files", "step"),
    [
        ("out/step-*.pt", ["out/step-000010.pt", "out/step-9.pt", "out/other-99.pt"], 10),
        ("out/checkpoint-*/state.json", ["out/checkpoint-5/state.json", "out/checkpoint-70/part"], 5),
        ("{output_dir}/step=*.ckpt", ["runs/a [1]/output/step=20.ckpt", "runs/a [1]/step=30.ckpt"], 20),
        ("{run_dir}/output/*/.metadata", ["runs/a [1]/output/iter_0000040/.metadata"], 40),
        ("out/*.pt", [], -1),
        ("out2/step-*/rank-0.pt", ["out2/step-7/rank-0.pt", "out2/step-8/rank-1.pt"], 7),
        (None, ["out/step-3.pt"], -1),
    ],
)
def test_the_highest_number_counts(tmp_path: Path, pattern: str | None, files: list[str], step: int) -> None:
    """Also if a path holds characters of patterns itself."""
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    trainer = TrainerSection(command=("true",), directory=str(tmp_path), checkpoints=pattern)
    assert newest_step(trainer, RunDir(tmp_path / "runs" / "a [1]")) == step


def test_a_path_without_a_number_counts_by_its_time(tmp_path: Path) -> None:
    (tmp_path / "out-3").mkdir()
    (tmp_path / "out-3" / "last").touch()
    os.utime(tmp_path / "out-3" / "last", (1.7e9, 1.7e9))
    trainer = TrainerSection(command=("true",), directory=str(tmp_path), checkpoints="out-3/last")
    assert newest_step(trainer, RunDir(Path("/nowhere/run"))) == 1_700_000_000
