"""Check the operands of operations: every message names the operation, the operand and what is wrong with it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def one_device(operation: str, **operands: Tensor) -> None:
    """Raise ValueError unless all operands are on one device."""
    devices = {name: operand.device for name, operand in operands.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{operation}: all operands must be on one device, not {where}")


def one_dtype(operation: str, **operands: Tensor) -> None:
    """Raise ValueError unless all operands have one format."""
    dtypes = {name: operand.dtype for name, operand in operands.items()}
    if len(set(dtypes.values())) > 1:
        formats = ", ".join(f"{name} is {short(dtype)}" for name, dtype in dtypes.items())
        raise ValueError(f"{operation}: all operands must have one format, but {formats}")


def dtype_among(operation: str, dtypes: Collection[torch.dtype], **operands: Tensor) -> None:
    """Raise ValueError for an operand of another format than these."""
    for name, operand in operands.items():
        if operand.dtype not in dtypes:
            allowed = ", ".join(short(dtype) for dtype in dtypes)
            raise ValueError(f"{operation}: {name} is {short(operand.dtype)}, but must be one of {allowed}")


def shape(operation: str, name: str, operand: Tensor, wanted: tuple[int | None, ...], letters: str) -> None:
    """Raise ValueError unless an operand has this shape; None is any size.

    Args:
        operation: named in the message.
        name: of the operand.
        operand: what is checked.
        wanted: its sizes.
        letters: one for each size, as the suffixes of names have them.
    """
    actual = tuple(operand.shape)
    same_rank = len(actual) == len(wanted)
    if not same_rank or any(want is not None and want != size for size, want in zip(actual, wanted, strict=True)):
        sizes = ", ".join(
            letter if size is None else str(size) for letter, size in zip(letters, wanted, strict=True)
        )
        raise ValueError(f"{operation}: {name} has the shape {list(actual)}, but must have [{sizes}]")


def no_overlap(operation: str, written: str, out: Tensor, **operands: Tensor) -> None:
    """Raise ValueError if the memory of `out` overlaps that of an operand."""
    first, last = _span(out)
    for name, operand in operands.items():
        start, stop = _span(operand)
        if out.device == operand.device and start < last and first < stop:
            raise ValueError(f"{operation}: {written} shares memory with {name}: give a separate tensor")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of the one behind the last."""
    if not tensor.numel() or tensor.is_meta:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def lacks_near_elements(*operands: Tensor, tile: int = 128) -> str | None:
    """Return what kernels that count the offsets in a tile of so many rows in 32 bits do not take, or None."""
    strides = [abs(stride) for operand in operands for stride in operand.stride()[-2:]]
    return "rows that are too far apart in memory" if max(strides, default=0) * tile >= 2**31 else None


def short(dtype: torch.dtype) -> str:
    """Return torch's name of a format, without the package."""
    return str(dtype).removeprefix("torch.")
