"""Read what LLVM notes of each kernel in the assembly that it writes for AMD's GPUs.

The same for every compiler that has LLVM inside: Triton's backend, hipcc and clang. Resources are those of the
metadata at the end of the file; instructions are counted in each kernel's code, behind which the compiler states
how many waves a SIMD can hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LANES = 64
_LABEL = re.compile(r"^(\.LBB\w+):", re.MULTILINE)
_MATRIX_SHAPE = re.compile(r"\bv_s?mfma\w*?_(\d+)x(\d+)x(\d+)")
_LDS_READ = re.compile(r"\bds_read(2?)(?:st64)?_[bui](\d+)")


@dataclass(frozen=True)
class MatrixLoop:
    """The loop of a kernel that has most matrix instructions.

    Attributes:
        flops: of a wave in one turn: 2 m n k of each matrix instruction.
        lds_bytes: that a wave reads from LDS in one turn.
        narrow_reads: instructions that read 2 bytes or less of a lane from LDS.
    """

    flops: int
    lds_bytes: int
    narrow_reads: int


@dataclass(frozen=True)
class AmdKernel:
    """One kernel.

    Attributes:
        name: of the function.
        lds_bytes: LDS of a workgroup that is fixed when it is compiled; what a launch adds is not in it.
        registers: vector registers of a lane, with its accumulation registers (gfx90a and later count them so).
        spills: vector and scalar registers that are spilled.
        scratch_bytes: private memory of a lane.
        argument_bytes: of all arguments.
        threads: the most that a workgroup may have.
        occupancy: waves that a SIMD can hold at once, by registers and fixed LDS.
        code: its instructions.
    """

    name: str
    lds_bytes: int
    registers: int
    spills: int
    scratch_bytes: int
    argument_bytes: int
    threads: int
    occupancy: int
    code: str

    @property
    def wide_loads(self) -> int:
        """Return how many instructions load 16 bytes of a lane from global memory."""
        return len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", self.code))

    @property
    def wide_stores(self) -> int:
        """Return how many instructions store 16 bytes of a lane to global memory."""
        return len(re.findall(r"\b(?:global|buffer)_store_dwordx4\b", self.code))

    @property
    def matrix_instructions(self) -> int:
        """Return how many matrix instructions there are."""
        return len(re.findall(r"\bv_s?mfma", self.code))


def matrix_loop(code: str) -> MatrixLoop | None:
    """Return the loop with most matrix instructions, of blocks that branch to themselves; None: there is none."""
    starts = [*_LABEL.finditer(code)]
    ends = [match.start() for match in starts[1:]] + [len(code)]
    loops = []
    for match, end in zip(starts, ends, strict=False):
        block = code[match.end() : end]
        shapes = _MATRIX_SHAPE.findall(block)
        if shapes and re.search(rf"\bs_c?branch\w*\s+{re.escape(match[1])}\b", block):
            reads = [(2 if double else 1) * int(bits) // 8 for double, bits in _LDS_READ.findall(block)]
            flops = sum(2 * int(m) * int(n) * int(k) for m, n, k in shapes)
            narrow = sum(size <= 2 for size in reads)
            loops.append((len(shapes), MatrixLoop(flops, _LANES * sum(reads), narrow)))
    return max(loops, key=lambda loop: loop[0])[1] if loops else None


def kernels_of(assembly: str) -> list[AmdKernel]:
    """Return the kernels of an assembly file, in the metadata's order.

    Raises:
        ValueError: the text is no assembly with metadata of kernels, or lacks a kernel's code.
    """
    _, separator, metadata = assembly.partition("\namdhsa.kernels:")
    if not separator:
        raise ValueError("the assembly has no metadata of kernels")
    entries = metadata.split("\namdhsa.")[0].split("\n  - ")[1:]
    return [_kernel(entry, assembly) for entry in entries]


def _kernel(entry: str, assembly: str) -> AmdKernel:
    # Those of the kernel itself: its arguments' are further to the right.
    noted = dict(re.findall(r"^(?:    )?\.(\w+):\s+(\S+)$", entry, re.MULTILINE))
    name = noted.get("name", "")
    _, separator, behind = assembly.partition(f"\n{name}:")
    if not name or not separator:
        raise ValueError(f"the assembly has no code of a kernel {name or 'without a name'}")
    code, _, behind = behind.partition("\n.Lfunc_end")
    occupancy = re.search(r"^; Occupancy: (\d+)", behind, re.MULTILINE)

    def number(key: str) -> int:
        return int(noted.get(key, 0))

    return AmdKernel(
        name=name,
        lds_bytes=number("group_segment_fixed_size"),
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count") + number("sgpr_spill_count"),
        scratch_bytes=number("private_segment_fixed_size"),
        argument_bytes=number("kernarg_segment_size"),
        threads=number("max_flat_workgroup_size"),
        occupancy=int(occupancy[1]) if occupancy else 0,
        code=code,
    )
