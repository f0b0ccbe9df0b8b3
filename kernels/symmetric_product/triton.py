"""Compute symmetric products on a GPU from the tiles of the lower triangle alone: half of the library's FLOPs.

One workgroup computes one tile on or below the diagonal and writes it twice, as it is and turned. The grid has
exactly those tiles, of all matrices of the batch: t = 0, 1, 2, ... is tile (0, 0), (1, 0), (1, 1), (2, 0) and so
on. Of a tile on the diagonal the elements below the diagonal are written to both places, so the result is exactly
symmetric whatever the order of the hardware's sums. Sums are fp32.

The polynomial b A + c A A is the same product, A A^T, as A is symmetric, with another end.

X may have any strides: rows or columns that lie together are read 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import Arch, arch_of
from zslurm.kernels.code_object import KernelLaunch
from zslurm.kernels.triton_tools import dies, dot, launch, on_one_die


class SymmetricConfiguration(NamedTuple):
    """How a tile is computed: its side, the terms of one step, waves and stages of the pipeline."""

    side: int
    terms: int
    num_warps: int
    num_stages: int


def symmetric_product(x_KSL: Tensor, out_KSS: Tensor) -> None:
    """Write X X^T of each matrix."""
    _launch(x_KSL, None, out_KSS, 0.0, 1.0)


def symmetric_polynomial(a_KSS: Tensor, b: float, c: float, out_KSS: Tensor) -> None:
    """Write b A + c A A of each symmetric matrix."""
    _launch(a_KSS, a_KSS, out_KSS, b, c)


def configuration(arch: Arch, dtype: torch.dtype, count: int, side: int, length: int) -> SymmetricConfiguration:
    """Return how the tiles of `count` matrices of this side are computed.

    Large tiles read less per product, but if they are fewer than the compute units, some of those idle.
    """
    if dtype == torch.float32 or (side | length) * dtype.itemsize % 16:  # read element by element
        return SymmetricConfiguration(64, 32, 4, 2)
    rows = triton.cdiv(side, 128)
    if count * rows * (rows + 1) // 2 < arch.compute_units:
        return SymmetricConfiguration(64, 64, 4, 2)
    return SymmetricConfiguration(128, 64, 8, 2 if arch.is_amd else 4)


def _launch(x_KSL: Tensor, added_KSS: Tensor | None, out_KSS: Tensor, b: float, c: float) -> None:
    count, side, length = x_KSL.shape
    if not out_KSS.numel():
        return
    arch = arch_of(x_KSL.device)
    chosen = configuration(arch, x_KSL.dtype, count, side, length)
    rows = triton.cdiv(side, chosen.side)
    added_KSS = out_KSS if added_KSS is None else added_KSS
    launch(
        _lower_tiles,
        count * rows * (rows + 1) // 2,
        x_KSL,
        x_KSL,
        added_KSS,
        out_KSS,
        side,
        length,
        b,
        c,
        *x_KSL.stride(),
        *added_KSS.stride(),
        *out_KSS.stride(),
        SIDE=chosen.side,
        TERMS=chosen.terms,
        WHOLE_SIDE=side % chosen.side == 0,
        WHOLE_LENGTH=length % chosen.terms == 0,
        ADDS=added_KSS is not out_KSS,
        DIES=dies(arch),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )


@triton.jit(do_not_specialize=["b", "c"])
def _lower_tiles(
    x,
    added,
    out,
    side,
    length,
    b,
    c,
    x_batch,
    x_row,
    x_column,
    added_batch,
    added_row,
    added_column,
    out_batch,
    out_row,
    out_column,
    SIDE: tl.constexpr,
    TERMS: tl.constexpr,
    WHOLE_SIDE: tl.constexpr,
    WHOLE_LENGTH: tl.constexpr,
    ADDS: tl.constexpr,
    DIES: tl.constexpr,
):
    """Compute one tile of one matrix and write it twice."""
    tile = on_one_die(tl.program_id(0), tl.num_programs(0), DIES)  # neighbours in the matrix together
    rows = (side + SIDE - 1) // SIDE
    per_matrix = rows * (rows + 1) // 2
    batch = (tile // per_matrix).to(tl.int64)
    tile = tile % per_matrix
    row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)  # where the root was rounded
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    column = tile - row * (row + 1) // 2

    first_row = row * SIDE
    first_column = column * SIDE
    in_tile = tl.arange(0, SIDE)
    terms = tl.arange(0, TERMS)
    is_row = first_row + in_tile < side
    is_column = first_column + in_tile < side
    left = x + batch * x_batch + first_row.to(tl.int64) * x_row
    right = x + batch * x_batch + first_column.to(tl.int64) * x_row
    left_offsets = in_tile[:, None] * x_row + terms[None, :] * x_column
    right_offsets = terms[:, None] * x_column + in_tile[None, :] * x_row

    total = tl.full((SIDE, SIDE), 0.0, dtype=tl.float32)
    for first_term in range(0, length, TERMS):
        if WHOLE_SIDE and WHOLE_LENGTH:
            left_tile = tl.load(left + left_offsets)
            right_tile = tl.load(right + right_offsets)
        else:
            is_term = terms < length - first_term
            left_tile = tl.load(left + left_offsets, mask=is_row[:, None] & is_term[None, :], other=0.0)
            right_tile = tl.load(right + right_offsets, mask=is_term[:, None] & is_column[None, :], other=0.0)
        total = dot(left_tile, right_tile, total)
        left += TERMS * x_column
        right += TERMS * x_column

    in_rows = (is_row[:, None] & is_column[None, :]) | WHOLE_SIDE
    if ADDS:
        corner = added + batch * added_batch + first_row.to(tl.int64) * added_row
        corner += first_column.to(tl.int64) * added_column
        offsets = in_tile[:, None] * added_row + in_tile[None, :] * added_column
        previous = tl.load(corner + offsets, mask=in_rows, other=0.0)
        total = b * previous.to(tl.float32) + c * total

    result = total.to(out.dtype.element_ty)
    turned = tl.trans(result)
    matrix = out + batch * out_batch
    corner = matrix + first_row.to(tl.int64) * out_row + first_column.to(tl.int64) * out_column
    mirrored = matrix + first_column.to(tl.int64) * out_row + first_row.to(tl.int64) * out_column
    offsets = in_tile[:, None] * out_row + in_tile[None, :] * out_column
    if row == column:
        result = tl.where(in_tile[:, None] >= in_tile[None, :], result, turned)
    tl.store(corner + offsets, result, mask=in_rows)
    if row != column:
        tl.store(mirrored + offsets, turned, mask=(is_column[:, None] & is_row[None, :]) | WHOLE_SIDE)


def launches(arch: Arch) -> Iterator[KernelLaunch]:
    """Yield a launch of every kind that the compiler makes other code of."""
    kinds = [(torch.bfloat16, side) for side in (1024, 4096)]
    if arch.is_amd:
        kinds.append((torch.float32, 1024))
    for dtype, side in kinds:
        wide = torch.empty(1, side, 2 * side, dtype=dtype, device="meta")
        tall = torch.empty(1, 2 * side, side, dtype=dtype, device="meta").mT
        square = torch.empty(1, side, side, dtype=dtype, device="meta")
        name = f"{str(dtype).removeprefix('torch.')} {side}"
        yield KernelLaunch(f"{name} wide", partial(symmetric_product, wide, torch.empty_like(square)))
        yield KernelLaunch(f"{name} tall", partial(symmetric_product, tall, torch.empty_like(square)))
        yield KernelLaunch(
            f"{name} polynomial", partial(symmetric_polynomial, square, 1.5, 0.5, torch.empty_like(square))
        )
    odd = torch.empty(3, 999, 777, dtype=torch.bfloat16, device="meta")
    yield KernelLaunch("bfloat16 odd", partial(symmetric_product, odd, odd.new_empty(3, 999, 999)), wide=False)
