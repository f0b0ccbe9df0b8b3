"""Cases of the head's products and losses: what they are checked and measured on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from zslurm.kernels.case import TOLERANCE, Call, Case, drawn

_TOLERANCE = 2e-6  # sums of fp32 in another order


def checks() -> Iterator[Case]:
    """Yield odd and even sizes."""
    yield _case(torch.bfloat16, 64, 96, 128)
    yield _case(torch.bfloat16, 7, 33, 65)
    for dtype in (torch.bfloat16, torch.float32):
        yield _losses_case(dtype, 9, 999)
        yield _losses_case(dtype, 16, 20_000)


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield logits of chunks of tokens; the vocabulary is an eighth of ZAYA1's."""
    terms, columns, sizes = (64, 512, (16, 64)) if small else (2048, 262_272 // 8, (256, 1024, 4096))
    for rows in sizes:
        yield _case(torch.bfloat16, rows, terms, columns)
    for rows, classes in ((16, 512),) if small else ((256, 262_272), (1024, 262_272)):
        yield _losses_case(torch.bfloat16, rows, classes)


def _losses_case(dtype: torch.dtype, rows: int, columns: int) -> Case:
    return Case(
        "head.losses",
        f"{str(dtype).removeprefix('torch.')} {rows} x {columns}",
        partial(_losses, dtype, rows, columns),
        TOLERANCE[dtype],
        bytes=float((2 * 4 + dtype.itemsize) * rows * columns),
        axis="rows",
    )


def _losses(dtype: torch.dtype, rows: int, columns: int, device: torch.device) -> Call:
    logits_TV = drawn(device, torch.float32, rows, columns)
    targets_T = torch.arange(rows, device=device) * 7 % columns
    counted_T = torch.arange(rows, device=device) % 5 != 0
    return Call(lambda: (logits_TV.clone(), targets_T, counted_T, 1e-2, dtype), lambda results: list(results))


def _case(dtype: torch.dtype, rows: int, terms: int, columns: int) -> Case:
    return Case(
        "head.product",
        f"{str(dtype).removeprefix('torch.')} {rows} x {terms} x {columns}",
        partial(_product, dtype, rows, terms, columns),
        _TOLERANCE,
        flops=2.0 * rows * terms * columns,
        bytes=float(dtype.itemsize * (rows + columns) * terms + 4 * rows * columns),
        axis="rows",
    )


def _product(dtype: torch.dtype, rows: int, terms: int, columns: int, device: torch.device) -> Call:
    left_MK, right_KN = drawn(device, dtype, rows, terms), drawn(device, dtype, columns, terms, seed=1).T
    out_MN = torch.full((rows, columns), torch.nan, device=device)
    return Call(lambda: (left_MK, right_KN, out_MN), lambda _: [out_MN])
