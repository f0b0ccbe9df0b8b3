"""`zslurm calibrate` on this machine: output, exit codes, bad input, and who uses the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.cluster.test_measurements import stored
from zslurm.bench.result import read_result
from zslurm.cluster.measurements import Measurements, write_measurements
from zslurm.cluster.profile import measured_path, profile_path
from zslurm.core.errors import Exit


@pytest.fixture(autouse=True)
def own_profiles(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shell.directory / "config"))
    for variable in ("SLURM_JOB_ID", "ZSLURM_CLUSTER"):
        monkeypatch.delenv(variable, raising=False)


def test_the_parts_are_listed_with_their_time(shell: Shell) -> None:
    done = shell.zslurm.ok("calibrate", "zaya1-tiny", "--local", "--path", ".", "--time", "30", "--list")
    columns, *rows = (line.split("\t") for line in done.stdout.splitlines())
    assert columns == ["part", "what", "minutes"]
    names = ["nodes", "memory", "speed", "products", "collectives", "tuned-products", "kernels", "storage"]
    assert [row[0] for row in rows] == names
    assert sum(float(row[2]) for row in rows) == pytest.approx(30, abs=0.5)
    facts = json.loads(shell.zslurm.ok("calibrate", "zaya1-tiny", "--local", "--list", "--json").stdout)
    assert sum(part["minutes"] for part in facts) == pytest.approx(60, abs=0.1)
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
        (("--local", "--only", "gpus"), Exit.USAGE, "--only gpus: expected one of nodes, memory, speed"),
        (("--local", "--time", "inf"), Exit.USAGE, "less than or equal to 10080"),
        (("--local", "--path", "nowhere", "--only", "storage"), Exit.USAGE, "nowhere: no such directory"),
        (
            ("--local", "--out", "lab.json"),
            Exit.USAGE,
            "lab.results: cannot be written: File exists; name another file with --out",
        ),
        (
            ("--local", "--out", "of-lab.json"),
            Exit.USAGE,
            "of-lab.json: was measured with the profile lab, not with local; remove the file, and measure again",
        ),
        (("zaya1-tny", "--local"), Exit.NOT_FOUND, "did you mean zaya1-tiny?"),
        ((), Exit.USAGE, "no cluster profile yet"),
    ],
)
def test_what_is_wrong_gets_one_line(shell: Shell, words: tuple[str, ...], code: Exit, why: str) -> None:
    (shell.directory / "lab.results").touch()
    write_measurements(shell.directory / "of-lab.json", Measurements(profile="lab"))
    done = shell.zslurm("calibrate", *words)
    assert (done.code, done.stdout) == (code, "")
    assert why in done.stderr and done.stderr.count("\n") == 1


def test_this_machine_is_measured_and_runs_and_plans_use_the_result(shell: Shell) -> None:
    words = ["calibrate", "zaya1-tiny", "--local", "--time", "3", "--only", "memory", "--only", "products"]
    done = shell.zslurm.ok(*words, "--only", "kernels")
    assert "[2/3] memory: " in done.stderr and "kernels: left out: it needs a GPU" in done.stderr
    store = measured_path("local")
    assert f"wrote {store}" in done.stderr
    facts = json.loads(store.read_text())
    assert facts["parts"]["memory"]["complete"] is True
    again = shell.zslurm.ok(*words)
    assert "measured before: memory, products; --again measures everything again" in again.stderr
    done = shell.zslurm.ok("plan", "size", "zaya1-tiny", "--cluster", "local")
    assert f", {store.with_suffix('')})" in done.stderr, "its rates are those that were measured"
    Path(store.with_suffix(""), "products.json").unlink()
    done = shell.zslurm.ok("plan", "size", "zaya1-tiny", "--cluster", "local")
    assert "measured rates" not in done.stderr


def test_a_short_calibration_compares_nodes_at_enough_moments_to_see_a_slow_one(shell: Shell) -> None:
    shell.zslurm.ok("calibrate", "zaya1-tiny", "--local", "--time", "1", "--only", "nodes")
    result = read_result(measured_path("local").with_suffix("") / "nodes.json")
    moments = [row["moments_s"] for row in result.rows]
    assert [len(of_rank) for of_rank in moments] == [30, 30]


def test_cpus_replace_no_measurement_of_gpus(shell: Shell) -> None:
    profile_path("lab").parent.mkdir(parents=True, exist_ok=True)
    profile_path("lab").write_text("cluster: {gpus_per_node: 8, gpu_type: mi300x}\n")
    store = measured_path("lab")
    write_measurements(store, Measurements(profile="lab", values={"measured.bucket_mb.4": stored(96.0)}))
    before = store.read_text()
    done = shell.zslurm("calibrate", "zaya1-tiny", "--local", "--cluster", "lab", "--only", "memory")
    assert done.code == Exit.USAGE and store.read_text() == before
    assert "torch sees none of the 8 GPUs of this node, and" in done.stderr


def test_in_a_job_the_nodes_are_those_of_the_job(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    profile_path("lab").parent.mkdir(parents=True, exist_ok=True)
    profile_path("lab").write_text("cluster: {gpus_per_node: 0}\n")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-1]")
    for words, why in (
        (("--nodes", "4"), "--nodes 4: this job has 2 nodes: node[0-1]"),
        (("--nodelist", "node[1-2]"), "--nodelist: node2 is not in this job, which has node[0-1]"),
    ):
        done = shell.zslurm("calibrate", "zaya1-tiny", "--cluster", "lab", *words)
        assert done.code == Exit.USAGE and why in done.stderr
