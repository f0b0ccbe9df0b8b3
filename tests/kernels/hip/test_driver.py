"""What the driver's functions are called with: a shared library in the driver's place writes it down.

The library has HIP's and CUDA's functions with their real signatures, so a wrong order, width or level of
indirection gives another record, or ends the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from ctypes import c_float, c_uint, c_uint64
from pathlib import Path
from subprocess import run
from types import SimpleNamespace

import pytest
import torch

from zslurm.kernels.arch import GFX942
from zslurm.kernels.hip import driver, rtc
from zslurm.kernels.hip.compilers import BuildError
from zslurm.kernels.hip.driver import LANES, Driver, LaunchError, Module

SOURCE = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>

static char record[4096];
static int module_value, function_value;
enum { OK = 0, INVALID = 1, NOT_FOUND = 500 };

static void note(const char* text) { strncat(record, text, sizeof record - strlen(record) - 1); }

static int load(void** module, const void* image) {
    if (memcmp(image, "\x7f" "ELF", 4)) return INVALID;
    *module = &module_value;
    return OK;
}

static int find(void** function, void* module, const char* name) {
    if (module != &module_value || strcmp(name, "scale")) return NOT_FOUND;
    *function = &function_value;
    return OK;
}

// The kernel's parameters are (Pair, float, uint64): each is behind its own address.
struct Pair { uint64_t address; uint32_t elements; };

static int launch(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void* stream, void** parameters, void** extra) {
    if (function != &function_value || extra) return INVALID;
    if (gx == 0) return INVALID;
    Pair pair;
    float factor;
    uint64_t wide;
    memcpy(&pair, parameters[0], sizeof pair);
    memcpy(&factor, parameters[1], sizeof factor);
    memcpy(&wide, parameters[2], sizeof wide);
    char line[256];
    snprintf(line, sizeof line, "%u,%u,%u x %u,%u,%u shared %u stream %llx: %llx %u %g %llx\n", gx, gy, gz,
             bx, by, bz, shared, (unsigned long long)(uintptr_t)stream, (unsigned long long)pair.address,
             pair.elements, factor, (unsigned long long)wide);
    note(line);
    return OK;
}

static const char* text_of(int status) {
    return status == INVALID ? "invalid argument" : status == NOT_FOUND ? "named symbol not found" : nullptr;
}

extern "C" {
const char* stand_in_record() { return record; }
void stand_in_clear() { record[0] = 0; }

int hipModuleLoadData(void** module, const void* image) { return load(module, image); }
int hipModuleGetFunction(void** function, void* module, const char* name) { return find(function, module, name); }
int hipModuleLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** parameters, void** extra) {
    return launch(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}
const char* hipGetErrorString(int status) {
    const char* text = text_of(status);
    return text ? text : "unknown error";
}

int cuModuleLoadData(void** module, const void* image) { return load(module, image); }
int cuModuleGetFunction(void** function, void* module, const char* name) { return find(function, module, name); }
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
    return launch(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}
int cuGetErrorString(int status, const char** text) {
    *text = text_of(status);
    return *text ? OK : INVALID;
}
}
"""
STREAM = 0x7F00_1234_5678
CODE = b"\x7fELF and a zero \0 in it"
DEVICE = torch.device("cuda", 1)


class Pair(ctypes.Structure):
    _fields_ = (("address", c_uint64), ("elements", c_uint))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(SOURCE)
    made = folder / "libamdhip64.so"
    run(["g++", "-shared", "-fPIC", "-o", made, folder / "driver.cpp"], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture(params=["HIP", "CUDA"])
def opened(
    request: pytest.FixtureRequest, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Driver, Callable[[], list[str]]]]:
    """A driver over the library, and what reads its record; torch's stream and device are the test's."""
    # A separate handle: types that are set on one must not reach the next.
    fresh = ctypes.CDLL(library._name)
    monkeypatch.setattr(driver, "open_library", lambda *names: fresh)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    library.stand_in_record.restype = ctypes.c_char_p
    library.stand_in_clear()
    chosen = driver.hip_driver() if request.param == "HIP" else driver.cuda_driver()
    yield chosen, lambda: library.stand_in_record().decode().splitlines()


def loaded(chosen: Driver) -> Module:
    handle = ctypes.c_void_p()
    assert chosen.load(ctypes.byref(handle), CODE) == 0
    return Module(chosen, handle, DEVICE)


def test_a_launch_has_its_blocks_stream_and_arguments(opened: tuple[Driver, Callable[[], list[str]]]) -> None:
    chosen, record = opened
    module = loaded(chosen)
    address = 0xFFFF_8000_DEAD_BEE0  # its upper half is lost where something takes 32 bits
    module.launch("scale", 2**23, (Pair(address, 2**32 - 1), c_float(0.1), c_uint64(2**64 - 2)))
    module.launch("scale", 3, (Pair(16, 0), c_float(-2.5), c_uint64(0)))
    assert record() == [
        f"{2**23},1,1 x {LANES},1,1 shared 0 stream {STREAM:x}: {address:x} {2**32 - 1} 0.1 {2**64 - 2:x}",
        f"3,1,1 x {LANES},1,1 shared 0 stream {STREAM:x}: 10 0 -2.5 0",
    ]


def test_what_the_driver_refuses_is_named(opened: tuple[Driver, Callable[[], list[str]]]) -> None:
    chosen, record = opened
    module = loaded(chosen)
    with pytest.raises(LaunchError, match=r"no kernel shrink \(named symbol not found\)"):
        module.launch("shrink", 1, ())
    with pytest.raises(LaunchError, match="scale did not start: invalid argument"):
        module.launch("scale", 0, (Pair(0, 0), c_float(0), c_uint64(0)))
    assert record() == []
    assert chosen.describe(12345) in ("unknown error", "status 12345")


def test_kernels_are_built_and_loaded_once(
    opened: tuple[Driver, Callable[[], list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, record = opened
    built: list[tuple[str, str]] = []
    codes = {"good": CODE, "bad": b"no code object"}

    def build(source: str, arch: str) -> Path:
        built.append((source, arch))
        return tmp_path / source

    monkeypatch.setattr(driver, "arch_of", lambda device: GFX942)
    monkeypatch.setattr(driver, "build", build)
    monkeypatch.setattr(driver, "code_of", lambda file: codes[file.name])
    monkeypatch.setattr(driver, "driver_here", lambda: chosen)
    driver.kernels.cache_clear()
    try:
        first = driver.kernels("good", DEVICE)
        assert driver.kernels("good", DEVICE) is first
        first.launch("scale", 1, (Pair(1, 1), c_float(1), c_uint64(1)))
        assert len(record()) == 1
        with pytest.raises(BuildError, match=r"the driver does not load .*bad: invalid argument"):
            driver.kernels("bad", DEVICE)
        assert built == [("good", "gfx942"), ("bad", "gfx942")]
    finally:
        driver.kernels.cache_clear()


def test_a_machine_without_the_driver_is_a_failed_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "open_library", lambda *names: original("libno-such-driver.so.1"))
    with pytest.raises(BuildError, match="the GPU's driver cannot be loaded: libno-such-driver"):
        driver.cuda_driver()


original = driver.open_library


MAPS = """\
5581c3e6d000-5581c3e6e000 r--p 00000000 fe:01 1048602                    /usr/bin/python3.11
7f10a0000000-7f10a0200000 r-xp 00000000 fe:01 2101  /opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401
7f10a0200000-7f10a0300000 rw-p 00200000 fe:01 2101  /opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401
7f10b0000000-7f10b0200000 r-xp 00000000 fe:01 2102  /venv/site packages/torch/lib/libamdhip64.so
7f10b1000000-7f10b1200000 r-xp 00000000 fe:01 2103  /venv/site packages/torch/lib/libamdhip64.so.6 (deleted)
7f10b2000000-7f10b2200000 r-xp 00000000 fe:01 2104  /venv/site packages/_rocm_sdk_core/lib/libamdhip64.so.7
7f10b3000000-7f10b3200000 r-xp 00000000 fe:01 2105  /venv/site packages/torch/lib/libhiprtc.so
7f10c0000000-7f10c0001000 rw-p 00000000 00:00 0
7ffd5a2b0000-7ffd5a2d1000 rw-p 00000000 00:00 0                          [stack]
"""


def test_of_several_hip_libraries_torchs_own_is_taken() -> None:
    """A package next to torch may load the system's, whose streams and modules torch's does not know."""
    own, beside, system = (
        "/venv/site packages/torch/lib/libamdhip64.so",
        "/venv/site packages/_rocm_sdk_core/lib/libamdhip64.so.7",
        "/opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401",
    )
    folder = Path("/venv/site packages/torch")
    assert rtc.mapped(MAPS, "libamdhip64.so", folder) == [own, beside, system]
    without = "".join(line for line in MAPS.splitlines(keepends=True) if "torch" not in line)
    assert rtc.mapped(without, "libamdhip64.so", folder) == [beside, system]
    assert rtc.mapped(MAPS, "libamdhip64.so", Path("/elsewhere/torch"))[0] == system
    assert rtc.mapped(MAPS, "libnvrtc.so", folder) == []


def test_what_this_process_has_loaded_is_found() -> None:
    (found,) = rtc.loaded("libtorch_cpu.so")
    assert Path(found).is_relative_to(Path(torch.__file__).parent)
