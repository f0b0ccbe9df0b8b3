"""Run routing and the experts' steps on a GPU: one kernel each, two for `sort`.

`sort` is a counting sort: one kernel counts each class in blocks of choices, torch adds the counts up, classes
first, so that they are where each class's rows of each block start, and another kernel places the choices there.

Rows of tokens move 16 bytes at a time where their width allows it. Everything is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import Arch, arch_of
from zslurm.kernels.code_object import Launch
from zslurm.kernels.experts.reference import Order
from zslurm.kernels.triton_tools import compiler_options, launching_on

_TABLE_ELEMENTS = 4096
"""Choices times classes that one workgroup compares at one time."""


def _block(classes: int) -> tuple[int, int]:
    """Return how many choices a workgroup takes, and the classes as a power of two."""
    padded = triton.next_power_of_2(max(2, classes))
    return max(4, min(256, _TABLE_ELEMENTS // padded)), padded


def choose(logits_TC: Tensor, bias_C: Tensor, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes, their probabilities, and all probabilities."""
    tokens, classes = logits_TC.shape
    classes_TK = torch.empty(tokens, choices, dtype=torch.int64, device=logits_TC.device)
    weights_TK = torch.empty(tokens, choices, dtype=torch.float32, device=logits_TC.device)
    probabilities_TC = torch.empty(tokens, classes, dtype=torch.float32, device=logits_TC.device)
    rows, padded = _block(classes)
    if tokens:
        with launching_on(logits_TC):
            _choose[(triton.cdiv(tokens, rows),)](
                logits_TC,
                bias_C,
                classes_TK,
                weights_TK,
                probabilities_TC,
                tokens,
                classes,
                choices,
                ROWS=rows,
                CLASSES=padded,
                **compiler_options(arch_of(logits_TC.device)),
            )
    return classes_TK, weights_TK, probabilities_TC


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
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CLASSES)
    is_row = row < tokens
    is_column = (column < classes)[None, :]
    there = is_row[:, None] & is_column
    offsets = row[:, None] * classes + column[None, :]
    logit = tl.load(logits + offsets, mask=there, other=0.0).to(tl.float32)
    logit = tl.where(is_column, logit, float("-inf"))
    shifted = tl.exp(logit - tl.max(logit, 1)[:, None])
    probability = shifted / tl.sum(shifted, 1)[:, None]
    tl.store(probabilities + offsets, probability, mask=there)
    preference = probability + tl.load(bias + column, mask=column < classes, other=0.0).to(tl.float32)[None, :]
    # As in torch's top-k, what is not a number comes first; the class stays one that exists.
    preference = tl.where(preference == preference, preference, float("inf"))
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
    rows, padded = _block(classes)
    if tokens:
        with launching_on(probabilities_TC):
            _choose_backward[(triton.cdiv(tokens, rows),)](
                grad_weights_TK,
                classes_TK,
                probabilities_TC,
                grad_TC,
                tokens,
                classes,
                classes_TK.shape[1],
                ROWS=rows,
                CLASSES=padded,
                **compiler_options(arch_of(probabilities_TC.device)),
            )
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
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CLASSES)
    is_row = row < tokens
    there = is_row[:, None] & (column < classes)[None, :]
    offsets = row[:, None] * classes + column[None, :]
    probability = tl.load(probabilities + offsets, mask=there, other=0.0)
    grad = tl.full((ROWS, CLASSES), 0.0, dtype=tl.float32)
    for choice in range(choices):
        own = tl.load(chosen + row * choices + choice, mask=is_row, other=0)
        weight = tl.load(grad_weights + row * choices + choice, mask=is_row, other=0.0)
        grad = tl.where(column[None, :] == own[:, None], weight[:, None], grad)
    along = tl.sum(grad * probability, 1)
    result = probability * (grad - along[:, None])
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=there)


def sort(classes_TK: Tensor, classes: int, experts: int) -> Order:
    """Sort the choices by class."""
    count = classes_TK.numel()
    order_N, back_N = torch.empty(2, count, dtype=torch.int64, device=classes_TK.device).unbind()
    rows, padded = _block(classes)
    blocks = max(1, triton.cdiv(count, rows))
    counts_CX = torch.empty(classes, blocks, dtype=torch.int32, device=classes_TK.device)
    options = compiler_options(arch_of(classes_TK.device))
    with launching_on(classes_TK):
        _count[(blocks,)](classes_TK, counts_CX, count, classes, ROWS=rows, CLASSES=padded, **options)
        up_to_CX = counts_CX.flatten().cumsum(0, dtype=torch.int32).view(classes, blocks)
        _place[(blocks,)](
            classes_TK,
            counts_CX,
            up_to_CX,
            order_N,
            back_N,
            count,
            classes,
            ROWS=rows,
            CLASSES=padded,
            **options,
        )
    ends_C = up_to_CX[:, -1]
    counts_C = ends_C.diff(prepend=ends_C.new_zeros(1)).long()
    return Order(order_N, back_N, counts_C, ends_C[:experts].contiguous())


@triton.jit
def _is_of(chosen, count, ROWS: tl.constexpr, CLASSES: tl.constexpr):
    """Return which class each of a block's choices is of, as zeros and ones."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    own = tl.load(chosen + row, mask=row < count, other=-1)
    return row, own, (own[:, None] == tl.arange(0, CLASSES)[None, :]).to(tl.int32)


@triton.jit
def _count(chosen, counts, count, classes, ROWS: tl.constexpr, CLASSES: tl.constexpr):
    _, _, is_of = _is_of(chosen, count, ROWS, CLASSES)
    column = tl.arange(0, CLASSES)
    place = column * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts + place, tl.sum(is_of, 0), mask=column < classes)


@triton.jit
def _place(chosen, counts, up_to, order, back, count, classes, ROWS: tl.constexpr, CLASSES: tl.constexpr):
    row, own, is_of = _is_of(chosen, count, ROWS, CLASSES)
    is_row = row < count
    before = tl.sum(is_of * tl.cumsum(is_of, 0), 1) - 1  # others of its class in this block
    block = own * tl.num_programs(0) + tl.program_id(0)
    start = tl.load(up_to + block, mask=is_row, other=0) - tl.load(counts + block, mask=is_row, other=0)
    place = (start + before).to(tl.int64)
    tl.store(back + row, place, mask=is_row)
    tl.store(order + place, row, mask=is_row)


def _tile(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return rows and columns that a workgroup of four waves moves at one time: on AMD's 16 bytes a lane."""
    elements = 4096 // dtype.itemsize
    columns = min(512, triton.next_power_of_2(max(16, width)))
    return elements // columns, columns


def gather(x_TD: Tensor, order_N: Tensor, choices: int) -> Tensor:
    """Return for each row the token that its choice is of."""
    count, width = len(order_N), x_TD.shape[1]
    out_ND = x_TD.new_empty(count, width)
    rows, columns = _tile(width, x_TD.dtype)
    if out_ND.numel():
        with launching_on(x_TD):
            _gather[(triton.cdiv(count, rows), triton.cdiv(width, columns))](
                x_TD,
                order_N,
                out_ND,
                count,
                width,
                choices,
                ROWS=rows,
                COLUMNS=columns,
                **compiler_options(arch_of(x_TD.device)),
            )
    return out_ND


@triton.jit
def _gather(x, order, out, count, width, choices, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(order + row, mask=row < count, other=0) // choices
    there = (row < count)[:, None] & (column < width)[None, :]
    values = tl.load(x + token[:, None] * width + column[None, :], mask=there)
    tl.store(out + row[:, None] * width + column[None, :], values, mask=there)


def activate(both_NO: Tensor, weights_N: Tensor) -> Tensor:
    """Return SwiGLU times the router's weight."""
    count, inner = len(both_NO), both_NO.shape[1] // 2
    out_NF = both_NO.new_empty(count, inner)
    rows, columns = _tile(inner, both_NO.dtype)
    if out_NF.numel():
        with launching_on(both_NO):
            _activate[(triton.cdiv(count, rows), triton.cdiv(inner, columns))](
                both_NO,
                weights_N,
                out_NF,
                count,
                inner,
                ROWS=rows,
                COLUMNS=columns,
                **compiler_options(arch_of(both_NO.device)),
            )
    return out_NF


@triton.jit
def _activate(both, weights, out, count, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < count)[:, None] & (column < inner)[None, :]
    offsets = row[:, None] * inner + column[None, :]
    first = both + row[:, None] * (2 * inner) + column[None, :]
    gate = tl.load(first, mask=there, other=0.0).to(tl.float32)
    up = tl.load(first + inner, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weights + row, mask=row < count, other=0.0)
    active = gate / (1 + tl.exp(-gate)) * up * weight[:, None]
    tl.store(out + offsets, active.to(out.dtype.element_ty), mask=there)


def activate_backward(grad_NF: Tensor, both_NO: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activation once more, and the gradients of what went into it and of the weights."""
    count, inner = grad_NF.shape
    active_NF, grad_both_NO = torch.empty_like(grad_NF), torch.empty_like(both_NO)
    grad_weights_N = torch.zeros_like(weights_N) if not inner else torch.empty_like(weights_N)
    rows, columns = _tile(inner, both_NO.dtype)
    if grad_NF.numel():
        with launching_on(grad_NF):
            _activate_backward[(triton.cdiv(count, rows),)](
                grad_NF,
                both_NO,
                weights_N,
                active_NF,
                grad_both_NO,
                grad_weights_N,
                count,
                inner,
                ROWS=rows,
                COLUMNS=columns,
                **compiler_options(arch_of(grad_NF.device)),
            )
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
        there = is_row[:, None] & (column < inner)[None, :]
        offsets = row[:, None] * inner + column[None, :]
        pair = row[:, None] * (2 * inner) + column[None, :]
        grad = tl.load(grads + offsets, mask=there, other=0.0).to(tl.float32)
        gate = tl.load(both + pair, mask=there, other=0.0).to(tl.float32)
        up = tl.load(both + inner + pair, mask=there, other=0.0).to(tl.float32)
        share = 1 / (1 + tl.exp(-gate))
        silu = gate * share
        active = silu * up
        total += tl.sum(grad * active, 1)
        grad *= weight
        slope = share * (1 + gate * (1 - share))
        tl.store(actives + offsets, (active * weight).to(actives.dtype.element_ty), mask=there)
        tl.store(grad_both + pair, (grad * up * slope).to(grad_both.dtype.element_ty), mask=there)
        tl.store(grad_both + inner + pair, (grad * silu).to(grad_both.dtype.element_ty), mask=there)
    tl.store(grad_weights + row, total, mask=is_row)


def combine(
    y_ND: Tensor, x_TD: Tensor, weights_TK: Tensor, back_N: Tensor, ends_E: Tensor, identity: bool
) -> Tensor:
    """Sum up each token's choices."""
    (tokens, width), choices = x_TD.shape, weights_TK.shape[1]
    out_TD = torch.empty_like(x_TD)
    rows, columns = _tile(width, x_TD.dtype)
    if out_TD.numel():
        with launching_on(x_TD):
            _combine[(triton.cdiv(tokens, rows), triton.cdiv(width, columns))](
                y_ND,
                x_TD,
                weights_TK,
                back_N,
                ends_E,
                out_TD,
                tokens,
                width,
                len(ends_E),
                choices,
                IDENTITY=identity,
                ROWS=rows,
                COLUMNS=columns,
                **compiler_options(arch_of(x_TD.device)),
            )
    return out_TD


@triton.jit
def _combine(
    y,
    x,
    weights,
    back,
    ends,
    out,
    tokens,
    width,
    experts,
    choices,
    IDENTITY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = token < tokens
    is_column = (column < width)[None, :]
    end = tl.load(ends + experts - 1)
    total = tl.full((ROWS, COLUMNS), 0.0, dtype=tl.float32)
    for choice in range(choices):
        row = tl.load(back + token * choices + choice, mask=is_token, other=0)
        has_expert = is_token & (row < end)
        of_row = has_expert[:, None] & is_column
        total += tl.load(y + row[:, None] * width + column[None, :], mask=of_row, other=0.0).to(tl.float32)
        if IDENTITY:
            skips = is_token & (row >= end)
            weight = tl.load(weights + token * choices + choice, mask=skips, other=0.0)
            of_token = skips[:, None] & is_column
            value = tl.load(x + token[:, None] * width + column[None, :], mask=of_token, other=0.0)
            total += tl.where(of_token, value.to(tl.float32) * weight[:, None], 0.0)
    there = is_token[:, None] & is_column
    tl.store(out + token[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=there)


def weights_backward(
    grad_weights_N: Tensor, grad_TD: Tensor, x_TD: Tensor, back_N: Tensor, ends_E: Tensor, identity: bool
) -> Tensor:
    """Return the gradient of the weights [T, K]."""
    tokens, width = x_TD.shape
    choices = len(back_N) // max(1, tokens)
    out_TK = grad_weights_N.new_empty(tokens, choices)
    rows, columns = _tile(width, x_TD.dtype)
    if out_TK.numel():
        with launching_on(x_TD):
            _weights_backward[(triton.cdiv(tokens, rows),)](
                grad_weights_N,
                grad_TD,
                x_TD,
                back_N,
                ends_E,
                out_TK,
                tokens,
                width,
                len(ends_E),
                choices,
                IDENTITY=identity,
                ROWS=rows,
                COLUMNS=columns,
                **compiler_options(arch_of(x_TD.device)),
            )
    return out_TK


@triton.jit
def _weights_backward(
    grad_weights,
    grads,
    x,
    back,
    ends,
    out,
    tokens,
    width,
    experts,
    choices,
    IDENTITY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = token < tokens
    end = tl.load(ends + experts - 1)
    of_skip = tl.full((ROWS,), 0.0, dtype=tl.float32)
    if IDENTITY:
        skips = token < 0
        for choice in range(choices):
            skips |= tl.load(back + token * choices + choice, mask=is_token, other=0) >= end
        skips &= is_token
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            there = skips[:, None] & (column < width)[None, :]
            offsets = token[:, None] * width + column[None, :]
            grad = tl.load(grads + offsets, mask=there, other=0.0).to(tl.float32)
            of_skip += tl.sum(grad * tl.load(x + offsets, mask=there, other=0.0).to(tl.float32), 1)
    for choice in range(choices):
        row = tl.load(back + token * choices + choice, mask=is_token, other=0)
        has_expert = is_token & (row < end)
        of_row = tl.load(grad_weights + row, mask=has_expert, other=0.0)
        tl.store(out + token * choices + choice, tl.where(has_expert, of_row, of_skip), mask=is_token)


def launches(arch: Arch) -> Iterator[Launch]:
    """Yield a launch of every kind that the compiler makes other code of: ZAYA1's experts, and odd widths."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    ends = empty(16, dtype=torch.int32)
    for tokens, choices, classes in ((4096, 1, 17), (4096, 8, 160), (4001, 2, 5)):
        name = f"{classes} classes, {choices} choices"
        probabilities, weights = empty(tokens, classes), empty(tokens, choices)
        chosen = empty(tokens, choices, dtype=torch.int64)
        few = {"product": False, "wide": False}
        for dtype in (torch.bfloat16, torch.float32):
            short = str(dtype).removeprefix("torch.")
            logits = empty(tokens, classes, dtype=dtype)
            yield Launch(f"choose {short} {name}", partial(choose, logits, empty(classes), choices), **few)
            yield Launch(
                f"choose_backward {short} {name}",
                partial(choose_backward, weights, chosen, probabilities, dtype),
                **few,
            )
        yield Launch(f"sort {name}", partial(sort, chosen, classes, classes - 1), **few)
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, width, choices in ((4096, 2048, 1), (4096, 2048, 2), (4001, 77, 2)):
            moved = {"product": False, "wide": width % 16 == 0}
            count = tokens * choices
            x, y, weights = (
                empty(tokens, width, dtype=dtype),
                empty(count, width, dtype=dtype),
                empty(tokens, choices),
            )
            rows, weights_of_rows = empty(count, dtype=torch.int64), empty(count)
            both = empty(count, 2 * width, dtype=dtype)
            name = f"{str(dtype).removeprefix('torch.')} {width} wide, {choices} choices"
            yield Launch(f"gather {name}", partial(gather, x, rows, choices), **moved)
            yield Launch(f"activate {name}", partial(activate, both, weights_of_rows), **moved)
            yield Launch(
                f"activate_backward {name}", partial(activate_backward, y, both, weights_of_rows), **moved
            )
            for identity in (True, False):
                rest = rows, ends, identity
                kind = f"{name}, skipping {'identity' if identity else 'zero'}"
                yield Launch(f"combine {kind}", partial(combine, y, x, weights, *rest), **moved)
                yield Launch(
                    f"weights_backward {kind}",
                    partial(weights_backward, weights_of_rows, x, x, *rest),
                    product=False,
                    wide=identity and width % 16 == 0,
                )
