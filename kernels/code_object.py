"""Compile the kernels in Triton for a GPU that this machine lacks, and read what the compiler made of them.

The launching code of an implementation runs as it is, on tensors of the device `meta`, with a driver that compiles
for the architecture asked for and launches nothing. So what is compiled is what would run there: the same
specialisations, configurations and options, and launches that would be refused for their resources are refused.

What is read from the code object, and the limits that `violations` holds it to:

    LDS (shared memory)     at most what one workgroup may have: 64 KiB on gfx942
    spills                  none, neither of vector nor of scalar registers, and no scratch memory
    accesses                operands move 16 bytes at a time somewhere, if they lie together in memory
    matrix instructions in each product: MFMA of AMD, MMA of NVIDIA
    reads of LDS            in a loop with matrix instructions none of 2 bytes (AMD)

Triton brings everything this takes: AMD's backend with an assembler, and NVIDIA's ptxas, cuobjdump and nvdisasm.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.kernels.amd_assembly import kernels_of, matrix_loop
from zslurm.kernels.arch import Arch, meta_tensors_on


@dataclass(frozen=True)
class KernelLaunch:
    """One launch to compile, described by the file of an implementation.

    Attributes:
        name: of the kind of operands: format, layout, sizes.
        run: calls the implementation with operands on the device `meta`.
        product: whether matrix instructions are expected.
        wide: whether accesses of 16 bytes are expected.
        without_products: kernels of the launch that multiply no matrices.
        narrow: whether reads of 2 bytes from LDS among matrix instructions are accepted: for shapes of no recipe.
    """

    name: str
    run: Callable[[], object]
    product: bool = True
    wide: bool = True
    narrow: bool = False
    without_products: tuple[str, ...] = ()


@dataclass(frozen=True)
class CodeObject:
    """What the compiler made of one launch.

    Attributes:
        kernel: name of the function.
        warps: waves (warps) of a workgroup.
        stages: of the software pipeline.
        lds_bytes: LDS (shared memory) of a workgroup, bytes.
        registers: vector registers of a lane; on AMD with its accumulation registers.
        spills: registers that are spilled; on NVIDIA bytes of local memory.
        scratch_bytes: private memory of a lane, bytes.
        occupancy: waves (warps) that a SIMD (a quarter of a multiprocessor) can hold at once.
        wide_accesses: instructions that move 16 bytes between global memory and registers.
        matrix_instructions: MFMA or MMA instructions.
        narrow_lds_reads: reads of at most 2 bytes a lane in the loop with most matrix instructions; AMD only.
        flops_per_lds_byte: of a wave in that loop; None without such a loop, and on NVIDIA.
    """

    kernel: str
    warps: int
    stages: int
    lds_bytes: int
    registers: int
    spills: int
    scratch_bytes: int
    occupancy: int
    wide_accesses: int
    matrix_instructions: int
    narrow_lds_reads: int = 0
    flops_per_lds_byte: float | None = None


def violations(code: CodeObject, launch: KernelLaunch, arch: Arch) -> list[str]:
    """Return what of a code object is against the rules of the module's text, as sentences."""
    problems = []
    if code.lds_bytes > arch.lds_bytes:
        problems.append(f"{code.lds_bytes} bytes of LDS exceed the {arch.lds_bytes} of {arch.name}")
    if code.spills:
        problems.append(f"{code.spills} registers are spilled")
    if code.scratch_bytes:
        problems.append(f"{code.scratch_bytes} bytes of scratch memory are used")
    if launch.wide and not code.wide_accesses:
        problems.append("nothing moves 16 bytes at a time")
    multiplies = launch.product and code.kernel not in launch.without_products
    if multiplies and not code.matrix_instructions:
        problems.append("a product without matrix instructions")
    if code.narrow_lds_reads and not launch.narrow:
        problems.append(f"{code.narrow_lds_reads} reads of 2 bytes from LDS among matrix instructions")
    return problems


def implementation_files() -> list[str]:
    """Return the folders of the operations that have an implementation in Triton."""
    folder = Path(__file__).parent
    return sorted(file.parent.name for file in folder.glob("*/triton.py"))


def launches_of(folder: str, arch: Arch) -> Iterator[KernelLaunch]:
    """Yield the launches that an operation's file in Triton describes for an architecture."""
    yield from importlib.import_module(f"zslurm.kernels.{folder}.triton").launches(arch)


def compile_launch(launch: KernelLaunch, arch: Arch) -> list[CodeObject]:
    """Compile what a launch runs, in the order of its kernels.

    Raises:
        triton.errors.TritonError: the compiler or its checks of resources refuse it.
    """
    with compiling_for(arch) as compiled:
        launch.run()
    return [read(files, arch) for files in compiled]


def read(files: Mapping[str, Path], arch: Arch) -> CodeObject:
    """Read the resources of a kernel from the files that Triton made of it, by their suffix."""
    metadata = json.loads(files[".json"].read_text())
    numbers = _amd(files[".amdgcn"].read_text()) if arch.is_amd else _nvidia(files[".cubin"], metadata, arch)
    return CodeObject(
        kernel=metadata["name"],
        warps=metadata["num_warps"],
        stages=metadata["num_stages"],
        lds_bytes=metadata["shared"],
        **numbers,
    )


def _amd(assembly: str) -> dict[str, Any]:
    (kernel,) = kernels_of(assembly)
    loop = matrix_loop(kernel.code)
    return {
        "registers": kernel.registers,
        "spills": kernel.spills,
        "scratch_bytes": kernel.scratch_bytes,
        "occupancy": kernel.occupancy,
        "wide_accesses": kernel.wide_loads + kernel.wide_stores,
        "matrix_instructions": kernel.matrix_instructions,
        "narrow_lds_reads": loop.narrow_reads if loop else 0,
        "flops_per_lds_byte": round(loop.flops / loop.lds_bytes, 1) if loop and loop.lds_bytes else None,
    }


_REGISTERS_OF_SM = 65536
_MOST_WARPS_OF_SM = 64


def _nvidia(cubin: Path, metadata: Mapping[str, int], arch: Arch) -> dict[str, int]:
    usage = _nvidia_tool("cuobjdump", "--dump-resource-usage", str(cubin))
    code = _nvidia_tool("nvdisasm", "--print-code", str(cubin))
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if match is None:
        raise ValueError(f"cuobjdump printed no resource usage, but: {usage.strip()[:200]}")
    registers, stack, local = map(int, match.groups())
    # Registers are dealt out to warps in steps of 256, shared memory to the workgroups of a multiprocessor.
    by_registers = _REGISTERS_OF_SM // (-(-registers * 32 // 256) * 256)
    by_memory = arch.lds_bytes // max(1, metadata["shared"]) * metadata["num_warps"]
    return {
        "registers": registers,
        "spills": local,
        "scratch_bytes": stack,
        "occupancy": min(by_registers, by_memory, _MOST_WARPS_OF_SM) // 4,
        "wide_accesses": len(re.findall(r"\b(?:LDG|STG|LDGSTS)\.E[.\w]*\.128\b", code)),
        "matrix_instructions": len(re.findall(r"\b(?:HMMA|HGMMA|DMMA)\b", code)),
    }


def _nvidia_tool(name: str, *arguments: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


# --- A driver that launches nothing ----------------------------------------------------------------------------


@contextmanager
def compiling_for(arch: Arch) -> Iterator[list[dict[str, Path]]]:
    """Let launches of Triton compile for an architecture; gives the files of each kernel, by their suffix."""
    import triton
    from triton.runtime import driver

    if triton.knobs.runtime.interpret:
        raise ValueError("kernels are not compiled while TRITON_INTERPRET is set: unset it")
    compiled: list[dict[str, Path]] = []

    def keep(module: None, function: None, name: str, files: Mapping[str, str], key: str) -> None:
        compiled.append({Path(file).suffix: Path(file) for file in files.values()})

    hooks, before = triton.knobs.runtime.kernel_load_end_hook, driver._active
    driver.set_active(_Driver(arch))
    hooks.add(keep)
    try:
        with meta_tensors_on(arch):
            yield compiled
    finally:
        hooks.remove(keep)
        driver._active = before


_drivers = itertools.count()


class _Driver:
    """As much of a driver of Triton as a launch calls."""

    def __init__(self, arch: Arch) -> None:
        self.arch = arch
        self.utils = self
        self.device = f"{arch.name}, compiled only, {next(_drivers)}"

    def get_current_device(self) -> str:
        return self.device  # the key of a kernel's cache in this process

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self.arch.is_amd:
            return GPUTarget("hip", self.arch.name, self.arch.wave_size)
        return GPUTarget("cuda", int(self.arch.name.removeprefix("sm_")), self.arch.wave_size)

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": self.arch.lds_bytes, "multiprocessor_count": self.arch.compute_units}

    def load_binary(self, name: str, binary: bytes, shared: int, device: str) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*_: object) -> None:
            pass

        return launch
