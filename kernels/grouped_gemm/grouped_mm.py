"""Multiply groups of rows by torch's `grouped_mm`, which takes the groups' ends from the device.

It asks for strides that are multiples of 16 bytes and knows few formats. It reads the ends on the GPU on NVIDIA's
sm_90, sm_100 and sm_103. On other GPUs it copies them to the host and makes one product per group, and is not
taken. On GPUs of AMD, torch 2.9 to 2.13 does so as well, unless ROCM_ALLOW_GROUP_GEMM_CK=1 is in the environment,
torch was built with Composable Kernel (which it does not report) and the GPU is a gfx90a, gfx942 or gfx950
(pytorch and ROCm/pytorch, aten/src/ATen/native/cuda/GroupedBlas.cpp). It is taken with that variable only.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.kernels.arch import arch_of
from zslurm.kernels.grouped_gemm.reference import Groups, rows_per_group

_ALIGNMENT = 16  # bytes; of every stride of grouped_mm's operands
SWITCH = "ROCM_ALLOW_GROUP_GEMM_CK"
"""The variable that lets torch use Composable Kernel on AMD's GPUs."""
_WITH_SWITCH = ("gfx90a", "gfx942", "gfx950")
_WITHOUT_WAIT = ("cpu", "sm_90", "sm_100", "sm_103")


def multiply(x_NI: Tensor, weight_EIO: Tensor, groups: Groups) -> Tensor:
    """Multiply the rows of group e by matrix e; returns [N, O]."""
    return F.grouped_mm(x_NI, weight_EIO, offs=groups.ends_E)


def weight_gradient(left_NI: Tensor, right_NO: Tensor, groups: Groups) -> Tensor:
    """Multiply left transposed by right, over the rows of each group; returns [E, I, O]."""
    gradient_EIO = F.grouped_mm(left_NI.T, right_NO, offs=groups.ends_E)
    if arch_of(left_NI.device).name in ("cpu", "sm_90"):
        return gradient_EIO
    # Elsewhere torch may leave a group without rows as memory had it (pytorch/pytorch#172439, #174314).
    return gradient_EIO.masked_fill_((rows_per_group(groups.ends_E) == 0).view(-1, 1, 1), 0)


def lacks(left: Tensor, right: Tensor, groups: Groups) -> str | None:
    """Return which operands torch does not take, as a phrase, or None."""
    if not hasattr(F, "grouped_mm"):
        return "anything before torch 2.10"
    formats = (torch.float32, torch.bfloat16) if left.device.type == "cpu" else (torch.bfloat16,)
    if left.dtype not in formats:
        return f"{str(left.dtype).removeprefix('torch.')} operands"
    if any(size * left.dtype.itemsize % _ALIGNMENT for size in (left.shape[-1], right.shape[-1])):
        return "rows that are no multiple of 16 bytes"
    arch = arch_of(left.device).name
    if arch in _WITH_SWITCH and os.environ.get(SWITCH) != "1":
        return f"operands on AMD's GPUs without {SWITCH}=1, where it waits for the host"
    if arch not in _WITH_SWITCH + _WITHOUT_WAIT:
        return f"operands on {arch}, where it waits for the host"
    return None
