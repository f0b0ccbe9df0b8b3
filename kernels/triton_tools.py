"""What the kernels in Triton share. Imports triton: for files of implementations, which are imported when used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from torch import Tensor

from zslurm.kernels.arch import Arch

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on a CPU: set TRITON_INTERPRET=1 before triton is imported.

The interpreter multiplies bf16 as if it were integers: kernels convert the operands of `tl.dot` to fp32 there.
"""


@contextmanager
def launching_on(tensor: Tensor) -> Iterator[None]:
    """Launch kernels on the GPU that a tensor is on: Triton launches on the current one."""
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):
            yield
    else:
        yield


def dies(arch: Arch) -> int:
    """Return among how many dies, each with a separate cache, the hardware deals out workgroups in turn."""
    return 8 if arch.name == "gfx942" else 1


def compiler_options(arch: Arch) -> dict[str, object]:
    """Return options of every launch: those whose default differs between versions of Triton."""
    return {"enable_fp_fusion": True} if arch.is_amd or arch.is_nvidia else {}
