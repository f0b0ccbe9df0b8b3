"""State which versions of other packages are installed, without importing them."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import metadata

import torch
from torch import Tensor

from zslurm.kernels.arch import arch_of
from zslurm.kernels.checks import short

_FORMATS = (torch.bfloat16, torch.float16)


@cache
def lacks_package(distribution: str, least: str) -> str | None:
    """Return that a package is missing or older than a version, as a phrase behind "does not take", or None."""
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"operands without the package {distribution}, which is not installed"
    if _numbers(installed) < _numbers(least):
        return f"operands with {distribution} {installed}: it needs {least} or newer"
    return None


def lacks_operands(left: Tensor, right: Tensor, known: tuple[str, ...]) -> str | None:
    """Return what of two operands kernels for 16-bit formats on these architectures do not take, or None."""
    arch = arch_of(left.device).name
    if arch not in known:
        return f"operands on {arch}, only on {', '.join(known)}"
    return None if left.dtype in _FORMATS else f"{short(left.dtype)} operands"


def row_major(x: Tensor) -> Tensor:
    """Return x with exactly the strides of a new tensor of its shape: packages compare them as numbers.

    `contiguous` leaves the strides of dimensions of size 1 as they are.
    """
    new = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return x if x.stride() == new.stride() else torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def current_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of a tensor the current one, on which kernels in Triton are launched."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def rows_per_group(ends_E: Tensor) -> Tensor:
    """Return how many rows each group has, on the device of the ends and in their format."""
    return ends_E.diff(prepend=ends_E.new_zeros(1))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 1, 16) of 0.1.16.post1."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()
