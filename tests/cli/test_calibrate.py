"""`zslurm calibrate` on this machine: output, exit codes, bad input, and who uses the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from zslurm.cluster.profile import measured_path
from zslurm.core.errors import Exit


@pytest.fixture(autouse=True)
def own_profiles(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shell.directory / "config"))
    for variable in ("SLURM_JOB_ID", "ZSLURM_CLUSTER"):
        monkeypatch.delenv(variable, raising=False)


def test_the_parts_are_listed_with_their_time(shell: Shell) -> None:
    done = shell.zslurm.ok("calibrate", "zaya1-tiny", "--local", "--path", ".", "--time", "30", "--list")
    columns, *rows = (line.split("\t") for line in done.stdout.splitlines())
    assert columns == ["part", "what", "minutes at most"]
    names = ["nodes", "memory", "products", "kernels", "tuned-products", "collectives", "storage"]
    assert [row[0] for row in rows] == names
    assert sum(float(row[2]) for row in rows) == pytest.approx(30, abs=0.5)
    of_cluster = shell.zslurm.ok("calibrate", "--cluster", "mi300x-pollara", "--list").stdout
    assert "variable-NCCL_MIN_NCHANNELS" in of_cluster and "variable-NCCL_IB_QPS_PER_CONNECTION" in of_cluster


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (
            ("--local", "--nodes", "2"),
            Exit.USAGE,
            "--local measures this machine: leave out --nodes and --nodelist",
        ),
        (
            ("--cluster", "mi300x-pollara", "--nodes", "2", "--nodelist", "n[0-1]"),
            Exit.USAGE,
            "exclude each other",
        ),
        (("--cluster", "local"), Exit.USAGE, "the profile local is of this machine: give --local"),
        (("--local", "--only", "gpus"), Exit.USAGE, "--only gpus: expected one of nodes, memory, products"),
        (("--local", "--path", "nowhere", "--only", "storage"), Exit.USAGE, "nowhere: no such directory"),
        (("zaya1-tny", "--local"), Exit.NOT_FOUND, "did you mean zaya1-tiny?"),
        ((), Exit.USAGE, "no cluster profile yet"),
    ],
)
def test_what_is_wrong_gets_one_line(shell: Shell, words: tuple[str, ...], code: Exit, why: str) -> None:
    done = shell.zslurm("calibrate", *words)
    assert (done.code, done.stdout) == (code, "")
    assert why in done.stderr and done.stderr.count("\n") == 1


def test_this_machine_is_measured_and_runs_and_plans_use_the_result(shell: Shell) -> None:
    words = ["calibrate", "zaya1-tiny", "--local", "--time", "0.4", "--only", "memory", "--only", "products"]
    done = shell.zslurm.ok(*words, "--only", "kernels")
    assert "[1/3] memory: " in done.stderr and "kernels: left out: it needs a GPU" in done.stderr
    store = measured_path("local")
    assert f"wrote {store}" in done.stderr
    facts = json.loads(store.read_text())
    assert facts["calibration"]["parts"]["memory"]["complete"] is True
    done = shell.zslurm.ok("plan", "size", "zaya1-tiny", "--cluster", "local")
    assert f", {store.with_suffix('')})" in done.stderr, "its rates are those that were measured"
    Path(store.with_suffix(""), "products.json").unlink()
    done = shell.zslurm.ok("plan", "size", "zaya1-tiny", "--cluster", "local")
    assert "measured rates" not in done.stderr
