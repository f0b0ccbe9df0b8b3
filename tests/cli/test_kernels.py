"""`zslurm dev kernels build|check` on a machine without a GPU, and what it makes of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import forked
from tests.cli.commands import Shell
from zslurm.core.errors import Exit
from zslurm.kernels.harness import builds
from zslurm.kernels.harness import comparison as checks
from zslurm.kernels.harness.comparison import Checked

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
    assert done.stderr == "zslurm: --arch gfx943: unknown, expected one of cpu, gfx942, gfx90a, sm_90\n"


def test_a_cache_that_cannot_be_written(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZSLURM_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    done = shell.zslurm("dev", "kernels", "build", "--arch", "cpu")
    assert done.code == Exit.FAILED
    (line,) = done.stderr.splitlines()
    assert "cannot be written (Not a directory): set ZSLURM_KERNEL_CACHE to a directory that can" in line


@needs_no_gpu
def test_a_gpu_that_is_not_there(shell: Shell) -> None:
    done = shell.zslurm("dev", "kernels", "check", "--device", "gpu")
    assert done.code == Exit.FAILED
    assert done.stderr.startswith("zslurm: --device gpu: torch finds no GPU on this machine")


def test_an_unknown_operation(shell: Shell) -> None:
    done = shell.zslurm("dev", "kernels", "check", "--only", "matmuls")
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
