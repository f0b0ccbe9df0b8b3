"""Run routing and the experts' steps on a GPU: one kernel each, two for `sort`.

`sort` is a counting sort: one kernel counts each class in blocks of choices, torch adds the counts up, classes
first, so that they are the start of each class's rows of each block, and another kernel places the choices there.

Rows of tokens move 16 bytes at a time if their width allows it. Everything is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import Arch
from zslurm.kernels.checks import short
from zslurm.kernels.code_object import KernelLaunch
from zslurm.kernels.experts.reference import Order
from zslurm.kernels.triton_tools import launch

_TABLE_ELEMENTS = 4096
"""Choices times classes that one workgroup compares at one time."""


def _block(classes: int) -> dict[str, int]:
    """Return how many choices a workgroup takes, and the classes as a power of two."""
    padded = triton.next_power_of_2(max(2, classes))
    return {"ROWS": max(4, min(256, _TABLE_ELEMENTS // padded)), "CLASSES": padded}


def choose(logits_TC: Tensor, bias_C: Tensor, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes, their probabilities, and all probabilities."""
    tokens, classes = logits_TC.shape
    classes_TK = torch.empty(tokens, choices, dtype=torch.int64, device=logits_TC.device)
    weights_TK = torch.empty(tokens, choices, dtype=torch.float32, device=logits_TC.device)
    probabilities_TC = torch.empty(tokens, classes, dtype=torch.float32, device=logits_TC.device)
    block = _block(classes)
    if tokens:
        operands = logits_TC, bias_C, classes_TK, weights_TK, probabilities_TC, tokens, classes, choices
        launch(_choose, triton.cdiv(tokens, block["ROWS"]), logits_TC, *operands, **block)
    return classes_TK, weights_TK, probabilities_TC


@triton.jit
def _table(tokens, classes, ROWS: tl.constexpr, CLASSES: tl.constexpr):
    """Return a workgroup's tokens, the classes, and the offsets of both in a table [T, C] and which there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CLASSES)
    is_inside = (row < tokens)[:, None] & (column < classes)[None, :]
    return row, column, row[:, None] * classes + column[None, :], is_inside


@triton.jit
def _choose(
    logits,
    bias,
    chosen,
    weights,
    probabilities,
    tokens,
    classes,
    choices,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    row, column, offsets, is_inside = _table(tokens, classes, ROWS, CLASSES)
    is_row = row < tokens
    is_column = (column < classes)[None, :]
    logit = tl.load(logits + offsets, mask=is_inside, other=0.0).to(tl.float32)
    logit = tl.where(is_column, logit, float("-inf"))
    shifted = tl.exp(logit - tl.max(logit, 1)[:, None])
    probability = shifted / tl.sum(shifted, 1)[:, None]
    tl.store(probabilities + offsets, probability, mask=is_inside)
    preference = probability + tl.load(bias + column, mask=column < classes, other=0.0).to(tl.float32)[None, :]
    # As in torch's top-k, what is not a number comes first; the class stays one that exists.
    preference = tl.where(preference == preference, preference, float("inf"))
    preference = tl.maximum(preference, -3.4028234663852886e38)  # -inf is for those that are chosen already
    preference = tl.where(is_column, preference, float("-inf"))
    for choice in range(choices):
        best = tl.argmax(preference, 1)
        is_best = column[None, :] == best[:, None]
        weight = tl.sum(tl.where(is_best, probability, 0.0), 1)
        tl.store(chosen + row * choices + choice, best.to(tl.int64), mask=is_row)
        tl.store(weights + row * choices + choice, weight, mask=is_row)
        preference = tl.where(is_best, float("-inf"), preference)


def choose_backward(
    grad_weights_TK: Tensor, classes_TK: Tensor, probabilities_TC: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the logits' gradient."""
    tokens, classes = probabilities_TC.shape
    grad_TC = torch.empty(tokens, classes, dtype=dtype, device=probabilities_TC.device)
    block, choices = _block(classes), classes_TK.shape[1]
    if tokens:
        operands = grad_weights_TK, classes_TK, probabilities_TC, grad_TC, tokens, classes, choices
        launch(_choose_backward, triton.cdiv(tokens, block["ROWS"]), grad_TC, *operands, **block)
    return grad_TC


@triton.jit
def _choose_backward(
    grad_weights,
    chosen,
    probabilities,
    out,
    tokens,
    classes,
    choices,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    row, column, offsets, is_inside = _table(tokens, classes, ROWS, CLASSES)
    is_row = row < tokens
    probability = tl.load(probabilities + offsets, mask=is_inside, other=0.0)
    grad = tl.full((ROWS, CLASSES), 0.0, dtype=tl.float32)
    for choice in range(choices):
        selected = tl.load(chosen + row * choices + choice, mask=is_row, other=0)
        weight = tl.load(grad_weights + row * choices + choice, mask=is_row, other=0.0)
        grad = tl.where(column[None, :] == selected[:, None], weight[:, None], grad)
    along = tl.sum(grad * probability, 1)
    result = probability * (grad - along[:, None])
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_inside)


def sort(classes_TK: Tensor, classes: int, experts: int) -> Order:
    """Sort the choices by class."""
    count = classes_TK.numel()
    order_N, back_N = torch.empty(2, count, dtype=torch.int64, device=classes_TK.device).unbind()
    block = _block(classes)
    blocks = max(1, triton.cdiv(count, block["ROWS"]))
    counts_CX = torch.empty(classes, blocks, dtype=torch.int32, device=classes_TK.device)
    launch(_count, blocks, classes_TK, classes_TK, counts_CX, count, classes, **block)
    up_to_CX = counts_CX.flatten().cumsum(0, dtype=torch.int32).view(classes, blocks)
    launch(_place, blocks, classes_TK, classes_TK, counts_CX, up_to_CX, order_N, back_N, count, **block)
    ends_C = up_to_CX[:, -1]
    counts_C = ends_C.diff(prepend=ends_C.new_zeros(1)).long()
    return Order(order_N, back_N, counts_C, ends_C[:experts].contiguous())


@triton.jit
def _is_of(chosen, count, ROWS: tl.constexpr, CLASSES: tl.constexpr):
    """Return which class each of a block's choices is of, as zeros and ones."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    selected = tl.load(chosen + row, mask=row < count, other=-1)
    return row, selected, (selected[:, None] == tl.arange(0, CLASSES)[None, :]).to(tl.int32)


@triton.jit
def _count(chosen, counts, count, classes, ROWS: tl.constexpr, CLASSES: tl.constexpr):
    _, _, is_of = _is_of(chosen, count, ROWS, CLASSES)
    column = tl.arange(0, CLASSES)
    target = column.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts + target, tl.sum(is_of, 0), mask=column < classes)


@triton.jit
def _place(chosen, counts, up_to, order, back, count, ROWS: tl.constexpr, CLASSES: tl.constexpr):
    row, selected, is_of = _is_of(chosen, count, ROWS, CLASSES)
    is_row = row < count
    before = tl.sum(is_of * tl.cumsum(is_of, 0), 1) - 1  # others of its class in this block
    block = selected * tl.num_programs(0) + tl.program_id(0)
    start = tl.load(up_to + block, mask=is_row, other=0) - tl.load(counts + block, mask=is_row, other=0)
    target = (start + before).to(tl.int64)
    tl.store(back + row, target, mask=is_row)
    tl.store(order + target, row, mask=is_row)


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


def launches(arch: Arch) -> Iterator[KernelLaunch]:
    """Yield a launch of every kind that the compiler makes other code of: ZAYA1's experts, and odd widths."""
    yield from _launches_of_routing()
    yield from _launches_of_rows()


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _launches_of_routing() -> Iterator[KernelLaunch]:
    few: dict[str, Any] = {"product": False, "wide": False}
    for tokens, choices, classes in ((4096, 1, 17), (4096, 8, 160), (4001, 2, 5)):
        name = f"{classes} classes, {choices} choices"
        probabilities, weights = _empty(tokens, classes), _empty(tokens, choices)
        chosen = _empty(tokens, choices, dtype=torch.int64)
        for dtype in (torch.bfloat16, torch.float32):
            forward = partial(choose, _empty(tokens, classes, dtype=dtype), _empty(classes), choices)
            backward = partial(choose_backward, weights, chosen, probabilities, dtype)
            yield KernelLaunch(f"choose {short(dtype)} {name}", forward, **few)
            yield KernelLaunch(f"choose_backward {short(dtype)} {name}", backward, **few)
        yield KernelLaunch(f"sort {name}", partial(sort, chosen, classes, classes - 1), **few)


def _launches_of_rows() -> Iterator[KernelLaunch]:
    ends = _empty(16, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, width, choices in ((4096, 2048, 1), (4096, 2048, 2), (4001, 77, 2)):
            moved: dict[str, Any] = {"product": False, "wide": width % 16 == 0}
            count = tokens * choices
            x, y, both = (
                _empty(*shape, dtype=dtype) for shape in ((tokens, width), (count, width), (count, 2 * width))
            )
            weights, rows, of_rows = _empty(tokens, choices), _empty(count, dtype=torch.int64), _empty(count)
            name = f"{short(dtype)} {width} wide, {choices} choices"
            yield KernelLaunch(f"gather {name}", partial(gather, x, rows, choices), **moved)
            yield KernelLaunch(f"activate {name}", partial(activate, both, of_rows), **moved)
            yield KernelLaunch(f"activate_backward {name}", partial(activate_backward, y, both, of_rows), **moved)
            for identity in (True, False):
                routed = rows, ends, identity
                kind = f"{name}, skipping {'identity' if identity else 'zero'}"
                of_weights: dict[str, Any] = {**moved, "wide": identity and width % 16 == 0}
                yield KernelLaunch(f"combine {kind}", partial(combine, y, x, weights, *routed), **moved)
                yield KernelLaunch(
                    f"weights_backward {kind}", partial(weights_backward, of_rows, x, x, *routed), **of_weights
                )
