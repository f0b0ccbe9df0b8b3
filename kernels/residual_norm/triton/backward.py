"""The gradients: a kernel over the rows with partial sums for the vectors, and one that adds these up."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import arch_of
from zslurm.kernels.residual_norm.operands import NormOperands
from zslurm.kernels.residual_norm.reference import Gradients
from zslurm.kernels.residual_norm.triton.tiles import (
    Rows,
    backward_configuration,
    for_kernels,
    held_in_registers,
    rows_of,
    scales,
    shape_of,
    store,
    tile_of,
    vector,
)
from zslurm.kernels.triton_tools import launch

_REDUCED_ROWS, _REDUCED_COLUMNS = 64, 32  # of the partial sums


class _Given(NamedTuple):
    """What comes in beside the operands: the gradients of x and t, and the statistics [K, R] of each row."""

    x: Rows
    joined: Rows
    statistics: Tensor


def backward(
    grad_x: Tensor | None,
    grad_joined: Tensor | None,
    joined: Tensor,
    statistics: Tensor,
    *operands: Tensor | None,
) -> Gradients:
    """Return the gradients of the operands, as the reference does."""
    operands_given = NormOperands(*operands)  # type: ignore[arg-type]
    hidden, width = operands_given.hidden, operands_given.hidden.shape[-1]
    rows = hidden.numel() // width
    out = NormOperands(*(None if operand is None else _empty(operand) for operand in operands_given))  # type: ignore[arg-type]
    if grad_x is None:
        out = out._replace(weight=None, bias=None)  # type: ignore[arg-type]
    if not rows:
        return tuple(None if operand is None else operand.zero_() for operand in out)
    arch = arch_of(hidden.device)
    chosen = backward_configuration(arch, rows, width)
    kinds = 4 if out.bias is None else 5
    sums_KPD = hidden.new_empty((kinds, chosen.programs, width), dtype=torch.float32)
    packed = for_kernels(operands_given)
    launch(
        _backward_rows if held_in_registers(arch, width) else _backward_long_rows,
        chosen.programs,
        hidden,
        packed,
        _Given(rows_of(grad_x), rows_of(grad_joined), statistics),
        out,
        sums_KPD,
        rows,
        width,
        SHAPE=shape_of(chosen, rows, width, centered=len(statistics) == 2),
        num_warps=chosen.num_warps,
    )
    vectors = packed._replace(hidden=None, residual=None), out._replace(hidden=None, residual=None)  # type: ignore[arg-type]
    if any(operand is not None for operand in vectors[1]):
        blocks = triton.cdiv(width, _REDUCED_COLUMNS)
        sizes = chosen.programs, width, _REDUCED_ROWS, _REDUCED_COLUMNS
        launch(_sum_partials, (blocks, 3), hidden, sums_KPD, *vectors, *sizes, num_warps=4)
    return tuple(out)


def _empty(operand: Tensor) -> Tensor:
    return torch.empty(operand.shape, dtype=operand.dtype, device=operand.device)


_OF_WEIGHT, _TOTAL, _OF_HIDDEN, _OF_RESIDUAL, _OF_BIAS = (tl.constexpr(index) for index in range(5))
# Where each partial sum [P, D] is among the others: of G n, g, g h, g r and G.


@triton.jit
def _row_statistics(statistics, rows, row, is_row, CENTERED: tl.constexpr):
    """Load the inverse roots and means [ROWS, 1]; zeros behind the last row."""
    inverse = tl.load(statistics + row, mask=is_row, other=0.0)
    if CENTERED:
        mean = tl.load(statistics + rows + row, mask=is_row, other=0.0)
    else:
        mean = tl.zeros(row.shape, tl.float32)
    return inverse, mean


@triton.jit
def _add_up(sums, index: tl.constexpr, width, column, is_column, values):
    """Store a workgroup's partial sum, over the rows of its tile [ROWS, COLUMNS]."""
    offset = (tl.num_programs(0) * index + tl.program_id(0)).to(tl.int64) * width
    tl.store(sums + offset + column, tl.sum(values, axis=0, keep_dims=True), mask=is_column)


@triton.jit
def _add_up_streams(sums, given, width, column, is_column, total, of_hidden, of_residual):
    """Store the partial sums for the scales and biases that there are."""
    if given.hidden_scale is not None or given.residual_scale is not None:
        _add_up(sums, _TOTAL, width, column, is_column, total)
    if given.hidden_scale is not None:
        _add_up(sums, _OF_HIDDEN, width, column, is_column, of_hidden)
    if given.residual_scale is not None:
        _add_up(sums, _OF_RESIDUAL, width, column, is_column, of_residual)


@triton.jit(do_not_specialize=["rows"])
def _backward_rows(given, grad, out, sums, rows, width, SHAPE: tl.constexpr):
    """Write the gradients of both streams, and add up those of the vectors over all tiles of this workgroup."""
    column = tl.arange(0, SHAPE.COLUMNS)[None, :]
    is_column = (column < width) | SHAPE.WHOLE
    in_rows = tl.arange(0, SHAPE.ROWS)[:, None]
    if SHAPE.HOISTED:
        scale, other_scale, shift = scales(given, column, is_column)
        gain = vector(given.weight, column, is_column, 1.0)
    of_weight = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    of_bias = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    total = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    of_hidden = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    of_residual = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)

    for tile in range(tl.program_id(0), (rows + SHAPE.ROWS - 1) // SHAPE.ROWS, tl.num_programs(0)):
        row = (tile * SHAPE.ROWS + in_rows).to(tl.int64)
        is_row = (row < rows) | SHAPE.WHOLE
        inside = is_row & is_column
        h = tile_of(given.hidden, row, column, inside)
        r = tile_of(given.residual, row, column, inside)
        g = tile_of(grad.joined, row, column, inside)
        if not SHAPE.HOISTED:
            scale, other_scale, shift = scales(given, column, is_column)
            gain = vector(given.weight, column, is_column, 1.0)
        if grad.x.first is not None:
            grad_row = tile_of(grad.x, row, column, inside)
            inverse, mean = _row_statistics(grad.statistics, rows, row, is_row, SHAPE.CENTERED)
            normal = (h * scale + (r * other_scale + shift) - mean) * inverse
            weighted = grad_row * gain
            along = tl.sum(weighted * normal, axis=1, keep_dims=True) / width
            across = weighted - normal * along
            if SHAPE.CENTERED:
                across -= tl.sum(weighted, axis=1, keep_dims=True) / width
            g += across * inverse
            of_weight += grad_row * normal
            of_bias += grad_row
        store(out.hidden, row, width, column, inside, g * scale)
        store(out.residual, row, width, column, inside, g * other_scale)
        total += g
        of_hidden += g * h
        of_residual += g * r

    if grad.x.first is not None:
        _add_up(sums, _OF_WEIGHT, width, column, is_column, of_weight)
    if out.bias is not None:
        _add_up(sums, _OF_BIAS, width, column, is_column, of_bias)
    _add_up_streams(sums, given, width, column, is_column, total, of_hidden, of_residual)


@triton.jit(do_not_specialize=["rows"])
def _backward_long_rows(given, grad, out, sums, rows, width, SHAPE: tl.constexpr):
    """Do the same for one tile of long rows: a pass for the sums along the rows, one for the gradients."""
    in_columns = tl.arange(0, SHAPE.COLUMNS)[None, :]
    row = (tl.program_id(0) * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)[:, None]).to(tl.int64)
    is_row = (row < rows) | SHAPE.WHOLE
    inverse, mean = _row_statistics(grad.statistics, rows, row, is_row, SHAPE.CENTERED)
    products = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    plain = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    if grad.x.first is not None:
        for first in range(0, width, SHAPE.COLUMNS):
            column = first + in_columns
            is_column = (column < width) | SHAPE.WHOLE
            inside = is_row & is_column
            scale, other_scale, shift = scales(given, column, is_column)
            h = tile_of(given.hidden, row, column, inside)
            r = tile_of(given.residual, row, column, inside)
            normal = (h * scale + (r * other_scale + shift) - mean) * inverse
            gain = vector(given.weight, column, is_column, 1.0)
            weighted = tile_of(grad.x, row, column, inside) * gain
            products += weighted * normal
            if SHAPE.CENTERED:
                plain += weighted
    along = tl.sum(products, axis=1, keep_dims=True) / width
    level = tl.sum(plain, axis=1, keep_dims=True) / width

    for first in range(0, width, SHAPE.COLUMNS):
        column = first + in_columns
        is_column = (column < width) | SHAPE.WHOLE
        inside = is_row & is_column
        scale, other_scale, shift = scales(given, column, is_column)
        h = tile_of(given.hidden, row, column, inside)
        r = tile_of(given.residual, row, column, inside)
        g = tile_of(grad.joined, row, column, inside)
        if grad.x.first is not None:
            normal = (h * scale + (r * other_scale + shift) - mean) * inverse
            grad_row = tile_of(grad.x, row, column, inside)
            gain = vector(given.weight, column, is_column, 1.0)
            g += (grad_row * gain - normal * along - level) * inverse
            _add_up(sums, _OF_WEIGHT, width, column, is_column, grad_row * normal)
            if out.bias is not None:
                _add_up(sums, _OF_BIAS, width, column, is_column, grad_row)
        store(out.hidden, row, width, column, inside, g * scale)
        store(out.residual, row, width, column, inside, g * other_scale)
        _add_up_streams(sums, given, width, column, is_column, g, g * h, g * r)


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
def _sum_partials(sums, given, out, programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up the partial sums: of the norm's vectors, of hidden's, or of the residual stream's."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_column = column < width
    if tl.program_id(1) == 0:
        if out.weight is not None:
            total = _column_sums(sums, _OF_WEIGHT, programs, width, column, is_column, ROWS, COLUMNS)
            _write(out.weight, column, is_column, total)
        if out.bias is not None:
            total = _column_sums(sums, _OF_BIAS, programs, width, column, is_column, ROWS, COLUMNS)
            _write(out.bias, column, is_column, total)
    elif tl.program_id(1) == 1:
        if out.hidden_scale is not None:
            total = _column_sums(sums, _TOTAL, programs, width, column, is_column, ROWS, COLUMNS)
            products = _column_sums(sums, _OF_HIDDEN, programs, width, column, is_column, ROWS, COLUMNS)
            bias = vector(given.hidden_bias, column, is_column, 0.0)
            scale = vector(given.hidden_scale, column, is_column, 1.0)
            _write(out.hidden_scale, column, is_column, products + total * bias)
            _write(out.hidden_bias, column, is_column, total * scale)
    else:
        if out.residual_scale is not None:
            total = _column_sums(sums, _TOTAL, programs, width, column, is_column, ROWS, COLUMNS)
            products = _column_sums(sums, _OF_RESIDUAL, programs, width, column, is_column, ROWS, COLUMNS)
            bias = vector(given.residual_bias, column, is_column, 0.0)
            scale = vector(given.residual_scale, column, is_column, 1.0)
            _write(out.residual_scale, column, is_column, products + total * bias)
            _write(out.residual_bias, column, is_column, total * scale)
