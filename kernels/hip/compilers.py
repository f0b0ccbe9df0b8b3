"""Find the compilers that build a HIP source for an architecture, in the order in which they are tried.

For AMD's GPUs: hipRTC, which comes with torch, then hipcc. For NVIDIA's: NVRTC, then nvcc. For the CPU: $CXX, or
the first of c++, g++ and clang++. None of them may contract a * b + c, and square roots and divisions are rounded
correctly: the same bits come out of all of them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zslurm.kernels.dispatch import UnavailableError
from zslurm.kernels.hip import rtc

TIMEOUT_S = 600
"""Seconds until a compiler that does not end is taken for broken."""

HIP_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off")
CUDA_FLAGS = ("-O3", "-std=c++17", "-fmad=false")
HOST_FLAGS = ("-O2", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas")
# NVRTC has no optimisation levels.
RTC_FLAGS = {"hipRTC": HIP_FLAGS, "NVRTC": ("-std=c++17", "-fmad=false")}


class BuildError(UnavailableError):
    """A compiler is missing, fails or makes nothing."""


@dataclass(frozen=True)
class Compiler:
    """One way to build for one architecture.

    Attributes:
        name: as messages name it.
        version: what it states about itself, and the flags: another text, another build.
        compile: turns a source into the bytes of a code object or shared library.

    `compile` raises `BuildError`.
    """

    name: str
    version: str
    compile: Callable[[str], bytes]


def compilers_for(arch: str) -> list[Callable[[], Compiler]]:
    """Return how to reach each compiler for an architecture, the preferred one first.

    Each raises `BuildError` if its compiler is missing or does not even state its version.
    """
    if arch.startswith("gfx"):
        return [lambda: _in_library("hipRTC", arch), lambda: _command("hipcc", _hipcc_flags(arch))]
    if arch.startswith("sm_"):
        return [lambda: _in_library("NVRTC", arch), lambda: _command("nvcc", _nvcc_flags(arch))]
    return [_host]


def _hipcc_flags(arch: str) -> tuple[str, ...]:
    return ("--genco", f"--offload-arch={arch}", *HIP_FLAGS, "-x", "hip")


def _nvcc_flags(arch: str) -> tuple[str, ...]:
    return ("-cubin", f"-arch={arch}", *CUDA_FLAGS, "-x", "cu")


def _host() -> Compiler:
    configured = os.environ.get("CXX", "")
    names = [configured] if configured else ["c++", "g++", "clang++"]
    compiler = next((name for name in names if shutil.which(shlex.split(name)[0])), names[0])
    return _command(compiler, (*HOST_FLAGS, "-x", "c++"))


def _in_library(name: str, arch: str) -> Compiler:
    try:
        library = rtc.open_library(name)
        version = library.version()
    except rtc.RtcError as error:
        raise BuildError(f"{name}: {error}") from error
    flags = (f"--offload-arch={arch}" if name == "hipRTC" else f"--gpu-architecture={arch}", *RTC_FLAGS[name])

    def build(source: str) -> bytes:
        try:
            return library.compile(source, flags)
        except rtc.RtcError as error:
            raise BuildError(f"{name} {error}") from error

    return Compiler(name, f"{version} {' '.join(flags)}", build)


def _command(command: str, flags: tuple[str, ...]) -> Compiler:
    program = shlex.split(command)
    if shutil.which(program[0]) is None:
        raise BuildError(f"no {program[0]} in PATH")
    version = _run([*program, "--version"], command)

    def build(source: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="zslurm-kernel-") as folder:
            file, made = Path(folder, "kernel.hip"), Path(folder, "kernel.out")
            file.write_text(source)
            _run([*program, *flags, str(file), "-o", str(made)], command)
            if not made.is_file() or not made.stat().st_size:
                raise BuildError(f"{command} ended well but wrote nothing")
            return made.read_bytes()

    return Compiler(command, f"{version} {' '.join(flags)}", build)


def _run(arguments: list[str], name: str) -> str:
    """Run a compiler and return what it printed."""
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{name} did not end within {TIMEOUT_S} s") from error
    except OSError as error:
        raise BuildError(f"{name} cannot run: {error.strerror}") from error
    if done.returncode:
        printed = (done.stderr.strip() or done.stdout.strip()).splitlines()
        cause = next((line for line in printed if "error" in line), printed[0] if printed else "no message")
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        raise BuildError(f"{name} ended with {how}: {cause.strip()}")
    return done.stdout.strip()
