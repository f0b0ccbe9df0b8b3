"""Metrics as columns: kept steps, damaged lines, frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.report.runs import failed_once, step_row
from zslurm.core.errors import ZslurmError
from zslurm.run.metrics import columns as metrics
from zslurm.run.metrics.columns import read_metrics
from zslurm.train.jsonl import JsonLinesWriter


def test_a_step_that_was_taken_again_is_not_kept(tmp_path: Path) -> None:
    found = read_metrics(str(failed_once(tmp_path / "run").run.path))
    assert found.steps["step"].tolist() == list(range(1, 161))
    assert found.steps["attempt"].tolist() == [1] * 80 + [2] * 80
    assert len(found.all_steps["step"]) == 180
    assert found.steps["time_split_s.forward"].tolist() == [0.6] * 160
    assert [row["step"] for row in found.rows("checkpoint")] == [80, 160]
    assert found.damaged == 0


def test_a_step_that_no_later_attempt_reached_again_is_lost_too(tmp_path: Path) -> None:
    with JsonLinesWriter(tmp_path / "metrics.jsonl") as lines:
        for attempt, steps in ((1, range(1, 11)), (2, range(6, 9))):
            for step in steps:
                lines.append(step_row(step, attempt, 100.0 * attempt + step))
    found = read_metrics(tmp_path)
    assert found.steps["step"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_damaged_lines_are_left_out_and_counted_but_not_one_that_is_being_written(tmp_path: Path) -> None:
    path = failed_once(tmp_path / "run").run.metrics
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:40] + b"\n"
    lines[5] = b"\x00\xff\n"
    lines[7] = b'{"kind":"step","attempt":1,"step":"seven","time":1}\n'
    lines[9] = b'{"kind":"step","attempt":1,"time":1}\n'
    path.write_bytes(b"".join(lines) + b'{"kind":"step","att')
    found = read_metrics(path)
    assert found.damaged == 4
    assert len(found.all_steps["step"]) == 176


def test_no_file_and_an_empty_one_are_no_steps(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for path in (tmp_path / "none", tmp_path / "empty.jsonl"):
        found = read_metrics(path)
        assert (found.steps, len(found.kept), found.frame().empty) == ({}, 0, True)


def test_loads_of_experts_are_kept_of_a_limited_number_of_steps_over_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LOAD_ROWS", 8)
    with JsonLinesWriter(tmp_path / "metrics.jsonl") as lines:
        for step in range(10, 1010, 10):
            lines.append(step_row(step, 1, step))
    steps = [row.step for row in read_metrics(tmp_path).load]
    assert 4 <= len(steps) <= 8
    assert (steps[0], len(set(np.diff(steps)))) == (10, 1)
    assert steps[-1] > 800


def test_a_frame_has_the_kept_steps_by_number_and_on_request_all(tmp_path: Path) -> None:
    run = read_metrics(failed_once(tmp_path / "run").run.path)
    frame, everything, saves = run.frame(), run.frame(all_attempts=True), run.frame("checkpoint")
    assert frame.index.tolist() == list(range(1, 161))
    assert frame.loc[100, "attempt"] == 2
    assert frame["phase"].unique().tolist() == ["pretrain"]
    assert (len(everything), int(everything["kept"].sum())) == (180, 160)
    assert saves["bytes"].tolist() == [1 << 20] * 2


def test_without_pandas_a_frame_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ZslurmError, match="pip install pandas"):
        read_metrics(tmp_path).frame()
