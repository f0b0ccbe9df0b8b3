"""Multiply groups of rows by one matrix per group in a loop: the definition.

    multiply            y[rows of e] = x[rows of e] W[e]
    weight_gradient     G[e] = left[rows of e]^T right[rows of e], zero for a group without rows

The loop runs anywhere, and needs the number of rows of every group on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_ROW_MULTIPLE = 32
"""What to round numbers of rows up to if a product makes a kernel for every shape that it has not met.

That takes oneDNN, which multiplies bf16 on CPUs, longer than a small product, and each expert has another number
of rows in every step.
"""


class Groups:
    """Groups of consecutive rows, the first from row 0 on.

    Attributes:
        ends_E: end of each group, int32, on the device of the rows.
    """

    def __init__(self, ends_E: Tensor, rows_E: Sequence[int] | None = None) -> None:
        """Describe groups by their ends and, if the host knows it, how many rows each has."""
        self.ends_E = ends_E
        self._rows_E = None if rows_E is None else list(rows_E)

    @property
    def operands(self) -> tuple[Tensor]:
        """Return the tensors in it, for the choice of an implementation."""
        return (self.ends_E,)

    @property
    def on_host(self) -> bool:
        """Return whether the host knows the numbers of rows."""
        return self._rows_E is not None

    def rows(self) -> list[int]:
        """Return how many rows each group has: the first time, the host waits for the device to learn it."""
        if self._rows_E is None:
            self._rows_E = [end - start for start, end in pairwise([0, *self.ends_E.tolist()])]
        return self._rows_E


def rows_per_group(ends_E: Tensor) -> Tensor:
    """Return how many rows each group has, on the device of the ends and in their format."""
    return ends_E.diff(prepend=ends_E.new_zeros(1))


def multiply(x_NI: Tensor, weight_EIO: Tensor, groups: Groups) -> Tensor:
    """Multiply the rows of group e by matrix e; returns [N, O]."""
    y_NO = x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[-1])
    for rows, weight_IO in zip(_slices(groups.rows()), weight_EIO.unbind(), strict=True):
        wide = _widened(rows, x_NI)
        if wide == rows:
            torch.mm(x_NI[rows], weight_IO, out=y_NO[rows])
        else:  # what the others' rows give with this group's matrix is left
            y_NO[rows] = (x_NI[wide] @ weight_IO)[rows.start - wide.start : rows.stop - wide.start]
    return y_NO


def weight_gradient(left_NI: Tensor, right_NO: Tensor, groups: Groups) -> Tensor:
    """Multiply left transposed by right, over the rows of each group; returns [E, I, O]."""
    rows_E = groups.rows()
    gradient_EIO = left_NI.new_empty(len(rows_E), left_NI.shape[-1], right_NO.shape[-1])
    for rows, gradient_IO in zip(_slices(rows_E), gradient_EIO.unbind(), strict=True):
        missing = _even(rows, left_NI) - (rows.stop - rows.start)
        left, right = (F.pad(x[rows], (0, 0, 0, missing)) if missing else x[rows] for x in (left_NI, right_NO))
        torch.mm(left.T, right, out=gradient_IO)
    return gradient_EIO


def add_weight_gradient(left_NI: Tensor, right_NO: Tensor, groups: Groups, total_EIO: Tensor, adds: bool) -> None:
    """Write the gradient in the format of a sum, or add it."""
    put_or_add(weight_gradient(left_NI, right_NO, groups), total_EIO, adds)


def put_or_add(gradient_EIO: Tensor, total_EIO: Tensor, adds: bool) -> None:
    """Write a tensor in the format of a sum, or add it."""
    if adds:
        total_EIO.add_(gradient_EIO)
    else:
        total_EIO.copy_(gradient_EIO)


def _slices(rows_E: Sequence[int]) -> list[slice]:
    """Return the rows of each group."""
    ends = list(accumulate(rows_E, initial=0))
    return [slice(start, end) for start, end in pairwise(ends)]


def _even(rows: slice, x_NI: Tensor) -> int:
    """Return how many rows are multiplied: a multiple if oneDNN multiplies.

    Of the small numbers there are few anyway.
    """
    count: int = rows.stop - rows.start
    by_onednn = x_NI.device.type == "cpu" and x_NI.dtype == torch.bfloat16
    return -(-count // _ROW_MULTIPLE) * _ROW_MULTIPLE if by_onednn and count >= _ROW_MULTIPLE else count


def _widened(rows: slice, x_NI: Tensor) -> slice:
    """Return the rows, and others next to them up to an even number, as far as there are others."""
    even = _even(rows, x_NI)
    start = max(0, min(rows.start, len(x_NI) - even))
    return slice(start, min(start + even, len(x_NI)))
