"""Join and normalise: the forward kernels, of rows that a workgroup holds and of longer ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import arch_of
from zslurm.kernels.residual_norm.operands import NormOperands
from zslurm.kernels.residual_norm.triton.tiles import (
    for_kernels,
    forward_configuration,
    held_in_registers,
    scales,
    shape_of,
    store,
    tile_of,
    vector,
)
from zslurm.kernels.triton_tools import launch


def forward(eps: float, centered: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, t and the statistics of each row, as the reference does."""
    operands_given = NormOperands(*operands)  # type: ignore[arg-type]
    hidden, width = operands_given.hidden, operands_given.hidden.shape[-1]
    rows = hidden.numel() // width
    x = torch.empty(hidden.shape, dtype=operands_given.weight.dtype, device=hidden.device)
    joined = hidden.new_empty(hidden.shape if operands_given.joins else 0, dtype=torch.float32)
    statistics_KR = hidden.new_empty((2 if centered else 1, rows), dtype=torch.float32)
    if rows:
        arch = arch_of(hidden.device)
        chosen = forward_configuration(arch, rows, width)
        launch(
            _forward_rows if held_in_registers(arch, width) else _forward_long_rows,
            chosen.programs,
            hidden,
            for_kernels(operands_given),
            x,
            joined if operands_given.joins else None,
            statistics_KR,
            rows,
            width,
            eps,
            SHAPE=shape_of(chosen, rows, width, centered=centered),
            num_warps=chosen.num_warps,
        )
    return x, joined, statistics_KR


@triton.jit(do_not_specialize=["rows", "eps"])
def _forward_rows(given, x, joined, statistics, rows, width, eps, SHAPE: tl.constexpr):
    """Join and normalise tiles of whole rows."""
    column = tl.arange(0, SHAPE.COLUMNS)[None, :]
    is_column = (column < width) | SHAPE.WHOLE
    in_rows = tl.arange(0, SHAPE.ROWS)[:, None]
    if SHAPE.HOISTED:
        scale, other_scale, shift = scales(given, column, is_column)
        gain = vector(given.weight, column, is_column, 1.0)
        offset = vector(given.bias, column, is_column, 0.0)

    for tile in range(tl.program_id(0), (rows + SHAPE.ROWS - 1) // SHAPE.ROWS, tl.num_programs(0)):
        row = (tile * SHAPE.ROWS + in_rows).to(tl.int64)
        is_row = (row < rows) | SHAPE.WHOLE
        inside = is_row & is_column
        h = tile_of(given.hidden, row, column, inside)
        r = tile_of(given.residual, row, column, inside)
        if not SHAPE.HOISTED:
            scale, other_scale, shift = scales(given, column, is_column)
        t = h * scale + (r * other_scale + shift)
        store(joined, row, width, column, inside, t)
        if SHAPE.CENTERED:
            mean = tl.sum(t, axis=1, keep_dims=True) / width
            tl.store(statistics + rows + row, mean, mask=is_row)
            t = tl.where(is_column, t - mean, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(t * t, axis=1, keep_dims=True) / width + eps)
        tl.store(statistics + row, inverse, mask=is_row)
        if not SHAPE.HOISTED:
            gain = vector(given.weight, column, is_column, 1.0)
            offset = vector(given.bias, column, is_column, 0.0)
        store(x, row, width, column, inside, t * inverse * gain + offset)


@triton.jit
def _piece(given, row, first, width, SHAPE: tl.constexpr):
    """Return t of a piece of a row, its columns, and which of them there are."""
    column = first + tl.arange(0, SHAPE.COLUMNS)
    is_column = (column < width) | SHAPE.WHOLE
    scale, other_scale, shift = scales(given, column, is_column)
    r = tile_of(given.residual, row, column, is_column)
    t = tile_of(given.hidden, row, column, is_column) * scale + (r * other_scale + shift)
    return t, column, is_column


@triton.jit(do_not_specialize=["rows", "eps"])
def _forward_long_rows(given, x, joined, statistics, rows, width, eps, SHAPE: tl.constexpr):
    """Join and normalise rows in pieces: one pass for t and its statistics, one for x; a third for the mean."""
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((SHAPE.COLUMNS,), index, tl.int64)
        mean = 0.0
        if SHAPE.CENTERED:
            sums = tl.full((SHAPE.COLUMNS,), 0.0, tl.float32)
            for first in range(0, width, SHAPE.COLUMNS):
                t, _, is_column = _piece(given, row, first, width, SHAPE)
                sums += tl.where(is_column, t, 0.0)
            mean = tl.sum(sums, axis=0) / width
            tl.store(statistics + rows + index, mean)
        squares = tl.full((SHAPE.COLUMNS,), 0.0, tl.float32)
        for first in range(0, width, SHAPE.COLUMNS):
            t, column, is_column = _piece(given, row, first, width, SHAPE)
            store(joined, row, width, column, is_column, t)
            t = tl.where(is_column, t - mean, 0.0)
            squares += t * t
        inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)
        tl.store(statistics + index, inverse)
        for first in range(0, width, SHAPE.COLUMNS):
            t, column, is_column = _piece(given, row, first, width, SHAPE)
            gain = vector(given.weight, column, is_column, 1.0)
            offset = vector(given.bias, column, is_column, 0.0)
            store(x, row, width, column, is_column, (t - mean) * inverse * gain + offset)
