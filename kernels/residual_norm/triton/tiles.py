"""Cut rows into tiles for the size of a row and the card, and load them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import Arch
from zslurm.kernels.residual_norm.operands import NormOperands

_TILE = 2048  # elements of a tile of narrow rows: 8 for each of 256 lanes
_FORWARD_PIECE = 4096  # elements of long rows, of which one is read at a time
_BACKWARD_ROWS, _BACKWARD_PIECE = 16, 256  # of long rows
_MOST_WARPS = 16


class NormConfiguration(NamedTuple):
    """How rows are cut into tiles, and the tiles dealt out.

    Attributes:
        rows: of a tile.
        columns: of a tile, a power of 2.
        hoisted: whether scales, biases and weights stay in registers from tile to tile.
        num_warps: of a workgroup.
        programs: workgroups.
    """

    rows: int
    columns: int
    hoisted: bool
    num_warps: int
    programs: int


class NormShape(NamedTuple):
    """Constants of the rows' kernels: `NormConfiguration`, and what they compute.

    Attributes:
        ROWS: of a tile.
        COLUMNS: of a tile.
        HOISTED: see `NormConfiguration`.
        WHOLE: whether no tile is cut by the last row or column.
        CENTERED: LayerNorm instead of RMSNorm.
    """

    ROWS: int
    COLUMNS: int
    HOISTED: bool
    WHOLE: bool
    CENTERED: bool


class Rows(NamedTuple):
    """A stream as kernels take it: its first element, and the elements from row to row."""

    first: Tensor | None
    step: int


def held_in_registers(arch: Arch, width: int) -> bool:
    """Return whether a workgroup holds rows of this width, with what backward adds up, in its registers."""
    if not _aligned(width):
        return width <= 2048
    return width <= (8192 if arch.wave_size == 64 else 4096)  # 16 warps of AMD have twice NVIDIA's registers


def _aligned(width: int) -> bool:
    """Return whether rows are read 16 bytes at a time; others take a mask, so registers, for every element."""
    return width % 16 == 0


def forward_configuration(arch: Arch, rows: int, width: int) -> NormConfiguration:
    """Return how the forward kernel takes so many rows of this width."""
    if not held_in_registers(arch, width):
        return _dealt_out(arch, rows, width, 1, _FORWARD_PIECE, waves=32)
    columns = triton.next_power_of_2(width)
    return _dealt_out(arch, rows, width, max(1, _TILE // columns), columns, waves=32)


def backward_configuration(arch: Arch, rows: int, width: int) -> NormConfiguration:
    """Return how the backward kernel of the rows takes so many rows of this width.

    Each workgroup writes a row of partial sums, so there are no more of them than keep the card busy.
    """
    if not held_in_registers(arch, width):
        piece = _BACKWARD_PIECE if _aligned(width) else _BACKWARD_PIECE // 2
        long = _dealt_out(arch, rows, width, _BACKWARD_ROWS, piece, waves=8)
        return long._replace(programs=triton.cdiv(rows, _BACKWARD_ROWS))
    columns = triton.next_power_of_2(width)
    tile = _TILE if _aligned(width) else _TILE // 2
    configuration = _dealt_out(arch, rows, width, max(1, tile // columns), columns, waves=8)
    # A lane of 16 warps has 128 registers: Triton 3.6 spills some if it keeps the vectors as well.
    return configuration._replace(hoisted=configuration.hoisted and configuration.num_warps < _MOST_WARPS)


def _dealt_out(
    arch: Arch, rows: int, width: int, tile_rows: int, columns: int, *, waves: int
) -> NormConfiguration:
    # 8 elements a lane are 16 bytes of bf16: with more warps a lane would move less at a time. On NVIDIA 16 warps
    # may have no more than 128 registers each.
    per_lane, most = 8 if _aligned(width) else 4, _MOST_WARPS if arch.wave_size == 64 else 8
    warps = min(max(tile_rows * columns // (per_lane * arch.wave_size), 4), most)
    hoisted = _aligned(width) and tile_rows * columns // (warps * arch.wave_size) <= 8
    programs = min(triton.cdiv(rows, tile_rows), arch.compute_units * max(1, waves // warps))
    return NormConfiguration(tile_rows, columns, hoisted, warps, programs)


def shape_of(chosen: NormConfiguration, rows: int, width: int, *, centered: bool) -> NormShape:
    """Return the constants for so many rows of this width."""
    fills_tiles = width % chosen.columns == 0 and rows % chosen.rows == 0
    return NormShape(chosen.rows, chosen.columns, chosen.hoisted, fills_tiles, centered)


def rows_of(x: Tensor | None) -> Rows:
    """Return x as rows whose elements are side by side in memory; a copy if they are not."""
    if x is None:
        return Rows(None, 0)
    x_RD = x.reshape(-1, x.shape[-1])
    x_RD = x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()
    return Rows(x_RD, x_RD.stride(0))


def for_kernels(given: NormOperands) -> Any:
    """Return the operands as kernels take them: streams as rows, vectors without gaps between their elements."""
    streams: Any = {"hidden": rows_of(given.hidden), "residual": rows_of(given.residual)}
    vectors = {
        name: vector_operand.contiguous() for name, vector_operand in given.given().items() if name not in streams
    }
    return given._replace(**vectors, **streams)


@triton.jit
def vector(pointer, column, is_column, default: tl.constexpr):
    """Load a part of a vector [D] in fp32; what is None has one value everywhere."""
    if pointer is None:
        values = tl.full(column.shape, default, tl.float32)
    else:
        values = tl.load(pointer + column, mask=is_column, other=0.0).to(tl.float32)
    return values


@triton.jit
def scales(given, column, is_column):
    """Return a, c and b a + d c, of which t = h a + r c + the last, the same for all rows."""
    scale = vector(given.hidden_scale, column, is_column, 1.0)
    other_scale = vector(given.residual_scale, column, is_column, 1.0)
    own_bias = vector(given.hidden_bias, column, is_column, 0.0) * scale
    other_bias = vector(given.residual_bias, column, is_column, 0.0) * other_scale
    return scale, other_scale, own_bias + other_bias


@triton.jit
def tile_of(rows, row, column, inside):
    """Load a tile of rows in fp32; what is None is zero."""
    if rows.first is None:
        values = tl.zeros(inside.shape, tl.float32)
    else:
        values = tl.load(rows.first + row * rows.step + column, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def store(pointer, row, width, column, inside, values):
    """Store a tile of rows that are together in memory, or nothing if the pointer is None."""
    if pointer is not None:
        tl.store(pointer + row * width + column, values.to(pointer.dtype.element_ty), mask=inside)
