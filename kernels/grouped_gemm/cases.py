"""Cases of the grouped products: what they are checked and measured on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch

from zslurm.kernels.case import TOLERANCE, Call, Case, drawn
from zslurm.kernels.grouped_gemm.reference import Groups

_EXPERTS, _INPUTS, _OUTPUTS = 16, 2048, 4096  # of zaya1-8b, gate and up together
_ROWS = (32, 128, 512, 1024, 4096)


def checks() -> Iterator[Case]:
    """Yield uneven groups, one of them without rows; of odd widths, and of those that each package takes."""
    for dtype in (torch.bfloat16, torch.float32):
        yield from _both(dtype, [5, 0, 64, 33], 64, 96)
        yield from _both(dtype, [7, 2, 1], 33, 17)
    yield from _both(torch.bfloat16, [5, 0, 30], 128, 256)
    yield from _both(torch.bfloat16, [5, 0, 30], 128, 128)


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield even groups of each number of rows."""
    experts, inputs, outputs, rows = (4, 64, 128, (8, 64)) if small else (_EXPERTS, _INPUTS, _OUTPUTS, _ROWS)
    for group_rows in rows:
        yield from _both(torch.bfloat16, [group_rows] * experts, inputs, outputs)


def _both(dtype: torch.dtype, rows_E: Sequence[int], inputs: int, outputs: int) -> Iterator[Case]:
    rows, experts = sum(rows_E), len(rows_E)
    spread = f"{rows // experts}" if len(set(rows_E)) == 1 else "/".join(map(str, rows_E))
    name = f"{str(dtype).removeprefix('torch.')} {experts} groups, {spread} rows, {inputs} x {outputs}"
    moved = float(dtype.itemsize * (rows * (inputs + outputs) + experts * inputs * outputs))
    made = ("multiply", _multiply), ("weight_gradient", _weight_gradient), ("add_weight_gradient", _add)
    for operation, make in made:
        yield Case(
            f"grouped_gemm.{operation}",
            name,
            partial(make, dtype, tuple(rows_E), inputs, outputs),
            TOLERANCE[dtype],
            flops=2.0 * rows * inputs * outputs,
            bytes=moved + (8.0 - dtype.itemsize) * experts * inputs * outputs * (make is _add),
            axis="rows_per_group",
        )


def ends_of(rows_E: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the end of each group."""
    return torch.tensor(list(accumulate(rows_E)), dtype=torch.int32, device=device)


def _multiply(
    dtype: torch.dtype, rows_E: tuple[int, ...], inputs: int, outputs: int, device: torch.device
) -> Call:
    x_NI = drawn(device, dtype, sum(rows_E), inputs)
    weight_EIO = drawn(device, dtype, len(rows_E), inputs, outputs, seed=1)
    ends_E = ends_of(rows_E, device)
    # New groups in each call, as in training: one that needs the host has to wait for it in every one.
    return Call(lambda: (x_NI, weight_EIO, Groups(ends_E)), lambda y_NO: [y_NO])


def _weight_gradient(
    dtype: torch.dtype, rows_E: tuple[int, ...], inputs: int, outputs: int, device: torch.device
) -> Call:
    left_NI = drawn(device, dtype, sum(rows_E), inputs)
    right_NO = drawn(device, dtype, sum(rows_E), outputs, seed=1)
    ends_E = ends_of(rows_E, device)
    return Call(lambda: (left_NI, right_NO, Groups(ends_E)), lambda gradient_EIO: [gradient_EIO])


def _add(dtype: torch.dtype, rows_E: tuple[int, ...], inputs: int, outputs: int, device: torch.device) -> Call:
    left_NI, right_NO, groups = _weight_gradient(dtype, rows_E, inputs, outputs, device).args()
    start_EIO = drawn(device, torch.float32, len(rows_E), inputs, outputs, seed=2)
    total_EIO = start_EIO.clone()
    return Call(
        lambda: (left_NI, right_NO, Groups(groups.ends_E), total_EIO.copy_(start_EIO), True),
        lambda _: [total_EIO],
    )
