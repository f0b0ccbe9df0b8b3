"""HIP sources compiled for gfx942 by clang 19 with Debian's device libraries, without ROCm.

The libraries are older than the MI300X: the one file of them that names the architecture is added.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from zslurm.kernels.hip.build import source_of
from zslurm.kernels.hip.compilers import HIP_FLAGS

DEVICE_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")

_ISA_VERSION = """target triple = "amdgcn-amd-amdhsa"
@__oclc_ISA_version = linkonce_odr hidden local_unnamed_addr addrspace(4) constant i32 9402, align 4
"""


def can_compile() -> bool:
    """Whether the compiler and its libraries are here."""
    return shutil.which("clang++-19") is not None and DEVICE_LIBRARIES.is_dir()


def run(*command: str | Path) -> str:
    """What a command prints; it must end well."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def device_libraries(folder: Path) -> Path:
    """Fill a folder with the device libraries and what they lack for gfx942."""
    for library in DEVICE_LIBRARIES.glob("*.bc"):
        (folder / library.name).symlink_to(library)
    text = folder / "isa.ll"
    text.write_text(_ISA_VERSION)
    target = ("-nogpulib", "--target=amdgcn-amd-amdhsa", "-x", "ir", "-c", "-emit-llvm")
    run("clang++-19", *target, text, "-o", folder / "oclc_isa_version_942.bc")
    return folder


def compiled(name: str, libraries: Path, out: Path, *more: str) -> Path:
    """Compile kernels/hip/NAME.hip into a file: a code object, or with -S assembly."""
    source = out.with_suffix(".hip")
    source.write_text(source_of(name))
    device = ("--offload-arch=gfx942", "--offload-device-only", "--no-gpu-bundle-output")
    paths = ("--rocm-path=/usr", f"--rocm-device-lib-path={libraries}")
    run("clang++-19", "-x", "hip", *device, *paths, *HIP_FLAGS, "-Wall", "-Werror", *more, source, "-o", out)
    return out
