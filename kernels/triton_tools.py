"""What the kernels in Triton share. Imports triton: for files of implementations, which are imported when used.

Operands of a kernel that are many go in as a NamedTuple, and its constants as another one, which is a
`tl.constexpr`: a kernel reads `given.weight` and `SHAPE.ROWS`. So a list of operands exists once.
Up to Triton 3.6 such constants are plain numbers, which a function with its decorator does not take inside of a
tuple: neither does `tl.zeros`, so shapes go to `tl.full`, which is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import Arch, arch_of
from zslurm.kernels.prepared import note_build

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on a CPU: set TRITON_INTERPRET=1 before triton is imported."""

_WIDENED = tl.constexpr(INTERPRETED)


def _note_compilation(*, src: Any, cache_hit: bool, **_: object) -> None:
    if not cache_hit:
        note_build(src.name)


if triton.knobs.compilation.listener is None:
    triton.knobs.compilation.listener = _note_compilation


def launch(kernel: Any, programs: int | tuple[int, ...], tensor: Tensor, *operands: Any, **constants: Any) -> None:
    """Launch a kernel on the GPU of a tensor; Triton would launch on the current one.

    Args:
        kernel: a function with Triton's decorator.
        programs: workgroups, in up to three dimensions.
        tensor: one of the operands.
        operands: of the kernel.
        constants: of the kernel, and how it is compiled: num_warps, num_stages.
    """
    grid = programs if isinstance(programs, tuple) else (programs,)
    with _on_device_of(tensor):
        kernel[grid](*operands, **constants, **_compiler_options(arch_of(tensor.device)))


@contextmanager
def _on_device_of(tensor: Tensor) -> Iterator[None]:
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):
            yield
    else:
        yield


def dies(arch: Arch) -> int:
    """Return among how many dies, each with a separate cache, the hardware deals out workgroups in turn."""
    return 8 if arch.name == "gfx942" else 1


def _compiler_options(arch: Arch) -> dict[str, object]:
    """Return options of every launch: those whose default differs between versions of Triton."""
    return {"enable_fp_fusion": True} if arch.is_amd or arch.is_nvidia else {}


@triton.jit
def on_one_die(program, programs, DIES: tl.constexpr):
    """Return another place of a workgroup, so that neighbours are on one die and share its cache."""
    if DIES > 1:
        die = program % DIES
        program = die * (programs // DIES) + tl.minimum(die, programs % DIES) + program // DIES
    return program


@triton.jit
def dot(left, right, total):
    """Add a product of tiles to `total`, in fp32; the interpreter would multiply bf16 as if it were integers."""
    if _WIDENED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    if left.dtype == tl.float32:  # else TF32 on some
        total = tl.dot(left, right, total, input_precision="ieee")
    else:
        total = tl.dot(left, right, total)
    return total
