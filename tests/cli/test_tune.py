"""`zslurm bench tuning` without a GPU, and what submission does with the table of tuned products."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_gemm_tuning import table
from tests.cli.commands import Shell
from zslurm.cluster.gemm_tables import own_table_path
from zslurm.core.errors import Exit
from zslurm.run.run_dir import RunDir
from zslurm.submit.checks.gemm_tuning import untuned
from zslurm.submit.resolve import resolve_run
from zslurm.submit.submit import write_tables
from zslurm.train.plan.gemm_table import load_table

PT = {"PT_VERSION": "0.0.1"}


@pytest.fixture
def run_file(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of eight MI300X, whose profile is this user's own."""
    profile = shell.directory / "config" / "zslurm" / "clusters" / "amd.yaml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shell.directory / "config"))
    profile.parent.mkdir(parents=True)
    profile.write_text("cluster: {launcher: local, gpus_per_node: 8, gpu_type: mi300x, rocm_version: 7.1.1}\n")
    path = shell.directory / "run.yaml"
    body = {
        "extends": "zaya1-8b",
        "data": {"path": "tokens.h5"},
        "parallel": {"device": "cuda"},
        "slurm": {"ranks_per_node": 8},
        "cluster": {"name": "amd"},
    }
    path.write_text(json.dumps(body))
    return path


def put(text: str) -> Path:
    path = own_table_path("amd")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_machine_without_a_gpu_gets_one_line(shell: Shell, run_file: Path) -> None:
    done = shell.zslurm("bench", "tuning", "--run", run_file, "--cluster", "local")
    assert done.code == Exit.USAGE and done.stdout == ""
    assert done.stderr.startswith("zslurm: torch sees no GPU on ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "AMD Instinct MI250X"}, "the GPUs are mi300x, the table's AMD Instinct MI250X"),
        ({"validators": {"ROCM_VERSION": "6.4.0-1"}}, "cluster.rocm_version is 7.1.1, the table's ROCm 6.4.0-1"),
        ({"validators": PT}, "the table's 0.0.1"),
    ],
)
def test_a_stale_table_is_refused_at_submission_in_one_line(
    shell: Shell, run_file: Path, changes: dict[str, Any], why: str
) -> None:
    path = put(table(**({"validators": {}} | changes)).model_dump_json())
    done = shell.zslurm("submit", run_file, "--dry-run")
    assert done.code == Exit.USAGE and done.stderr.count("\n") == 1
    assert why in done.stderr and str(path) in done.stderr and "zslurm bench tuning" in done.stderr
    off = shell.zslurm("submit", run_file, "--dry-run", "--set", "cluster.gemm_table=off")
    assert "tuned for something else" not in off.stderr


def test_a_damaged_table_is_refused_in_one_line(shell: Shell, run_file: Path) -> None:
    put("{")
    done = shell.zslurm("submit", run_file, "--dry-run")
    assert done.code == Exit.USAGE and done.stderr.count("\n") == 1
    assert "no table of tuned products" in done.stderr and "cluster.gemm_table: off" in done.stderr


def test_a_table_that_is_named_and_not_there_is_not_found(shell: Shell, run_file: Path) -> None:
    done = shell.zslurm("submit", run_file, "--dry-run", "--set", "cluster.gemm_table=/no/table.json")
    assert done.code == Exit.NOT_FOUND and "/no/table.json: no such file" in done.stderr


def test_a_run_on_cpus_has_no_use_for_a_table(shell: Shell, run_file: Path) -> None:
    put("{")
    done = shell.zslurm("submit", run_file, "--dry-run", "--set", "parallel.device=cpu")
    assert "no table of tuned products" not in done.stderr


def test_a_submission_puts_the_table_into_the_run_for_ranks_to_read(shell: Shell, run_file: Path) -> None:
    path = put(table(validators={}).model_dump_json())
    kernels = path.with_name("kernel-tables.json")
    kernels.write_text('{"muon": {}}')
    spec = resolve_run(run_file, cluster="amd").spec
    run = RunDir(shell.directory / "run")
    run.path.mkdir()
    write_tables(spec, run)
    assert run.gemm_csv.read_text() == table(validators={}).csv()
    assert stat.S_IMODE(run.gemm_csv.stat().st_mode) == 0o440
    assert load_table(run.gemm_table) == load_table(path)
    assert run.kernel_tables.read_text() == '{"muon": {}}'
    path.unlink()
    kernels.unlink()
    write_tables(spec, run)
    assert not run.kernel_tables.exists()
    assert not run.gemm_table.exists() and not run.gemm_csv.exists(), "that of an earlier submission goes"


def test_products_that_are_not_in_the_table_are_counted(shell: Shell, run_file: Path) -> None:
    put(table(validators={}).model_dump_json())
    (line,) = untuned(resolve_run(run_file, cluster="amd").spec)
    assert "of this run are not in it; `zslurm calibrate` adds them" in line
