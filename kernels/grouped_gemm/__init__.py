"""Multiply groups of rows by one matrix per group, in one call or in a loop.

`torch.nn.functional.grouped_mm` takes the groups' ends from the device, so the host does not wait for them, but
asks for strides that are multiples of 16 bytes and knows few formats. The loop runs anywhere; it needs the
number of rows of every group on the host. Both multiply the same rows with the same matrices; empty groups are
fine, and rows behind the last group are left undefined.

Under `torch.compile` the loop is an operator of its own: the compiler need not know how long it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.kernels.matmul import ROW_MULTIPLE, kernel_per_shape, matmul, matmul_into

_ALIGNMENT = 16  # bytes; of every stride of grouped_mm's operands


class Groups(NamedTuple):
    """Groups of consecutive rows.

    Attributes:
        ends_E: where each group ends, int32, on the device.
        rows: how many rows each has, on the host; None if no one has asked the device.
        one_call: whether to use grouped_mm.
    """

    ends_E: Tensor
    rows: Sequence[int] | None
    one_call: bool


def grouped_mm_applies(dtype: torch.dtype, device: torch.device, widths: Sequence[int]) -> bool:
    """Return whether `grouped_mm` can multiply matrices of these widths in this format on this device."""
    # Its CPU kernel also takes fp32, which the compiler's description of the operator does not know.
    fp32_too = device.type == "cpu" and not torch.compiler.is_compiling()
    formats = (torch.float32, torch.bfloat16) if fp32_too else (torch.bfloat16,)
    aligned = all(width * dtype.itemsize % _ALIGNMENT == 0 for width in widths)
    return hasattr(F, "grouped_mm") and dtype in formats and aligned


def multiply(x_NI: Tensor, weight_EIO: Tensor, groups: Groups) -> Tensor:
    """Multiply the rows of group e by matrix e; returns [N, O]."""
    y_NO: Tensor
    if groups.one_call:
        y_NO = F.grouped_mm(x_NI, weight_EIO, offs=groups.ends_E)
    elif groups.rows is None:
        y_NO = _looped_multiply(x_NI, weight_EIO, groups.ends_E)
    else:
        y_NO = _multiply_in_loop(x_NI, weight_EIO, groups.rows)
    return y_NO


def weight_gradient(left_NI: Tensor, right_NO: Tensor, groups: Groups) -> Tensor:
    """Multiply left transposed by right, over the rows of each group; returns [E, I, O], zero for empty groups."""
    gradient_EIO: Tensor
    if groups.one_call:
        gradient_EIO = F.grouped_mm(left_NI.T, right_NO, offs=groups.ends_E)
    elif groups.rows is None:
        gradient_EIO = _looped_weight_gradient(left_NI, right_NO, groups.ends_E)
    else:
        gradient_EIO = _weight_gradient_in_loop(left_NI, right_NO, groups.rows)
    return gradient_EIO


def _multiply_in_loop(x_NI: Tensor, weight_EIO: Tensor, rows_E: Sequence[int]) -> Tensor:
    y_NO = x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[-1])
    for rows, weight_IO in zip(_slices(rows_E), weight_EIO.unbind(), strict=True):
        wide = _widened(rows, x_NI)
        if wide == rows:
            matmul_into(x_NI[rows], weight_IO, y_NO[rows])
        else:  # what the others' rows give with this group's matrix is left
            y_NO[rows] = matmul(x_NI[wide], weight_IO)[rows.start - wide.start : rows.stop - wide.start]
    return y_NO


def _weight_gradient_in_loop(left_NI: Tensor, right_NO: Tensor, rows_E: Sequence[int]) -> Tensor:
    gradient_EIO = left_NI.new_empty(len(rows_E), left_NI.shape[-1], right_NO.shape[-1])
    for rows, gradient_IO in zip(_slices(rows_E), gradient_EIO.unbind(), strict=True):
        missing = _even(rows, left_NI) - (rows.stop - rows.start)
        left, right = (F.pad(x[rows], (0, 0, 0, missing)) if missing else x[rows] for x in (left_NI, right_NO))
        matmul_into(left.T, right, gradient_IO)
    return gradient_EIO


def _slices(rows_E: Sequence[int]) -> list[slice]:
    """Return the rows of each group."""
    ends = list(accumulate(rows_E, initial=0))
    return [slice(start, end) for start, end in pairwise(ends)]


def _even(rows: slice, x_NI: Tensor) -> int:
    """Return how many rows are multiplied: an even number, where every other one costs oneDNN a new kernel.

    Of the small numbers there are few anyway.
    """
    count: int = rows.stop - rows.start
    return (
        count if count < ROW_MULTIPLE or not kernel_per_shape(x_NI) else -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
    )


def _widened(rows: slice, x_NI: Tensor) -> slice:
    """Return the rows, and others beside them up to an even number, as far as there are others."""
    even = _even(rows, x_NI)
    start = max(0, min(rows.start, len(x_NI) - even))
    return slice(start, min(start + even, len(x_NI)))


def _rows(ends_E: Tensor) -> list[int]:
    ends = ends_E.tolist()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@torch.library.custom_op("zslurm::looped_multiply", mutates_args=())
def _looped_multiply(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return _multiply_in_loop(x_NI, weight_EIO, _rows(ends_E))


@_looped_multiply.register_fake
def _(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[-1])


@torch.library.custom_op("zslurm::looped_weight_gradient", mutates_args=())
def _looped_weight_gradient(left_NI: Tensor, right_NO: Tensor, ends_E: Tensor) -> Tensor:
    return _weight_gradient_in_loop(left_NI, right_NO, _rows(ends_E))


@_looped_weight_gradient.register_fake
def _(left_NI: Tensor, right_NO: Tensor, ends_E: Tensor) -> Tensor:
    return left_NI.new_empty(ends_E.shape[0], left_NI.shape[-1], right_NO.shape[-1])
