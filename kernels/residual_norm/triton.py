"""Join two streams and normalise their sum on a GPU: one kernel forward, two backward.

Forward, every row is read once and written once. A tile of a workgroup is one row of up to 8,192 elements, or
several rows where those are narrow, and is held in registers; longer rows are read in pieces, twice, for LayerNorm
three times, of which all but the first mostly come from a cache.

Backward, the rows' kernel recomputes t from both streams, which it needs anyway for the gradients of their scales,
instead of reading it. Each workgroup adds up the gradients of scales, biases and weights over its rows and writes
them once; a second kernel adds up these partial sums, in an order that depends on the number of rows and the card
alone: the result has the same bits every time. Of long rows, a workgroup takes 16 together, piece by piece, twice.

The grid is persistent: no more workgroups than keep the card's compute units busy, each with every n-th tile.
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
from zslurm.kernels.code_object import Launch
from zslurm.kernels.residual_norm.operands import Operands
from zslurm.kernels.residual_norm.reference import Gradients
from zslurm.kernels.triton_tools import compiler_options, launching_on

_TILE = 2048  # elements of a tile of narrow rows: 8 for each of 256 lanes
_FORWARD_PIECE = 4096  # elements of long rows, of which one is read at a time
_BACKWARD_ROWS, _BACKWARD_PIECE = 16, 256  # of long rows
_REDUCED_ROWS, _REDUCED_COLUMNS = 64, 32  # of the partial sums


class Configuration(NamedTuple):
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


def held_in_registers(arch: Arch, width: int) -> bool:
    """Return whether a workgroup holds rows of this width, with what backward adds up, in its registers."""
    if not _aligned(width):
        return width <= 2048
    return width <= (8192 if arch.wave_size == 64 else 4096)  # 16 warps of AMD have twice NVIDIA's registers


def _aligned(width: int) -> bool:
    """Return whether rows are read 16 bytes at a time; others take a mask, so registers, for every element."""
    return width % 16 == 0


def forward_configuration(arch: Arch, rows: int, width: int) -> Configuration:
    """Return how the forward kernel takes so many rows of this width."""
    if not held_in_registers(arch, width):
        return _dealt_out(arch, rows, width, 1, _FORWARD_PIECE, waves=32)
    columns = triton.next_power_of_2(width)
    return _dealt_out(arch, rows, width, max(1, _TILE // columns), columns, waves=32)


def backward_configuration(arch: Arch, rows: int, width: int) -> Configuration:
    """Return how the backward kernel of the rows takes so many rows of this width.

    Each workgroup writes a row of partial sums, so there are no more of them than keep the card busy.
    """
    if not held_in_registers(arch, width):
        piece = _BACKWARD_PIECE if _aligned(width) else _BACKWARD_PIECE // 2
        long = _dealt_out(arch, rows, width, _BACKWARD_ROWS, piece, waves=8)
        return long._replace(programs=triton.cdiv(rows, _BACKWARD_ROWS))
    columns = triton.next_power_of_2(width)
    return _dealt_out(arch, rows, width, max(1, _TILE // columns), columns, waves=8)


def _dealt_out(arch: Arch, rows: int, width: int, tile_rows: int, columns: int, *, waves: int) -> Configuration:
    # 8 elements a lane are 16 bytes of bf16: with more warps a lane would move less at a time. On NVIDIA 16 warps
    # may have no more than 128 registers each.
    per_lane, most = 8 if _aligned(width) else 4, 16 if arch.wave_size == 64 else 8
    warps = min(max(tile_rows * columns // (per_lane * arch.wave_size), 4), most)
    hoisted = _aligned(width) and tile_rows * columns // (warps * arch.wave_size) <= 8
    programs = min(triton.cdiv(rows, tile_rows), arch.compute_units * max(1, waves // warps))
    return Configuration(tile_rows, columns, hoisted, warps, programs)


def forward(eps: float, centered: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, t and the statistics of each row, as the reference does."""
    given = Operands(*operands)  # type: ignore[arg-type]
    width = given.hidden.shape[-1]
    hidden_RD, residual_RD = _rows(given.hidden), _rows(given.residual)
    assert hidden_RD is not None
    rows = len(hidden_RD)
    x_RD = torch.empty(rows, width, dtype=given.weight.dtype, device=hidden_RD.device)
    joined_RD = hidden_RD.new_empty((rows, width), dtype=torch.float32) if given.joins else None
    statistics_KR = hidden_RD.new_empty((2 if centered else 1, rows), dtype=torch.float32)
    if rows:
        arch = arch_of(hidden_RD.device)
        chosen = forward_configuration(arch, rows, width)
        in_registers = held_in_registers(arch, width)
        kernel = _forward_rows if in_registers else _forward_long_rows
        shape = {"ROWS": chosen.rows, "HOISTED": chosen.hoisted} if in_registers else {}
        with launching_on(hidden_RD):
            kernel[(chosen.programs,)](
                hidden_RD,
                residual_RD,
                *_vectors(given),
                x_RD,
                joined_RD,
                statistics_KR,
                rows,
                width,
                eps,
                hidden_RD.stride(0),
                0 if residual_RD is None else residual_RD.stride(0),
                COLUMNS=chosen.columns,
                WHOLE=width % chosen.columns == 0 and rows % chosen.rows == 0,
                CENTERED=centered,
                num_warps=chosen.num_warps,
                **shape,
                **compiler_options(arch),
            )
    joined = (
        hidden_RD.new_empty(0, dtype=torch.float32) if joined_RD is None else joined_RD.view(given.hidden.shape)
    )
    return x_RD.view(given.hidden.shape), joined, statistics_KR


def backward(
    grad_x: Tensor | None,
    grad_joined: Tensor | None,
    joined: Tensor,
    statistics: Tensor,
    *operands: Tensor | None,
) -> Gradients:
    """Return the gradients of the operands, as the reference does."""
    given = Operands(*operands)  # type: ignore[arg-type]
    gradients = Operands(*(None if operand is None else _empty(operand) for operand in given))  # type: ignore[arg-type]
    if grad_x is None:
        gradients = gradients._replace(weight=None, bias=None)  # type: ignore[arg-type]
    rows = given.hidden.numel() // given.hidden.shape[-1]
    if not rows:
        return tuple(None if gradient is None else gradient.zero_() for gradient in gradients)
    arch = arch_of(given.hidden.device)
    chosen = backward_configuration(arch, rows, given.hidden.shape[-1])
    sums_KPD = given.hidden.new_empty(
        (5 if gradients.bias is not None else 4, chosen.programs, given.hidden.shape[-1]), dtype=torch.float32
    )
    with launching_on(given.hidden):
        _backward_of_rows(arch, chosen, grad_x, grad_joined, statistics, given, gradients, sums_KPD)
        if any(gradient is not None for gradient in _of_vectors(gradients)):
            _reduce(arch, given, gradients, sums_KPD)
    return tuple(gradients)


def _backward_of_rows(
    arch: Arch,
    chosen: Configuration,
    grad_x: Tensor | None,
    grad_joined: Tensor | None,
    statistics_KR: Tensor,
    given: Operands,
    gradients: Operands,
    sums_KPD: Tensor,
) -> None:
    width = given.hidden.shape[-1]
    rows = given.hidden.numel() // width
    in_registers = held_in_registers(arch, width)
    kernel = _backward_rows if in_registers else _backward_long_rows
    shape = {"HOISTED": chosen.hoisted} if in_registers else {}
    streams = [_rows(each) for each in (grad_x, grad_joined, given.hidden, given.residual)]
    kernel[(chosen.programs,)](
        *streams,
        *_vectors(given)[:5],
        statistics_KR,
        gradients.hidden,
        gradients.residual,
        sums_KPD,
        rows,
        width,
        *(0 if stream is None else stream.stride(0) for stream in streams),
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        WHOLE=width % chosen.columns == 0 and rows % chosen.rows == 0,
        CENTERED=len(statistics_KR) == 2,
        BIASED=gradients.bias is not None,
        num_warps=chosen.num_warps,
        **shape,
        **compiler_options(arch),
    )


def _reduce(arch: Arch, given: Operands, gradients: Operands, sums_KPD: Tensor) -> None:
    programs, width = sums_KPD.shape[1:]
    _sum_partials[(triton.cdiv(width, _REDUCED_COLUMNS), 3)](
        sums_KPD,
        *_vectors(given)[:4],
        *_of_vectors(gradients),
        programs,
        width,
        ROWS=_REDUCED_ROWS,
        COLUMNS=_REDUCED_COLUMNS,
        num_warps=4,
        **compiler_options(arch),
    )


def _of_vectors(gradients: Operands) -> tuple[Tensor | None, ...]:
    return (*gradients[1:3], *gradients[4:])


def _rows(x: Tensor | None) -> Tensor | None:
    """Return x as rows whose elements are side by side in memory; a copy where they are not."""
    if x is None:
        return None
    x_RD = x.reshape(-1, x.shape[-1])
    return x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()


def _empty(operand: Tensor) -> Tensor:
    return torch.empty(operand.shape, dtype=operand.dtype, device=operand.device)


def _vectors(given: Operands) -> tuple[Tensor | None, ...]:
    """Return scales, biases, weight and the norm's bias, without gaps between their elements."""
    vectors = (
        given.hidden_scale, given.hidden_bias, given.residual_scale, given.residual_bias, given.weight, given.bias
    )  # fmt: skip
    return tuple(None if vector is None else vector.contiguous() for vector in vectors)


# --- Forward ---------------------------------------------------------------------------------------------------


@triton.jit
def _vector(pointer, column, is_column, default: tl.constexpr):
    """Load a part of a vector [D] in fp32; what is None has one value everywhere."""
    if pointer is None:
        values = tl.full(column.shape, default, tl.float32)
    else:
        values = tl.load(pointer + column, mask=is_column, other=0.0).to(tl.float32)
    return values


@triton.jit
def _shift(hidden_scale, hidden_bias, residual_scale, residual_bias, column, is_column):
    """Return b a + d c, the part of t that is the same for all rows."""
    own = _vector(hidden_bias, column, is_column, 0.0) * _vector(hidden_scale, column, is_column, 1.0)
    other = _vector(residual_bias, column, is_column, 0.0) * _vector(residual_scale, column, is_column, 1.0)
    return own + other


@triton.jit
def _tile(pointer, stride, row, column, inside):
    """Load a tile of rows in fp32; what is None is zero."""
    if pointer is None:
        values = tl.zeros(inside.shape, tl.float32)
    else:
        values = tl.load(pointer + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def _store(pointer, row, width, column, inside, values):
    """Store a tile of rows that are together in memory, or nothing where the pointer is None."""
    if pointer is not None:
        tl.store(pointer + row * width + column, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "eps"])
def _forward_rows(
    hidden,
    residual,
    hidden_scale,
    hidden_bias,
    residual_scale,
    residual_bias,
    weight,
    bias,
    x,
    joined,
    statistics,
    rows,
    width,
    eps,
    hidden_row,
    residual_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    CENTERED: tl.constexpr,
    HOISTED: tl.constexpr,
):
    """Join and normalise tiles of whole rows."""
    column = tl.arange(0, COLUMNS)[None, :]
    is_column = (column < width) | WHOLE
    in_rows = tl.arange(0, ROWS)[:, None]
    if HOISTED:
        scale = _vector(hidden_scale, column, is_column, 1.0)
        other_scale = _vector(residual_scale, column, is_column, 1.0)
        shift = _shift(hidden_scale, hidden_bias, residual_scale, residual_bias, column, is_column)
        gain = _vector(weight, column, is_column, 1.0)
        offset = _vector(bias, column, is_column, 0.0)

    for tile in range(tl.program_id(0), (rows + ROWS - 1) // ROWS, tl.num_programs(0)):
        row = (tile * ROWS + in_rows).to(tl.int64)
        is_row = (row < rows) | WHOLE
        inside = is_row & is_column
        h = _tile(hidden, hidden_row, row, column, inside)
        r = _tile(residual, residual_row, row, column, inside)
        if not HOISTED:
            scale = _vector(hidden_scale, column, is_column, 1.0)
            other_scale = _vector(residual_scale, column, is_column, 1.0)
            shift = _shift(hidden_scale, hidden_bias, residual_scale, residual_bias, column, is_column)
        t = h * scale + (r * other_scale + shift)
        _store(joined, row, width, column, inside, t)
        if CENTERED:
            mean = tl.sum(t, axis=1, keep_dims=True) / width
            tl.store(statistics + rows + row, mean, mask=is_row)
            t = tl.where(is_column, t - mean, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(t * t, axis=1, keep_dims=True) / width + eps)
        tl.store(statistics + row, inverse, mask=is_row)
        if not HOISTED:
            gain = _vector(weight, column, is_column, 1.0)
            offset = _vector(bias, column, is_column, 0.0)
        _store(x, row, width, column, inside, t * inverse * gain + offset)


@triton.jit
def _joined(
    hidden,
    residual,
    hidden_scale,
    hidden_bias,
    residual_scale,
    residual_bias,
    hidden_row,
    residual_row,
    row,
    column,
    inside,
):
    """Return t of a piece of a row."""
    scale = _vector(hidden_scale, column, inside, 1.0)
    other_scale = _vector(residual_scale, column, inside, 1.0)
    shift = _shift(hidden_scale, hidden_bias, residual_scale, residual_bias, column, inside)
    h = _tile(hidden, hidden_row, row, column, inside)
    return h * scale + (_tile(residual, residual_row, row, column, inside) * other_scale + shift)


@triton.jit(do_not_specialize=["rows", "eps"])
def _forward_long_rows(
    hidden,
    residual,
    hidden_scale,
    hidden_bias,
    residual_scale,
    residual_bias,
    weight,
    bias,
    x,
    joined,
    statistics,
    rows,
    width,
    eps,
    hidden_row,
    residual_row,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """Join and normalise rows in pieces: one pass for t and its statistics, one for x; a third for the mean."""
    in_columns = tl.arange(0, COLUMNS)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((COLUMNS,), index, tl.int64)
        mean = 0.0
        if CENTERED:
            sums = tl.zeros((COLUMNS,), tl.float32)
            for first in range(0, width, COLUMNS):
                column = first + in_columns
                is_column = (column < width) | WHOLE
                t = _joined(
                    hidden, residual, hidden_scale, hidden_bias, residual_scale, residual_bias,
                    hidden_row, residual_row, row, column, is_column,
                )  # fmt: skip
                sums += tl.where(is_column, t, 0.0)
            mean = tl.sum(sums, axis=0) / width
            tl.store(statistics + rows + index, mean)
        squares = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, width, COLUMNS):
            column = first + in_columns
            is_column = (column < width) | WHOLE
            t = _joined(
                hidden, residual, hidden_scale, hidden_bias, residual_scale, residual_bias,
                hidden_row, residual_row, row, column, is_column,
            )  # fmt: skip
            _store(joined, row, width, column, is_column, t)
            t = tl.where(is_column, t - mean, 0.0)
            squares += t * t
        inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)
        tl.store(statistics + index, inverse)
        for first in range(0, width, COLUMNS):
            column = first + in_columns
            is_column = (column < width) | WHOLE
            t = _joined(
                hidden, residual, hidden_scale, hidden_bias, residual_scale, residual_bias,
                hidden_row, residual_row, row, column, is_column,
            )  # fmt: skip
            gain = _vector(weight, column, is_column, 1.0)
            offset = _vector(bias, column, is_column, 0.0)
            _store(x, row, width, column, is_column, (t - mean) * inverse * gain + offset)


# --- Backward --------------------------------------------------------------------------------------------------


@triton.jit
def _row_statistics(statistics, rows, row, is_row, CENTERED: tl.constexpr):
    """Load the inverse roots and means [ROWS, 1]; zeros behind the last row."""
    inverse = tl.load(statistics + row, mask=is_row, other=0.0)
    if CENTERED:
        mean = tl.load(statistics + rows + row, mask=is_row, other=0.0)
    else:
        mean = tl.zeros(row.shape, tl.float32)
    return inverse, mean


_OF_WEIGHT, _TOTAL, _OF_HIDDEN, _OF_RESIDUAL, _OF_BIAS = (tl.constexpr(index) for index in range(5))
# Where each partial sum [P, D] is among the others: of G n, g, g h, g r and G.


@triton.jit
def _add_up(sums, index: tl.constexpr, width, column, is_column, values):
    """Store a workgroup's partial sum, over the rows of its tile [ROWS, COLUMNS]."""
    own = (tl.num_programs(0) * index + tl.program_id(0)).to(tl.int64) * width
    tl.store(sums + own + column, tl.sum(values, axis=0, keep_dims=True), mask=is_column)


@triton.jit(do_not_specialize=["rows"])
def _backward_rows(
    grad_x,
    grad_joined,
    hidden,
    residual,
    hidden_scale,
    hidden_bias,
    residual_scale,
    residual_bias,
    weight,
    statistics,
    grad_hidden,
    grad_residual,
    sums,
    rows,
    width,
    grad_x_row,
    grad_joined_row,
    hidden_row,
    residual_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    CENTERED: tl.constexpr,
    BIASED: tl.constexpr,
    HOISTED: tl.constexpr,
):
    """Write the gradients of both streams, and add up those of the vectors over all tiles of this workgroup."""
    column = tl.arange(0, COLUMNS)[None, :]
    is_column = (column < width) | WHOLE
    in_rows = tl.arange(0, ROWS)[:, None]
    if HOISTED:
        scale = _vector(hidden_scale, column, is_column, 1.0)
        other_scale = _vector(residual_scale, column, is_column, 1.0)
        shift = _shift(hidden_scale, hidden_bias, residual_scale, residual_bias, column, is_column)
        gain = _vector(weight, column, is_column, 1.0)
    of_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_hidden = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_residual = tl.zeros((ROWS, COLUMNS), tl.float32)

    for tile in range(tl.program_id(0), (rows + ROWS - 1) // ROWS, tl.num_programs(0)):
        row = (tile * ROWS + in_rows).to(tl.int64)
        is_row = (row < rows) | WHOLE
        inside = is_row & is_column
        h = _tile(hidden, hidden_row, row, column, inside)
        r = _tile(residual, residual_row, row, column, inside)
        g = _tile(grad_joined, grad_joined_row, row, column, inside)
        if not HOISTED:
            scale = _vector(hidden_scale, column, is_column, 1.0)
            other_scale = _vector(residual_scale, column, is_column, 1.0)
            shift = _shift(hidden_scale, hidden_bias, residual_scale, residual_bias, column, is_column)
            gain = _vector(weight, column, is_column, 1.0)
        if grad_x is not None:
            own = _tile(grad_x, grad_x_row, row, column, inside)
            inverse, mean = _row_statistics(statistics, rows, row, is_row, CENTERED)
            normal = (h * scale + (r * other_scale + shift) - mean) * inverse
            weighted = own * gain
            along = tl.sum(weighted * normal, axis=1, keep_dims=True) / width
            across = weighted - normal * along
            if CENTERED:
                across -= tl.sum(weighted, axis=1, keep_dims=True) / width
            g += across * inverse
            of_weight += own * normal
            of_bias += own
        _store(grad_hidden, row, width, column, inside, g * scale)
        _store(grad_residual, row, width, column, inside, g * other_scale)
        total += g
        of_hidden += g * h
        of_residual += g * r

    if grad_x is not None:
        _add_up(sums, _OF_WEIGHT, width, column, is_column, of_weight)
    if BIASED:
        _add_up(sums, _OF_BIAS, width, column, is_column, of_bias)
    if hidden_scale is not None or residual_scale is not None:
        _add_up(sums, _TOTAL, width, column, is_column, total)
    if hidden_scale is not None:
        _add_up(sums, _OF_HIDDEN, width, column, is_column, of_hidden)
    if residual_scale is not None:
        _add_up(sums, _OF_RESIDUAL, width, column, is_column, of_residual)


@triton.jit(do_not_specialize=["rows"])
def _backward_long_rows(
    grad_x,
    grad_joined,
    hidden,
    residual,
    hidden_scale,
    hidden_bias,
    residual_scale,
    residual_bias,
    weight,
    statistics,
    grad_hidden,
    grad_residual,
    sums,
    rows,
    width,
    grad_x_row,
    grad_joined_row,
    hidden_row,
    residual_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    CENTERED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Do the same for one tile of long rows: a pass for the sums along the rows, one for the gradients."""
    in_columns = tl.arange(0, COLUMNS)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    is_row = (row < rows) | WHOLE
    inverse, mean = _row_statistics(statistics, rows, row, is_row, CENTERED)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    plain = tl.zeros((ROWS, COLUMNS), tl.float32)
    if grad_x is not None:
        for first in range(0, width, COLUMNS):
            column = first + in_columns
            is_column = (column < width) | WHOLE
            inside = is_row & is_column
            scale = _vector(hidden_scale, column, is_column, 1.0)
            other_scale = _vector(residual_scale, column, is_column, 1.0)
            shift = _shift(hidden_scale, hidden_bias, residual_scale, residual_bias, column, is_column)
            h = _tile(hidden, hidden_row, row, column, inside)
            r = _tile(residual, residual_row, row, column, inside)
            normal = (h * scale + (r * other_scale + shift) - mean) * inverse
            weighted = _tile(grad_x, grad_x_row, row, column, inside) * _vector(weight, column, is_column, 1.0)
            products += weighted * normal
            if CENTERED:
                plain += weighted
    along = tl.sum(products, axis=1, keep_dims=True) / width
    level = tl.sum(plain, axis=1, keep_dims=True) / width

    for first in range(0, width, COLUMNS):
        column = first + in_columns
        is_column = (column < width) | WHOLE
        inside = is_row & is_column
        scale = _vector(hidden_scale, column, is_column, 1.0)
        other_scale = _vector(residual_scale, column, is_column, 1.0)
        h = _tile(hidden, hidden_row, row, column, inside)
        r = _tile(residual, residual_row, row, column, inside)
        g = _tile(grad_joined, grad_joined_row, row, column, inside)
        if grad_x is not None:
            shift = _shift(hidden_scale, hidden_bias, residual_scale, residual_bias, column, is_column)
            normal = (h * scale + (r * other_scale + shift) - mean) * inverse
            own = _tile(grad_x, grad_x_row, row, column, inside)
            g += (own * _vector(weight, column, is_column, 1.0) - normal * along - level) * inverse
            _add_up(sums, _OF_WEIGHT, width, column, is_column, own * normal)
            if BIASED:
                _add_up(sums, _OF_BIAS, width, column, is_column, own)
        _store(grad_hidden, row, width, column, inside, g * scale)
        _store(grad_residual, row, width, column, inside, g * other_scale)
        if hidden_scale is not None or residual_scale is not None:
            _add_up(sums, _TOTAL, width, column, is_column, g)
        if hidden_scale is not None:
            _add_up(sums, _OF_HIDDEN, width, column, is_column, g * h)
        if residual_scale is not None:
            _add_up(sums, _OF_RESIDUAL, width, column, is_column, g * r)


@triton.jit
def _column_sums(
    sums, index: tl.constexpr, programs, width, column, is_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add up columns of the workgroups' partial sums, always in the same order."""
    in_rows = tl.arange(0, ROWS)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + in_rows
        offsets = (programs * index + row).to(tl.int64) * width + column
        total += tl.load(sums + offsets, mask=(row < programs) & is_column, other=0.0)
    return tl.sum(total, axis=0, keep_dims=True)


@triton.jit
def _write(pointer, column, is_column, values):
    tl.store(pointer + column, values.to(pointer.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["programs"])
def _sum_partials(
    sums,
    hidden_scale,
    hidden_bias,
    residual_scale,
    residual_bias,
    grad_hidden_scale,
    grad_hidden_bias,
    grad_residual_scale,
    grad_residual_bias,
    grad_weight,
    grad_bias,
    programs,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the partial sums: of the norm's vectors, of hidden's, or of the residual stream's."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_column = column < width
    if tl.program_id(1) == 0:
        if grad_weight is not None:
            total = _column_sums(sums, _OF_WEIGHT, programs, width, column, is_column, ROWS, COLUMNS)
            _write(grad_weight, column, is_column, total)
        if grad_bias is not None:
            total = _column_sums(sums, _OF_BIAS, programs, width, column, is_column, ROWS, COLUMNS)
            _write(grad_bias, column, is_column, total)
    elif tl.program_id(1) == 1:
        if grad_hidden_scale is not None:
            total = _column_sums(sums, _TOTAL, programs, width, column, is_column, ROWS, COLUMNS)
            products = _column_sums(sums, _OF_HIDDEN, programs, width, column, is_column, ROWS, COLUMNS)
            bias = _vector(hidden_bias, column, is_column, 0.0)
            _write(grad_hidden_scale, column, is_column, products + total * bias)
            _write(grad_hidden_bias, column, is_column, total * _vector(hidden_scale, column, is_column, 1.0))
    else:
        if grad_residual_scale is not None:
            total = _column_sums(sums, _TOTAL, programs, width, column, is_column, ROWS, COLUMNS)
            products = _column_sums(sums, _OF_RESIDUAL, programs, width, column, is_column, ROWS, COLUMNS)
            bias = _vector(residual_bias, column, is_column, 0.0)
            scale = _vector(residual_scale, column, is_column, 1.0)
            _write(grad_residual_scale, column, is_column, products + total * bias)
            _write(grad_residual_bias, column, is_column, total * scale)


def launches(arch: Arch) -> Iterator[Launch]:
    """Yield a launch of every kind that the compiler makes other code of."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for width in (256, 2048, 4096, 8192, 16384):
        yield from _both(f"bfloat16 {width}", _drawn(4096, width, bf16), centered=False)
    yield from _both("float32 2048", _drawn(4096, 2048, fp32), centered=False)
    yield from _both("float16 2048", _drawn(4096, 2048, torch.float16), centered=False)
    yield from _both("norm alone 256", _drawn(4096, 256, bf16, joins=False), centered=False)
    for width in (2048, 16384):
        yield from _both(f"LayerNorm {width}", _drawn(4096, width, bf16, bias=True), centered=True)
    for width in (777, 2047, 4095):
        yield from _both(f"odd {width}", _drawn(4097, width, bf16), centered=False, wide=False)
    for width in (2048, 16384):
        cut = _drawn(4096, width + 1, bf16)
        inside = _drawn(4096, width, bf16)._replace(hidden=cut.hidden[:, 1:])
        yield from _both(f"cut {width}", inside, centered=False, wide=False)


def _drawn(rows: int, width: int, dtype: torch.dtype, *, joins: bool = True, bias: bool = False) -> Operands:
    vector = torch.empty(width, dtype=dtype, device="meta")
    hidden = torch.empty(rows, width, dtype=dtype, device="meta")
    residual = torch.empty(rows, width, dtype=torch.float32, device="meta")
    last = vector, vector if bias else None
    if not joins:
        return Operands(hidden, None, None, None, None, None, *last)
    return Operands(hidden, vector, vector, residual, vector, vector, *last)


def _both(name: str, given: Operands, *, centered: bool, wide: bool = True) -> Iterator[Launch]:
    statistics = torch.empty(2 if centered else 1, len(given.hidden), device="meta")
    joined = torch.empty(given.hidden.shape, device="meta")
    ends = (torch.empty_like(given.hidden), joined if given.joins else None, joined, statistics)
    yield Launch(f"{name} forward", partial(forward, 1e-5, centered, *given), product=False, wide=wide)
    yield Launch(f"{name} backward", partial(backward, *ends, *given), product=False, wide=wide)
