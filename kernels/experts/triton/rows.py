"""Gather rows, activate them, and combine them at their tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.triton_tools import launch


def _tile(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Return rows and columns that a workgroup of four waves moves at one time: on AMD's 16 bytes a lane."""
    elements = 4096 // dtype.itemsize
    columns = min(512, triton.next_power_of_2(max(16, width)))
    return {"ROWS": elements // columns, "COLUMNS": columns}


def _grid(tile: dict[str, int], rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["COLUMNS"])


@triton.jit
def _of_tile(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a workgroup's rows and columns, and which of the elements there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column, (row < rows)[:, None] & (column < width)[None, :]


def gather(x_TD: Tensor, order_N: Tensor, choices: int) -> Tensor:
    """Return for each row the token that its choice is of."""
    count, width = len(order_N), x_TD.shape[1]
    out_ND = x_TD.new_empty(count, width)
    tile = _tile(width, x_TD.dtype)
    if out_ND.numel():
        launch(_gather, _grid(tile, count, width), x_TD, x_TD, order_N, out_ND, count, width, choices, **tile)
    return out_ND


@triton.jit
def _gather(x, order, out, count, width, choices, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, is_inside = _of_tile(count, width, ROWS, COLUMNS)
    token = tl.load(order + row, mask=row < count, other=0) // choices
    values = tl.load(x + token[:, None] * width + column[None, :], mask=is_inside)
    tl.store(out + row[:, None] * width + column[None, :], values, mask=is_inside)


def activate(both_NO: Tensor, weights_N: Tensor) -> Tensor:
    """Return SwiGLU times the router's weight."""
    count, inner = len(both_NO), both_NO.shape[1] // 2
    out_NF = both_NO.new_empty(count, inner)
    tile = _tile(inner, both_NO.dtype)
    if out_NF.numel():
        launch(_activate, _grid(tile, count, inner), both_NO, both_NO, weights_N, out_NF, count, inner, **tile)
    return out_NF


@triton.jit
def _activate(both, weights, out, count, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, is_inside = _of_tile(count, inner, ROWS, COLUMNS)
    first = both + row[:, None] * (2 * inner) + column[None, :]
    gate = tl.load(first, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(first + inner, mask=is_inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row, mask=row < count, other=0.0)
    active = gate / (1 + tl.exp(-gate)) * up * weight[:, None]
    tl.store(out + row[:, None] * inner + column[None, :], active.to(out.dtype.element_ty), mask=is_inside)


def activate_backward(grad_NF: Tensor, both_NO: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activation again, and the gradients of what went into it and of the weights."""
    count, inner = grad_NF.shape
    active_NF, grad_both_NO = torch.empty_like(grad_NF), torch.empty_like(both_NO)
    grad_weights_N = torch.zeros_like(weights_N) if not inner else torch.empty_like(weights_N)
    tile = _tile(inner, both_NO.dtype)
    if grad_NF.numel():
        operands = grad_NF, both_NO, weights_N, active_NF, grad_both_NO, grad_weights_N, count, inner
        launch(_activate_backward, triton.cdiv(count, tile["ROWS"]), grad_NF, *operands, **tile)
    return active_NF, grad_both_NO, grad_weights_N


@triton.jit
def _activate_backward(
    grads,
    both,
    weights,
    actives,
    grad_both,
    grad_weights,
    count,
    inner,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    weight = tl.load(weights + row, mask=is_row, other=0.0)[:, None]
    total = tl.full((ROWS,), 0.0, dtype=tl.float32)
    for start in range(0, inner, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_inside = is_row[:, None] & (column < inner)[None, :]
        offsets = row[:, None] * inner + column[None, :]
        pair = row[:, None] * (2 * inner) + column[None, :]
        grad = tl.load(grads + offsets, mask=is_inside, other=0.0).to(tl.float32)
        gate = tl.load(both + pair, mask=is_inside, other=0.0).to(tl.float32)
        up = tl.load(both + inner + pair, mask=is_inside, other=0.0).to(tl.float32)
        share = 1 / (1 + tl.exp(-gate))
        silu = gate * share
        active = silu * up
        total += tl.sum(grad * active, 1)
        grad *= weight
        slope = share * (1 + gate * (1 - share))
        tl.store(actives + offsets, (active * weight).to(actives.dtype.element_ty), mask=is_inside)
        tl.store(grad_both + pair, (grad * up * slope).to(grad_both.dtype.element_ty), mask=is_inside)
        tl.store(grad_both + inner + pair, (grad * silu).to(grad_both.dtype.element_ty), mask=is_inside)
    tl.store(grad_weights + row, total, mask=is_row)


class _Tokens(NamedTuple):
    """The tokens, and the row of each of their choices."""

    x: Tensor
    back: Tensor
    ends: Tensor
    tokens: int
    width: int
    experts: int
    choices: int


def combine(
    y_ND: Tensor, x_TD: Tensor, weights_TK: Tensor, back_N: Tensor, ends_E: Tensor, identity: bool
) -> Tensor:
    """Sum up each token's choices."""
    tokens, width = x_TD.shape
    out_TD, tile = torch.empty_like(x_TD), _tile(width, x_TD.dtype)
    tokens_arguments = _Tokens(x_TD, back_N, ends_E, tokens, width, len(ends_E), weights_TK.shape[1])
    if out_TD.numel():
        operands = tokens_arguments, y_ND, weights_TK, out_TD, identity
        launch(_combine, _grid(tile, tokens, width), x_TD, *operands, **tile)
    return out_TD


@triton.jit
def _combine(given, y, weights, out, IDENTITY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    token, column, _ = _of_tile(given.tokens, given.width, ROWS, COLUMNS)
    is_token = token < given.tokens
    is_column = (column < given.width)[None, :]
    end = tl.load(given.ends + given.experts - 1)
    total = tl.full((ROWS, COLUMNS), 0.0, dtype=tl.float32)
    for choice in range(given.choices):
        row = tl.load(given.back + token * given.choices + choice, mask=is_token, other=0)
        of_row = (is_token & (row < end))[:, None] & is_column
        values = tl.load(y + row[:, None] * given.width + column[None, :], mask=of_row, other=0.0)
        total += values.to(tl.float32)
        if IDENTITY:
            skips = is_token & (row >= end)
            weight = tl.load(weights + token * given.choices + choice, mask=skips, other=0.0)
            of_token = skips[:, None] & is_column
            value = tl.load(given.x + token[:, None] * given.width + column[None, :], mask=of_token, other=0.0)
            total += tl.where(of_token, value.to(tl.float32) * weight[:, None], 0.0)
    is_inside = is_token[:, None] & is_column
    out += token[:, None] * given.width + column[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=is_inside)


def weights_backward(
    grad_weights_N: Tensor, grad_TD: Tensor, x_TD: Tensor, back_N: Tensor, ends_E: Tensor, identity: bool
) -> Tensor:
    """Return the gradient of the weights [T, K]."""
    tokens, width = x_TD.shape
    choices = len(back_N) // max(1, tokens)
    out_TK, tile = grad_weights_N.new_empty(tokens, choices), _tile(width, x_TD.dtype)
    tokens_arguments = _Tokens(x_TD, back_N, ends_E, tokens, width, len(ends_E), choices)
    if out_TK.numel():
        operands = tokens_arguments, grad_weights_N, grad_TD, out_TK, identity
        launch(_weights_backward, triton.cdiv(tokens, tile["ROWS"]), x_TD, *operands, **tile)
    return out_TK


@triton.jit
def _weights_backward(
    given, grad_weights, grads, out, IDENTITY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = token < given.tokens
    end = tl.load(given.ends + given.experts - 1)
    of_skip = tl.full((ROWS,), 0.0, dtype=tl.float32)
    if IDENTITY:
        skips = token < 0
        for choice in range(given.choices):
            skips |= tl.load(given.back + token * given.choices + choice, mask=is_token, other=0) >= end
        skips &= is_token
        for start in range(0, given.width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            is_inside = skips[:, None] & (column < given.width)[None, :]
            offsets = token[:, None] * given.width + column[None, :]
            grad = tl.load(grads + offsets, mask=is_inside, other=0.0).to(tl.float32)
            of_skip += tl.sum(grad * tl.load(given.x + offsets, mask=is_inside, other=0.0).to(tl.float32), 1)
    for choice in range(given.choices):
        row = tl.load(given.back + token * given.choices + choice, mask=is_token, other=0)
        has_expert = is_token & (row < end)
        of_row = tl.load(grad_weights + row, mask=has_expert, other=0.0)
        result = tl.where(has_expert, of_row, of_skip)
        tl.store(out + token * given.choices + choice, result, mask=is_token)
