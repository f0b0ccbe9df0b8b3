"""Compile every kernel for an architecture, whether or not this machine has such a GPU.

HIP sources go into the cache of builds, by source, compiler and architecture. Kernels in Triton are compiled from
the launches that each implementation describes, into Triton's own cache ($TRITON_CACHE_DIR or ~/.triton/cache),
which a run on that GPU reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zslurm.kernels.arch import CPU, Arch
from zslurm.kernels.cache import cache_directory
from zslurm.kernels.code_object import CodeObject, compile_launch, implementation_files, launches_of, violations
from zslurm.kernels.hip.build import SOURCES, build
from zslurm.kernels.hip.compilers import BuildError


@dataclass(frozen=True)
class Built:
    """One kernel's build.

    Attributes:
        kernel: the source in HIP, or the operation and the launch in Triton.
        language: hip or triton.
        file: in the cache of builds; None in Triton's.
        code: registers, LDS and so on, of kernels in Triton.
        problem: why there is no build, or what of it is against the limits; None if all is well.
    """

    kernel: str
    language: str
    file: Path | None = None
    code: CodeObject | None = None
    problem: str | None = None


def cache_problem() -> str | None:
    """Return why builds cannot be kept in the user's cache directory, or None."""
    directory = cache_directory()
    probe = directory / f".probe-{secrets.token_hex(4)}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"{directory} cannot be written ({error.strerror or error})"
    return None


def build_all(arch: Arch) -> Iterator[Built]:
    """Compile all kernels for an architecture, one after the other."""
    for source in sorted(file.stem for file in SOURCES.glob("*.hip")):
        try:
            yield Built(source, "hip", file=build(source, arch.name))
        except BuildError as error:
            yield Built(source, "hip", problem=str(error))
    if arch != CPU:
        yield from _in_triton(arch)


def _in_triton(arch: Arch) -> Iterator[Built]:
    for folder in implementation_files():
        try:
            launches = list(launches_of(folder, arch))
        except ImportError as error:
            yield Built(folder, "triton", problem=f"needs triton: {error}")
            continue
        for launch in launches:
            name = f"{folder}, {launch.name}"
            try:
                compiled = compile_launch(launch, arch)
            except Exception as error:  # of whatever kind: the compiler's own, and one kernel of many
                yield Built(name, "triton", problem=f"{type(error).__name__}: {error}".splitlines()[0])
                continue
            for code in compiled:
                problem = "; ".join(violations(code, launch, arch)) or None
                yield Built(f"{name}: {code.kernel}", "triton", code=code, problem=problem)
