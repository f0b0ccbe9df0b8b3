"""`zslurm bench` hbm, gemm, mlp and train from the command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.bench.alone import MACHINE
from tests.cli.commands import PHASE, Shell
from tests.job.fake_apptainer import FakeApptainer
from zslurm.bench import train
from zslurm.bench.result import read_result
from zslurm.cli.bench.measurements import run_named
from zslurm.cli.bench.run import Measure
from zslurm.cluster.profile import profile_path
from zslurm.core.errors import Exit


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have torch behind them, and measure every point only shortly."""
    server = forked.server(torch=True)
    for name, value in forked.environment(server, [*forked.RANKS, *forked.OTHERS]).items():
        monkeypatch.setenv(name, value)


def test_a_recipes_products_are_measured_and_read_by_size(shell: Shell) -> None:
    run = shell.write_run()
    shell.zslurm.ok("bench", "gemm", "--run", run, "--ranks", "1", "--minutes", "0.5", "--out", "gemm.json")
    shell.zslurm.ok(
        *(
            "bench",
            "hbm",
            "--ranks",
            "1",
            "--pattern",
            "triad",
            "--min",
            "1MiB",
            "--max",
            "1MiB",
            "--out",
            "hbm.json",
        )
    )
    found = shell.zslurm.ok("plan", "size", run, "--rates", "gemm.json", "--rates", "hbm.json", "--json").json
    (phase,) = found["phases"]
    measured = {(row["name"], row["pass"]) for row in phase["products"] if row["rate"] == "measured"}
    in_time = {(row["product"], row["pass"]) for row in read_result(shell.directory / "gemm.json").rows}
    assert in_time & measured
    assert phase["step_s"] > 0


def test_a_runs_step_is_measured_with_its_parts(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = shell.write_run(phases=[PHASE, {**PHASE, "name": "wide", "micro_batch": 3}])
    arguments = ["--ranks", "2", "--steps", "2", "--phase", "wide", "--phase", "train", "--out", "train.json"]
    shell.zslurm.ok("bench", "train", "--run", run, *arguments)
    rows = read_result(shell.directory / "train.json").rows
    assert [(row["phase"], row["micro_batch"], row["microbatches"]) for row in rows] == [
        ("train", 2, 3),
        ("wide", 3, 2),
    ]
    for row in rows:
        assert row["samples"] == 2
        assert row["forward_s"] > 0
        assert row["tokens_per_s"] > 0
    assert not list(tmp_path.glob("zslurm-bench-train-*"))


def test_a_phase_that_does_not_fit_is_skipped() -> None:
    spec = run_named("zaya1-8b", Measure())
    sections = spec.model_dump(mode="json", include={"model", "optim", "parallel", "metrics"})
    phases = [each.model_dump(mode="json") for each in spec.phases]
    counts = dict.fromkeys((each.name for each in spec.phases), 1)
    options = {"run": "zaya1-8b", "sections": sections, "phases": phases, "microbatches": counts, "steps": 1}
    plan = train.points(options, MACHINE)
    assert not plan.points
    reasons = {skipped.point["phase"]: skipped.reason for skipped in plan.skipped}
    assert "at its peak, of 1.00 GiB that are free" in reasons["pretrain-1"]
    assert reasons["mid-train"] == "1 rank, no multiple of its context_parallel 2"


def test_a_rank_that_does_its_work_twice_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """By count, whatever else this machine does; `python -m benchmarks slow_mlp_rank` slows one by a fifth."""
    monkeypatch.setenv("ZSLURM_TEST_SLOW_RANK", "1")
    done = shell.zslurm.ok("bench", "mlp", "--ranks", "3", "--tokens", "64", "--quick", "--out", "mlp.json")
    rows = read_result(shell.directory / "mlp.json").rows
    assert [row["rank"] for row in rows if row["slower"]] == [1]
    assert "1 of 3 ranks is slower than the others: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["gemm", "--run", "zaya1-9b"], Exit.NOT_FOUND, "--run zaya1-9b: no file and no recipe has this name"),
        (["gemm", "--m", "8,x"], Exit.USAGE, "--m 8,x: expected numbers from 1 to 1,048,576 with commas"),
        (["gemm", "--dtype", "int4"], Exit.USAGE, "--dtype int4: expected one of bf16, fp32, fp64"),
        (["gemm", "--run", "zaya1-tiny", "--m", "8"], Exit.USAGE, "--run has its own sizes"),
        (["gemm", "--set", "model.layers=2"], Exit.USAGE, "--set changes a run"),
        (["hbm", "--dtype", "bf16"], Exit.USAGE, "--dtype bf16: expected one of fp64, fp32"),
        (["hbm", "--pattern", "nstream"], Exit.USAGE, "--pattern nstream: expected one of copy, scale"),
        (["hbm", "--min", "2GiB", "--max", "1GiB"], Exit.USAGE, "--min 2GiB is more than --max 1GiB"),
        (["train", "--run", "zaya1-tiny", "--phase", "last"], Exit.USAGE, "--phase last: the run's phases are"),
        (["train", "--run", "none.yaml"], Exit.NOT_FOUND, "--run none.yaml: no file and no recipe"),
        (["mlp", "--dtype", "fp8"], Exit.USAGE, "--dtype fp8: expected one of bf16, fp32"),
    ],
)
def test_what_is_wrong_is_one_line(shell: Shell, arguments: list[str], code: Exit, why: str) -> None:
    done = shell.zslurm("bench", *arguments)
    assert done.code == code
    assert why in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


@pytest.mark.parametrize("packages", ["host", "image"])
def test_a_container_is_measured_from_inside(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: str
) -> None:
    """Ranks of runs are inside: its torch and libraries are what counts, and not this machine's."""
    apptainer = FakeApptainer(tmp_path)
    monkeypatch.setenv("PATH", f"{apptainer.directory}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shell.directory / "config"))
    container = {"image": str(apptainer.image), "python": sys.executable, "packages": packages}
    path = profile_path("boxed")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cluster": {"launcher": "local", "container": container}}))
    words = ("--ranks", "1", "--pattern", "triad", "--min", "1MiB", "--max", "1MiB", "--out", "hbm.json")
    shell.zslurm.ok("bench", "hbm", "--cluster", "boxed", *words)
    assert read_result(shell.directory / "hbm.json").rows
    (call,) = apptainer.calls
    assert call["command"][-2:] == ["-m", "zslurm.bench.run.node"]
    inside = call["pythonpath"]
    assert (inside is not None and inside.startswith(f"{shell.directory}/.zslurm-bench-")) == (packages == "host")
    assert not list(shell.directory.glob(".zslurm-bench-*"))

    apptainer.image.unlink()
    refused = shell.zslurm("bench", "hbm", "--cluster", "boxed", *words)
    assert refused.code != Exit.DONE
    assert "could not open image" in refused.stderr
