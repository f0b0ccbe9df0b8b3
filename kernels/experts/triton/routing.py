"""Choose classes, and sort the choices by class."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
