"""Cases of the head's products: what they are checked and measured on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from zslurm.kernels.case import Call, Case, drawn

_TOLERANCE = 2e-6  # sums of fp32 in another order


def checks() -> Iterator[Case]:
    """Yield odd and even sizes."""
    for dtype in (torch.bfloat16, torch.float16):
        yield _case(dtype, 64, 96, 128)
        yield _case(dtype, 7, 33, 65)


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield logits of chunks of tokens; the vocabulary is an eighth of ZAYA1's."""
    terms, columns, sizes = (64, 512, (16, 64)) if small else (2048, 262_272 // 8, (256, 1024, 4096))
    for rows in sizes:
        yield _case(torch.bfloat16, rows, terms, columns)


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
