"""`zslurm report` of one run, and of two that it compares."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import Zslurm, fresh_zslurm
from tests.report.runs import failed_once


@pytest.fixture
def zslurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Zslurm:
    return Zslurm(monkeypatch, capsys)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs: the second has another learning rate, and its losses differ from step 51 on."""
    first, second = (failed_once(tmp_path / name).run for name in ("first", "second"))
    config = json.loads(second.config.read_text())
    config["phases"][0]["lr"] = 5e-4
    second.config.write_text(json.dumps(config))
    rows = [json.loads(line) for line in second.metrics.read_text().splitlines()]
    for row in rows:
        if row["kind"] == "step" and row["step"] > 50:
            row["loss"] += 0.25
    second.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return first.path, second.path


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_report_is_written_as_its_name_says(runs: tuple[Path, Path], tmp_path: Path, zslurm: Zslurm) -> None:
    run = runs[0]
    done = zslurm.ok("report", run, "--out", tmp_path / "x.md")
    assert str(tmp_path / "x.md") in done.stderr
    assert (tmp_path / "x.md").read_text().startswith("# first\n")
    zslurm.ok("report", run, "--out", tmp_path)
    assert (tmp_path / "first-report.html").read_text().startswith("<!DOCTYPE html>")
    assert zslurm.ok("report", *runs, "--out", "-", "--format", "md").stdout.startswith("# first, second\n")


def test_a_locale_without_the_characters_is_no_error(runs: tuple[Path, Path]) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = fresh_zslurm("report", runs[0], "--out", "-", "--format", "md", **ascii_only)
    assert (done.code, done.stderr) == (0, "")
    assert "█" in done.stdout, "UTF-8, as the file would be"
    assert fresh_zslurm("report", *runs, **ascii_only).code == 0


@pytest.mark.parametrize(
    ("out", "problem"), [("x.pdf", "end it with .html or .md"), ("none/x.html", "cannot be written")]
)
def test_a_report_that_cannot_be_written_is_one_line(
    runs: tuple[Path, Path], tmp_path: Path, zslurm: Zslurm, out: str, problem: str
) -> None:
    done = zslurm("report", runs[0], "--out", tmp_path / out)
    assert done.code == 2
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_such_run_is_not_found(zslurm: Zslurm) -> None:
    assert zslurm("report", "none-such").code == 3
    assert zslurm("report", "none-such", "none-such").code == 3


def test_two_runs_are_compared_by_configuration_figures_curves_and_faults(
    runs: tuple[Path, Path], zslurm: Zslurm
) -> None:
    lines = zslurm.ok("report", *runs).stdout.splitlines()
    assert "phases[0].lr\t0.001\t0.0005" in lines
    assert "tokens/s, median\t2048\t2048\t1" in lines
    assert "steps lost\t20\t20\t1" in lines
    (loss,) = [line for line in lines if line.startswith("loss: the same up to step 50, then ")]
    assert re.search(r"largest difference \S+ at step \d+$", loss)
    assert "lr: the same bit for bit up to step 160" in lines
    assert "faults of second: 1" in lines
    assert Path("first-and-1-more-report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_comparison_as_json(runs: tuple[Path, Path], zslurm: Zslurm) -> None:
    found = zslurm.ok("report", *runs, "--json").json
    assert found["runs"] == ["first", "second"]
    assert found["configuration"] == [{"key": "phases[0].lr", "first": 0.001, "second": 0.0005}]
    loss = next(curve for curve in found["curves"] if curve["name"] == "loss")
    assert (loss["by"], loss["same_until"], loss["at"], loss["same"]) == ("step", 50, 160, False)
    assert loss["largest"] == pytest.approx(0.25, abs=0.01)
    assert [len(faults) for faults in found["faults"]] == [1, 1]
    assert not Path("first-and-1-more-report.html").exists(), "no page unless --out names one"
    assert zslurm("report", runs[0], "--json").code == 2


def test_runs_with_other_batches_are_compared_by_tokens(runs: tuple[Path, Path], zslurm: Zslurm) -> None:
    metrics = runs[1] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row | {"tokens": row.get("tokens", 0) * 2 + 1}) + "\n" for row in rows))
    loss = zslurm.ok("report", *runs, "--json").json["curves"][0]
    assert (loss["by"], loss["same"]) == ("tokens", False)
    assert loss["points"] > 50


def test_a_run_without_steps_has_no_curve_to_compare(runs: tuple[Path, Path], zslurm: Zslurm) -> None:
    (runs[1] / "metrics.jsonl").unlink()
    assert "no step is in both runs" in zslurm.ok("report", *runs).stdout
