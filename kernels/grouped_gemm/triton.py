"""Multiply groups of rows by one matrix per group on a GPU, with the groups' ends read on the GPU alone.

Both kernels are persistent: as many workgroups as the card has compute units take tiles in turn. What a tile is
follows from the groups' ends, so the host never waits to learn how many rows a group has, and a group without rows
costs nothing. Sums are fp32, each tile's by one workgroup: the same operands give the same bits.

    multiply            variable rows: each group's rows in tiles; a tile beyond a group's end is cut by a mask
    weight_gradient     variable terms: every group has the same tiles, each a sum over the group's rows, which is
                        zero for a group without rows; `add_weight_gradient` begins with what is in the place

Any strides will do; what lies together in memory is read 16 bytes at a time.

On gfx942 large products have tiles of 256 x 256 and matrix instructions of 16 x 16, which read least from LDS for
each product: 43 FLOPs a byte, with 128 x 128 tiles 21. If the columns of the matrices lie together in memory, as
for the gradient of the rows, or if a tile begins with a sum from memory, Triton 3.9 spills with such tiles: they
are 128 x 256 then, 32 FLOPs a byte. These are figures of the compiled code; nothing was measured on a GPU yet.
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

_LARGE_ROWS, _LARGE_COLUMNS = 512, 256
"""Fewest rows of a group and columns for tiles of 256: with fewer, too many rows of the last tile are unused."""


class GemmConfiguration(NamedTuple):
    """How a tile is computed.

    Attributes:
        rows, columns: of the tile.
        terms: of one step.
        num_warps: waves of a workgroup.
        num_stages: of the pipeline.
        instruction: rows and columns of AMD's matrix instruction, 16 or 32; 0: the compiler's choice.
    """

    rows: int
    columns: int
    terms: int
    num_warps: int
    num_stages: int
    instruction: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Return the options of the launch, by Triton's names."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options | ({"matrix_instr_nonkdim": self.instruction} if self.instruction else {})


def multiply_configuration(
    arch: Arch, dtype: torch.dtype, rows_per_group: int, columns: int, *, by_terms: bool
) -> GemmConfiguration:
    """Return how tiles are computed, from the average number of rows in a group.

    With `by_terms` the terms of a matrix's column lie together in memory, else the columns of its row.
    """
    if dtype == torch.float32:
        return GemmConfiguration(64, 64, 32, 4, 2)
    if rows_per_group <= 64 or columns <= 64:
        return GemmConfiguration(64, 64, 64, 4, 2)
    if arch.name == "gfx942" and rows_per_group >= _LARGE_ROWS and columns >= _LARGE_COLUMNS:
        return GemmConfiguration(256, 256, 32, 8, 2, 16) if by_terms else GemmConfiguration(128, 256, 64, 8, 2, 16)
    return GemmConfiguration(128, 128, 64, 8, 2 if arch.is_amd else 4)


def weight_gradient_configuration(
    arch: Arch, dtype: torch.dtype, rows: int, columns: int, *, adds: bool = False
) -> GemmConfiguration:
    """Return how the tiles of gradients of this size are computed; `adds`: to a sum that is read first."""
    if dtype == torch.float32:
        return GemmConfiguration(64, 64, 32, 4, 2)
    terms = 64 if arch.is_amd else 32  # with 32, AMD's backend reads 2 bytes of LDS at a time for these tiles
    if rows <= 64 or columns <= 64:
        return GemmConfiguration(64, 64, terms, 4, 2)
    if arch.name == "gfx942" and min(rows, columns) >= _LARGE_COLUMNS:
        # With a sum of 256 x 256 that is read, one register spills.
        return GemmConfiguration(128, 256, 64, 8, 2, 16) if adds else GemmConfiguration(256, 256, 32, 8, 2, 16)
    return GemmConfiguration(128, 128, terms, 8, 2 if arch.is_amd else 4)


def multiply(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply the rows of group e by matrix e; returns [N, O], undefined behind the last group."""
    (rows, terms), (groups, _, columns) = x_NI.shape, weight_EIO.shape
    out_NO = x_NI.new_empty(rows, columns)
    if not (out_NO.numel() and groups):
        return out_NO
    arch = arch_of(x_NI.device)
    by_terms = weight_EIO.stride(1) == 1
    chosen = multiply_configuration(arch, x_NI.dtype, rows // groups, columns, by_terms=by_terms)
    # Every group may have one tile that is not full.
    tiles = (triton.cdiv(rows, chosen.rows) + groups) * triton.cdiv(columns, chosen.columns)
    launch(
        _variable_rows,
        min(tiles, arch.compute_units),
        x_NI,
        x_NI,
        weight_EIO,
        out_NO,
        ends_E,
        groups,
        terms,
        columns,
        *x_NI.stride(),
        *weight_EIO.stride(),
        *out_NO.stride(),
        GROUPS=max(2, triton.next_power_of_2(groups)),
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        TERMS=chosen.terms,
        WHOLE_TERMS=terms % chosen.terms == 0,
        WHOLE_COLUMNS=columns % chosen.columns == 0,
        DIES=dies(arch),
        **chosen.options,
    )
    return out_NO


def weight_gradient(left_NI: Tensor, right_NO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply left transposed by right, over the rows of each group; returns [E, I, O]."""
    out_EIO = left_NI.new_empty(ends_E.shape[0], left_NI.shape[1], right_NO.shape[1])
    add_weight_gradient(left_NI, right_NO, ends_E, out_EIO, False)
    return out_EIO


def add_weight_gradient(left_NI: Tensor, right_NO: Tensor, ends_E: Tensor, total_EIO: Tensor, adds: bool) -> None:
    """Write left transposed by right, over the rows of each group, or add it to what is there."""
    if not total_EIO.numel():
        return
    groups, rows, columns = total_EIO.shape
    arch = arch_of(left_NI.device)
    chosen = weight_gradient_configuration(arch, left_NI.dtype, rows, columns, adds=adds)
    tiles = groups * triton.cdiv(rows, chosen.rows) * triton.cdiv(columns, chosen.columns)
    launch(
        _variable_terms,
        min(tiles, arch.compute_units),
        left_NI,
        left_NI,
        right_NO,
        total_EIO,
        ends_E,
        tiles,
        rows,
        columns,
        *left_NI.stride(),
        *right_NO.stride(),
        *total_EIO.stride(),
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        TERMS=chosen.terms,
        WHOLE_ROWS=rows % chosen.rows == 0,
        WHOLE_COLUMNS=columns % chosen.columns == 0,
        ADDS=adds,
        DIES=dies(arch),
        **chosen.options,
    )


@triton.jit
def _variable_rows(
    x,
    weight,
    out,
    ends,
    groups,
    terms,
    columns,
    x_row,
    x_term,
    weight_group,
    weight_term,
    weight_column,
    out_row,
    out_column,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    WHOLE_TERMS: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr,
    DIES: tl.constexpr,
):
    """Multiply tiles of the groups' rows, those of one group and one column of tiles after each other."""
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group, mask=group < groups, other=0)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group < groups), other=0)
    column_tiles = (columns + COLUMNS - 1) // COLUMNS
    tiles = tl.where(group < groups, (end - start + ROWS - 1) // ROWS * column_tiles, 0)
    tiles_up_to = tl.cumsum(tiles, 0)
    all_tiles = tl.sum(tiles, 0)
    in_rows = tl.arange(0, ROWS)
    in_columns = tl.arange(0, COLUMNS)
    in_terms = tl.arange(0, TERMS)

    for tile in range(on_one_die(tl.program_id(0), tl.num_programs(0), DIES), all_tiles, tl.num_programs(0)):
        tile_group = tl.sum((tiles_up_to <= tile).to(tl.int32), 0)
        is_own = group == tile_group
        own_start = tl.sum(tl.where(is_own, start, 0), 0)
        own_end = tl.sum(tl.where(is_own, end, 0), 0)
        in_group = tile - tl.sum(tl.where(is_own, tiles_up_to - tiles, 0), 0)
        row_tiles = (own_end - own_start + ROWS - 1) // ROWS
        first_row = own_start + in_group % row_tiles * ROWS
        first_column = in_group // row_tiles * COLUMNS

        # Rows beyond the group's end are read as its last one, and not stored.
        row = tl.minimum(in_rows, own_end - 1 - first_row)
        is_column = (first_column + in_columns < columns) | WHOLE_COLUMNS
        left = x + first_row.to(tl.int64) * x_row
        right = weight + tile_group.to(tl.int64) * weight_group + first_column.to(tl.int64) * weight_column
        left_offsets = row[:, None] * x_row + in_terms[None, :] * x_term
        right_offsets = in_terms[:, None] * weight_term + in_columns[None, :] * weight_column
        total = tl.full((ROWS, COLUMNS), 0.0, dtype=tl.float32)
        for first_term in range(0, terms, TERMS):
            is_term = (in_terms < terms - first_term) | WHOLE_TERMS
            left_tile = tl.load(left + left_offsets, mask=is_term[None, :], other=0.0)
            right_tile = tl.load(right + right_offsets, mask=is_term[:, None] & is_column[None, :], other=0.0)
            total = dot(left_tile, right_tile, total)
            left += TERMS * x_term
            right += TERMS * weight_term

        corner = out + first_row.to(tl.int64) * out_row + first_column.to(tl.int64) * out_column
        offsets = in_rows[:, None] * out_row + in_columns[None, :] * out_column
        is_row = first_row + in_rows < own_end
        tl.store(corner + offsets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _variable_terms(
    left,
    right,
    out,
    ends,
    tiles,
    rows,
    columns,
    left_term,
    left_row,
    right_term,
    right_column,
    out_group,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
    DIES: tl.constexpr,
):
    """Sum up tiles of the groups' gradients, those of one group after each other."""
    row_tiles = (rows + ROWS - 1) // ROWS
    column_tiles = (columns + COLUMNS - 1) // COLUMNS
    in_rows = tl.arange(0, ROWS)
    in_columns = tl.arange(0, COLUMNS)
    in_terms = tl.arange(0, TERMS)
    left_offsets = in_rows[:, None] * left_row + in_terms[None, :] * left_term
    right_offsets = in_terms[:, None] * right_term + in_columns[None, :] * right_column

    for tile in range(on_one_die(tl.program_id(0), tl.num_programs(0), DIES), tiles, tl.num_programs(0)):
        group = tile // (row_tiles * column_tiles)
        in_group = tile % (row_tiles * column_tiles)
        first_row = in_group % row_tiles * ROWS
        first_column = in_group // row_tiles * COLUMNS
        start = tl.load(ends + group - 1, mask=group > 0, other=0)
        terms = tl.load(ends + group) - start
        is_row = (first_row + in_rows < rows) | WHOLE_ROWS
        is_column = (first_column + in_columns < columns) | WHOLE_COLUMNS
        left_corner = left + start.to(tl.int64) * left_term + first_row.to(tl.int64) * left_row
        right_corner = right + start.to(tl.int64) * right_term + first_column.to(tl.int64) * right_column
        if ADDS:
            corner = out + group.to(tl.int64) * out_group + first_row.to(tl.int64) * out_row
            corner += first_column.to(tl.int64) * out_column
            offsets = in_rows[:, None] * out_row + in_columns[None, :] * out_column
            total = tl.load(corner + offsets, mask=is_row[:, None] & is_column[None, :], other=0.0).to(tl.float32)
        else:
            total = tl.full((ROWS, COLUMNS), 0.0, dtype=tl.float32)
        full_terms = terms // TERMS * TERMS
        # Pointers that a loop has moved are not used behind it: Triton 3.6 does not compile that for gfx942.
        left_tail = left_corner + full_terms.to(tl.int64) * left_term
        right_tail = right_corner + full_terms.to(tl.int64) * right_term
        for _ in range(0, full_terms, TERMS):
            left_tile = tl.load(left_corner + left_offsets, mask=is_row[:, None], other=0.0)
            right_tile = tl.load(right_corner + right_offsets, mask=is_column[None, :], other=0.0)
            total = dot(left_tile, right_tile, total)
            left_corner += TERMS * left_term
            right_corner += TERMS * right_term
        if full_terms < terms:  # the rows behind are another group's, or hold anything
            is_term = in_terms < terms - full_terms
            left_tile = tl.load(left_tail + left_offsets, mask=is_row[:, None] & is_term[None, :], other=0.0)
            right_tile = tl.load(right_tail + right_offsets, mask=is_term[:, None] & is_column[None, :], other=0.0)
            total = dot(left_tile, right_tile, total)

        corner = out + group.to(tl.int64) * out_group + first_row.to(tl.int64) * out_row
        corner += first_column.to(tl.int64) * out_column
        offsets = in_rows[:, None] * out_row + in_columns[None, :] * out_column
        tl.store(corner + offsets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def launches(arch: Arch) -> Iterator[KernelLaunch]:
    """Yield a launch of every kind that the compiler makes other code of: the products of ZAYA1's experts."""
    kinds = [(torch.bfloat16, rows) for rows in (32, 256, 1024)]
    if arch.is_amd:
        kinds.append((torch.float32, 1024))
    ends = torch.empty(16, dtype=torch.int32, device="meta")
    for dtype, rows in kinds:
        x = torch.empty(16 * rows, 2048, dtype=dtype, device="meta")
        weight = torch.empty(16, 2048, 4096, dtype=dtype, device="meta")
        name = f"{str(dtype).removeprefix('torch.')} {rows}"
        yield KernelLaunch(f"{name} rows", partial(multiply, x, weight, ends))
        yield KernelLaunch(
            f"{name} rows, weight turned", partial(multiply, x, weight.view(16, 4096, 2048).mT, ends)
        )
    for dtype in dict(kinds):
        for rows, columns in ((64, 64), (128, 4096), (2048, 4096)):
            left = torch.empty(4096, rows, dtype=dtype, device="meta")
            right = torch.empty(4096, columns, dtype=dtype, device="meta")
            name = f"{str(dtype).removeprefix('torch.')} {rows} x {columns}"
            yield KernelLaunch(f"{name} gradient", partial(weight_gradient, left, right, ends))
            total = torch.empty(16, rows, columns, device="meta")
            for adds in (False, True) if dtype == torch.bfloat16 else ():
                run = partial(add_weight_gradient, left, right, ends, total, adds)
                yield KernelLaunch(f"{name} gradient {'added' if adds else 'put'} in fp32", run)
    x = torch.empty(100, 77, dtype=torch.bfloat16, device="meta")
    odd = torch.empty(16, 77, 99, dtype=torch.bfloat16, device="meta")
    yield KernelLaunch("bfloat16 odd rows", partial(multiply, x, odd, ends), wide=False)
    yield KernelLaunch(
        "bfloat16 odd gradient", partial(weight_gradient, x, x.new_empty(100, 99), ends), wide=False
    )
