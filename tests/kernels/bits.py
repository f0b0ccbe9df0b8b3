"""Compare tensors bit by bit, and make those that kernels go wrong on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 8192
"""Elements that one block of a multi-tensor kernel works on."""

SIZES = (0, 1, 2, 7, 8, 9, 15, 255, 2047, 2048, 2049, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1234)

ODD_VALUES = (
    0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 3.4028234e38, -3.4028234e38,
    1e-38, 1e-42, -1.4e-45, 1e20, 1e-20, 1.00390625, 1.01171875, 0.1,
)  # fmt: skip
"""Zeros, what is not finite, the largest, subnormal ones, and ties of rounding to bf16."""

_INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Fail unless all elements have the same bits; every NaN counts as the same."""
    assert len(found) == len(expected)
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        nan = ours.isnan()
        assert torch.equal(nan, theirs.isnan()), index
        integers = _INTEGERS[ours.dtype]
        zero = torch.zeros((), dtype=ours.dtype)
        bits = [torch.where(nan, zero, tensor).contiguous().view(integers) for tensor in (ours, theirs)]
        assert torch.equal(*bits), f"tensor {index} {tuple(ours.shape)}: {int((bits[0] != bits[1]).sum())} differ"


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    """Normal values, some of them odd ones, in different places."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator)
    flat = values.view(-1)
    for index, value in enumerate(ODD_VALUES):
        place = (index * 37 + seed * 11) % 97
        if place < len(flat):
            flat[place] = value
    return values


def with_offset(values: Tensor, offset: int, guard: float = 7.0) -> tuple[Tensor, Tensor]:
    """A copy that begins `offset` elements into a buffer, and the buffer, whose other elements are the guard."""
    buffer = torch.full((values.numel() + offset + 9,), guard, dtype=values.dtype)
    view = buffer[offset : offset + values.numel()].view(values.shape)
    view.copy_(values)
    return view, buffer


def assert_guarded(buffer: Tensor, offset: int, numel: int, guard: float = 7.0) -> None:
    """Fail if an element next to the view was written."""
    assert bool((buffer[:offset] == guard).all())
    assert bool((buffer[offset + numel :] == guard).all())
