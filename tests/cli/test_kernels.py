"""`zslurm dev kernels build|check|bench` on a machine without a GPU, and what it makes of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import forked
from tests.cli.commands import Shell
from zslurm.cli import kernels as cli
from zslurm.core.errors import Exit
from zslurm.kernels import arch
from zslurm.kernels.dispatch import forget_tables, operations
from zslurm.kernels.harness import bench, builds, figures, timing
from zslurm.kernels.harness import comparison as checks
from zslurm.kernels.harness.bench import MeasuredCase
from zslurm.kernels.harness.comparison import Checked
from zslurm.kernels.harness.figures import Figure

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of this run of the tests."""
    directory = forked.place() / "kernels"
    monkeypatch.setenv("ZSLURM_KERNEL_CACHE", str(directory))
    return directory


@needs_no_gpu
def test_build_for_this_machine(shell: Shell, cache: Path) -> None:
    done = shell.zslurm.ok("dev", "kernels", "build", "--json")
    assert {(each["language"], each["architecture"]) for each in done.json} == {("hip", "cpu")}
    for each in done.json:
        assert Path(each["file"]).parent == cache
    header, *rows = shell.zslurm.ok("dev", "kernels", "build", "--arch", "cpu").stdout.splitlines()
    assert header.split("\t")[:3] == ["kernel", "language", "architecture"]
    assert len(rows) == len(done.json)


def test_build_for_another_architecture(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a hipcc of the test; kernels in Triton are compiled in tests/kernels."""
    hipcc = tmp_path / "bin" / "hipcc"
    hipcc.parent.mkdir()
    hipcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "HIP 1" && exit\n'
        'for last; do :; done\nprintf "\\177ELF %s" "$*" > "$last"\n'
    )
    hipcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(hipcc.parent), prepend=":")
    monkeypatch.setattr(builds, "implementation_files", list)
    done = shell.zslurm.ok("dev", "kernels", "build", "--arch", "gfx942", "--json")
    assert all(b"--offload-arch=gfx942" in Path(each["file"]).read_bytes() for each in done.json)


def test_build_without_a_compiler(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(builds, "implementation_files", list)
    done = shell.zslurm("dev", "kernels", "build", "--arch", "gfx942")
    assert done.code == Exit.FAILED
    (line,) = done.stderr.splitlines()
    assert line.startswith("zslurm: gfx942: ")
    assert line.endswith("no hipcc in PATH")


def test_an_unknown_architecture(shell: Shell) -> None:
    done = shell.zslurm("dev", "kernels", "build", "--arch", "gfx943")
    assert done.code == Exit.USAGE
    assert done.stderr == "zslurm: --arch gfx943: unknown, expected one of cpu, gfx942, sm_90\n"


def test_a_cache_that_cannot_be_written(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZSLURM_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    done = shell.zslurm("dev", "kernels", "build", "--arch", "cpu")
    assert done.code == Exit.FAILED
    (line,) = done.stderr.splitlines()
    assert "cannot be written (Not a directory): set ZSLURM_KERNEL_CACHE to a directory that can" in line


@needs_no_gpu
@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_gpu_that_is_not_there(shell: Shell, command: str) -> None:
    done = shell.zslurm("dev", "kernels", command, "--device", "gpu")
    assert done.code == Exit.FAILED
    assert done.stderr.startswith("zslurm: --device gpu: torch finds no GPU on this machine")


@pytest.mark.parametrize("command", ["check", "bench"])
def test_an_unknown_operation(shell: Shell, command: str) -> None:
    done = shell.zslurm("dev", "kernels", command, "--only", "matmuls")
    assert done.code == Exit.USAGE
    assert done.stderr.startswith("zslurm: --only matmuls: no such operation, expected one of experts, ")


def test_check_on_a_cpu(shell: Shell) -> None:
    done = shell.zslurm.ok("dev", "kernels", "check", "--device", "cpu", "--only", "muon")
    header, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert header == ["operation", "operands", "implementation", "status", "error", "why"]
    assert {(row[2], row[3]) for row in rows} == {("hip", "ok"), ("torch", "ok")}
    assert f"{len(rows)} results, none of them wrong" in done.stderr


def test_a_wrong_kernel_fails_the_check(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Checked("muon.update", "3 tensors", "hip", "wrong", 0.5, "differs by 0.5 of the largest magnitude"),
        Checked("muon.update", "3 tensors", "triton", "unavailable", None, "ImportError: no module named triton"),
        Checked("new", "", "", "no cases"),
    ]
    monkeypatch.setattr(checks, "check_all", lambda *_, **__: iter(found))
    done = shell.zslurm("dev", "kernels", "check", "--device", "cpu")
    assert done.code == Exit.CHECK_FAILED
    assert done.stderr.splitlines() == [
        "note: could not run: ImportError: no module named triton",
        "note: no cases to check: new",
        "zslurm: muon.update: hip on 3 tensors: differs by 0.5 of the largest magnitude",
    ]
    assert shell.zslurm("dev", "kernels", "check", "--device", "cpu", "--json").json[0]["error"] == 0.5


def test_bench_on_a_cpu_writes_nothing(shell: Shell, cache: Path) -> None:
    done = shell.zslurm.ok("dev", "kernels", "bench", "--device", "cpu", "--only", "muon")
    assert "muon.update" in done.stdout
    assert "(fastest)" in done.stdout
    assert "nothing was written" in done.stderr
    assert not (cache / "tables").exists()
    facts = shell.zslurm.ok("dev", "kernels", "bench", "--device", "cpu", "--only", "muon", "--json").json
    assert facts["written"] == []
    assert facts["tables"]["muon"]["update"]["cpu"]
    assert facts["triad_bytes_per_s"] > 0


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gfx942 on which Triton's symmetric product wins from 2,048 on."""
    found = [
        MeasuredCase(
            operation="symmetric_product.product",
            case=f"bfloat16 {side}",
            axis="side",
            sizes={"dtype": "bfloat16", "side": side},
            seconds={"reference": 1e-3, "triton": seconds},
            flops=2.0 * side**3,
            bytes=1e6,
            missing={"cpu": "does not take operands on cuda"},
        )
        for side, seconds in ((1024, 2e-3), (2048, 5e-4))
    ]
    figure = Figure("Muon's update", "torch.compile", 1e-3, 1.3e-3, 0.91)
    monkeypatch.setattr(cli, "device_of", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setattr(arch, "arch_of", lambda device: arch.GFX942)
    monkeypatch.setattr(bench, "bench_all", lambda *_, **__: iter(found))
    monkeypatch.setattr(figures, "all_figures", lambda *_, **__: iter([figure]))
    monkeypatch.setattr(timing, "triad", lambda device: 4e12)


@pytest.mark.usefixtures("simulated_gpu")
def test_bench_on_a_gpu_writes_what_dispatch_reads(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZSLURM_KERNEL_CACHE", str(tmp_path / "own"))
    file = tmp_path / "own" / "tables" / "gfx942" / "symmetric_product.json"
    done = shell.zslurm.ok("dev", "kernels", "bench", "--no-write")
    assert "triton (fastest)\t500.0\t0.50\t34.36\t" in done.stdout
    assert "Muon's update\ttorch.compile\t1,000.0\t1.30\t0.91" in done.stdout
    assert "cpu\t\t\t\tdoes not take operands on cuda" in done.stdout
    assert not file.exists()
    assert f"wrote {file}" in shell.zslurm.ok("dev", "kernels", "bench").stderr
    try:
        assert operations()["symmetric_product.product"].table() == {
            "gfx942": [
                {"when": {"dtype": "bfloat16", "side": [0, 2047]}, "use": "reference"},
                {"when": {"dtype": "bfloat16", "side": [2048, 2**62]}, "use": "triton"},
            ]
        }
    finally:
        forget_tables()


@pytest.mark.usefixtures("simulated_gpu")
def test_bench_on_a_gpu_with_a_cache_that_cannot_be_written(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is known before the time is spent."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZSLURM_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    done = shell.zslurm("dev", "kernels", "bench")
    assert (done.code, done.stdout) == (Exit.FAILED, "")
    assert "cannot be written (Not a directory)" in done.stderr
