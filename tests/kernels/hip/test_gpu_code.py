"""What compilers make of the HIP sources for GPUs that this machine need not have.

gfx942 by clang 19 with Debian's device libraries (gfx942.py), sm_90 by nvcc. And both runtime compilers, if a
library of one is at hand: Debian's hipRTC knows gfx90a.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.common import RESULTS
from benchmarks.kernels.code_objects import of_hip
from tests.kernels.hip.gfx942 import DEVICE_LIBRARIES, can_compile, compiled, device_libraries, run
from zslurm.kernels.amd_assembly import kernels_of
from zslurm.kernels.arch import GFX942
from zslurm.kernels.hip import rtc
from zslurm.kernels.hip.build import SOURCES, source_of
from zslurm.kernels.hip.compilers import CUDA_FLAGS, RTC_FLAGS

NAMES = sorted(file.stem for file in SOURCES.glob("*.hip"))
STREAMING = re.compile(r"muon_(momentum|update)")
"""Kernels whose time is that of their memory accesses."""


def needs(found: bool, what: str) -> None:
    """Skip if something is missing, but not in CI, which installs it."""
    if not found:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"needs {what}")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device libraries with what they lack for gfx942."""
    needs(can_compile(), "clang-19 and rocm-device-libs")
    return device_libraries(tmp_path_factory.mktemp("device-libraries"))


@pytest.fixture(scope="module")
def assembly(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What clang makes of each source for gfx942."""
    folder = tmp_path_factory.mktemp("gfx942")
    return {name: compiled(name, libraries, folder / f"{name}.s", "-S") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_gfx942(name: str, assembly: dict[str, Path]) -> None:
    kernels = kernels_of(assembly[name].read_text())
    assert sorted(kernel.name for kernel in kernels) == declared(name)
    for kernel in kernels:
        assert kernel.lds_bytes <= GFX942.lds_bytes
        assert kernel.scratch_bytes == kernel.spills == 0
        assert kernel.registers <= 64, "eight waves on a SIMD"
        assert kernel.occupancy == 8
        assert kernel.argument_bytes <= 4096
        assert not re.search(r"\b(flat|scratch|buffer)_(load|store)", kernel.code), "all is global memory"
        if STREAMING.match(kernel.name):
            assert kernel.wide_loads
            assert kernel.wide_stores
    recorded = json.loads((RESULTS / "code_objects.json").read_text())["hip"].get(name)
    assert [of_hip(kernel) for kernel in kernels] == recorded, (
        "run `python -m benchmarks code_objects`, `make docs`"
    )
    for kernel in kernels:
        if kernel.name.startswith(("muon_momentum", "muon_update")):  # others divide, which takes them
            assert not re.search(r"\bv_(pk_)?(fma|fmac|mac|mad)_f32", kernel.code)


def declared(name: str) -> list[str]:
    return sorted(re.findall(r"^HOST_ENTRY\((\w+)\)$", (SOURCES / f"{name}.hip").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_gfx942_links(name: str, assembly: dict[str, Path], tmp_path: Path) -> None:
    linked = tmp_path / "kernel.co"
    run("clang++-19", "--target=amdgcn-amd-amdhsa", "-mcpu=gfx942", "-nogpulib", assembly[name], "-o", linked)
    code = linked.read_bytes()
    assert code.startswith(b"\x7fELF")
    assert int.from_bytes(code[18:20], "little") == 224, "of AMD's GPUs"


@pytest.mark.parametrize("name", NAMES)
def test_sm_90(name: str, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = tmp_path / "kernel.hip"
    source.write_text(source_of(name))
    nvcc = ("nvcc", "-arch=sm_90", *CUDA_FLAGS, "-x", "cu", source, "-o")
    ptx = tmp_path / "kernel.ptx"
    run(*nvcc, ptx, "-ptx")
    assert not re.search(r"\bfma\.rn\.f32", ptx.read_text()), "nothing is contracted"
    printed = run(*nvcc, tmp_path / "kernel.cubin", "-cubin", "-Xptxas", "-v")
    kernels = len(declared(name))
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    assert spills == [("0", "0", "0")] * kernels
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", printed)]
    assert len(registers) == kernels
    assert max(registers) <= 64


@pytest.mark.parametrize("name", ["hipRTC", "NVRTC"])
def test_runtime_compilers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, a driver or a header."""
    if name == "hipRTC":  # before ROCm 6 it was a part of HIP itself
        debians = DEVICE_LIBRARIES.parents[1].glob("libamdhip64.so*")
        paths = [*Path("/opt/rocm/lib").glob("libhiprtc.so*"), *debians]
        monkeypatch.setattr(rtc, "library_files", lambda stem: (str(path) for path in paths))
    monkeypatch.setattr(rtc, "open_library", rtc.open_library.__wrapped__)
    try:
        library = rtc.open_library(name)
    except rtc.RtcError as error:
        pytest.skip(str(error))
    arch = "--offload-arch=gfx90a" if name == "hipRTC" else "--gpu-architecture=sm_90"
    assert re.match(r"(hiprtc|nvrtc) \d+\.\d+ /", library.version())
    for source in NAMES:
        assert library.compile(source_of(source), (arch, *RTC_FLAGS[name])).startswith(b"\x7fELF")
    with pytest.raises(rtc.RtcError, match=r"cannot compile the kernel: .*error: "):
        library.compile("int x = undeclared;", (arch,))
