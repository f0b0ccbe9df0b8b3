"""Every kernel compiled for an architecture: what was built, and why something was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from zslurm.kernels import symmetric_product
from zslurm.kernels.arch import CPU, GFX90A, GFX942, SM_90, Arch
from zslurm.kernels.code_object import KernelLaunch
from zslurm.kernels.harness import builds
from zslurm.kernels.harness.builds import build_all, cache_problem
from zslurm.kernels.hip.build import SOURCES, code_of


def test_a_cpu_gets_the_hip_sources_as_host_code() -> None:
    built = list(build_all(CPU))
    assert [each.kernel for each in built] == sorted(file.stem for file in SOURCES.glob("*.hip"))
    for each in built:
        assert each.problem is None
        assert each.file is not None
        assert code_of(each.file) is not None


@pytest.mark.parametrize("arch", [GFX942, GFX90A], ids=lambda arch: arch.name)
def test_a_gpu_gets_triton_too_and_what_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: Arch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler there; Triton brings its own

    def launches(folder: str, built_for: object) -> list[KernelLaunch]:
        if folder == "grouped_gemm":
            raise ImportError("no module named triton")
        first = next(original(folder, arch))
        return [first, KernelLaunch("broken", lambda: 1 / 0)]

    original = builds.launches_of
    monkeypatch.setattr(builds, "launches_of", launches)
    monkeypatch.setattr(builds, "implementation_files", lambda: ["grouped_gemm", "symmetric_product"])
    by_name = {each.kernel: each for each in build_all(arch)}
    assert by_name["muon"].file is None
    assert "no hipcc in PATH" in str(by_name["muon"].problem)
    assert by_name["grouped_gemm"].problem == "needs triton: no module named triton"
    assert by_name["symmetric_product, broken"].problem == "ZeroDivisionError: division by zero"
    (code,) = [each.code for each in by_name.values() if each.code is not None]
    assert code.lds_bytes <= arch.lds_bytes
    assert code.matrix_instructions


def test_what_is_against_the_limits_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(builds, "violations", lambda *_: ["3 registers are spilled"])
    monkeypatch.setattr(builds, "implementation_files", lambda: ["symmetric_product"])
    monkeypatch.setattr(builds, "SOURCES", Path("/nonexistent"))
    from zslurm.kernels.symmetric_product import triton

    first = next(iter(triton.launches(SM_90)))
    monkeypatch.setattr(builds, "launches_of", lambda folder, arch: [first])
    (built,) = build_all(SM_90)
    assert built.problem == "3 registers are spilled"
    assert built.kernel.startswith("symmetric_product, ")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_problem() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZSLURM_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    assert cache_problem() == f"{tmp_path}/file/cache cannot be written (Not a directory)"


def test_a_user_without_a_home_has_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a user that /etc/passwd does not know; operations run all the same."""
    for name in ("ZSLURM_KERNEL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert "cannot be written" in str(cache_problem())
    from zslurm.kernels.dispatch import forget_tables

    forget_tables()
    assert symmetric_product.symmetric_product.table() == {}
