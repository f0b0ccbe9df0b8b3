"""Registers, LDS and occupancy of every kernel for gfx942, as the compilers make them: no GPU is needed.

Kernels in Triton by Triton's own backend, HIP sources by clang 19 with Debian's device libraries. tests/kernels
compares what it compiles with this result, which docs/kernels.md shows.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tests.kernels.hip.gfx942 import compiled, device_libraries
from zslurm.kernels.amd_assembly import AmdKernel, kernels_of
from zslurm.kernels.arch import GFX942
from zslurm.kernels.code_object import CodeObject, compile_launch, implementation_files, launches_of
from zslurm.kernels.hip.build import SOURCES


def of_triton(name: str, code: CodeObject) -> dict[str, Any]:
    """The row of one launch of a kernel in Triton."""
    return {
        "operands": name,
        "kernel": code.kernel,
        "waves": code.warps,
        "registers": code.registers,
        "lds_bytes": code.lds_bytes,
        "occupancy": code.occupancy,
        "spills": code.spills,
        "wide_accesses": code.wide_accesses,
        "matrix_instructions": code.matrix_instructions,
        "flops_per_lds_byte": code.flops_per_lds_byte,
    }


def of_hip(kernel: AmdKernel) -> dict[str, Any]:
    """The row of one kernel in HIP."""
    return {
        "operands": "",
        "kernel": kernel.name,
        "waves": 4,  # LANES of portability.h over the wave size
        "registers": kernel.registers,
        "lds_bytes": kernel.lds_bytes,
        "occupancy": kernel.occupancy,
        "spills": kernel.spills,
        "wide_accesses": kernel.wide_loads + kernel.wide_stores,
        "matrix_instructions": kernel.matrix_instructions,
    }


def run() -> None:
    """Compile everything and write results/code_objects.json."""
    triton = {
        folder: [
            of_triton(launch.name, code)
            for launch in launches_of(folder, GFX942)
            for code in compile_launch(launch, GFX942)
        ]
        for folder in implementation_files()
    }
    hip = {}
    with tempfile.TemporaryDirectory() as folder:
        libraries = device_libraries(Path(folder))
        for source in sorted(file.stem for file in SOURCES.glob("*.hip")):
            assembly = compiled(source, libraries, libraries / f"{source}.s", "-S").read_text()
            hip[source] = [of_hip(kernel) for kernel in kernels_of(assembly)]
    write_result(
        "code_objects",
        {"architecture": GFX942.name, "triton_version": version("triton"), "triton": triton, "hip": hip},
    )
