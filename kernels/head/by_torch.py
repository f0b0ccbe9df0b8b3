"""Multiply 16-bit operands by torch's product with an fp32 result, on the GPUs whose torch has one.

torch has it for NVIDIA's GPUs from 2.8 on. For AMD's it has the argument as early, but refuses it when it is
called until 2.10 (pytorch/pytorch#161540 and #162600), as some builds of 2.9 do: so whether it works is tried.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from zslurm.kernels.arch import is_gpu

_log = logging.getLogger(__name__)


def product(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """Write left right, summed and stored in fp32."""
    torch.mm(left_MK, right_KN, out_dtype=torch.float32, out=out_MN)


def lacks(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> str | None:
    """Return what of these operands torch does not take, or None."""
    if not is_gpu(left_MK.device):
        return f"operands on {left_MK.device.type}"
    if left_MK.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(left_MK.dtype).removeprefix('torch.')} operands"
    return None if works_on(left_MK.device) else "operands on this GPU, which torch multiplies to 16 bits alone"


@cache
def works_on(device: torch.device) -> bool:
    """Return whether torch makes such products on a device; if not, log a warning, once."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        product(ones, ones, torch.empty(16, 16, device=device))
    except (RuntimeError, TypeError) as error:  # refused by the operator, or an argument that this torch lacks
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise  # not refused: the device has no memory left, or reports a fault
        cause = str(error).strip().splitlines()[0]
        _log.warning("head.product widens its operands to fp32 on %s, which is slow (%s)", device, cause)
        return False
    return True
