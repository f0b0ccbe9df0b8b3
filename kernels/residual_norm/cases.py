"""Cases of a stage's entry, forward and backward: what it is checked and measured on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from zslurm.kernels.case import TOLERANCE, Call, Case, drawn
from zslurm.kernels.residual_norm import reference
from zslurm.kernels.residual_norm.operands import NormOperands

_EPS = 1e-5


def checks() -> Iterator[Case]:
    """Yield the entry of ZAYA1's stages, its first one, plain norms and LayerNorm, of odd and even widths."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows, width in ((96, 64), (33, 77), (5, 1024)):
            for kind in ("scaled", "first", "alone", "centered"):
                yield from _both(dtype, rows, width, kind)


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield zaya1-8b's entry of a stage for microbatches of several sizes."""
    for rows in (64, 512) if small else (4096, 16384, 65536):
        yield from _both(torch.bfloat16, rows, 128 if small else 2048, "scaled")


def _both(dtype: torch.dtype, rows: int, width: int, kind: str) -> Iterator[Case]:
    name = f"{str(dtype).removeprefix('torch.')} {rows} x {width}, {kind}"
    # Hidden states and the norm in their format, the residual stream and the sum in fp32; and their gradients.
    streams = 1 if kind == "alone" else 2
    elements, narrow = rows * width, dtype.itemsize
    moved = {"forward": 2 * narrow + 8 * (streams - 1), "backward": 3 * narrow + 12 * (streams - 1)}
    for direction, make in (("forward", _forward), ("backward", _backward)):
        yield Case(
            f"residual_norm.{direction}",
            name,
            partial(make, dtype, rows, width, kind),
            TOLERANCE[dtype],
            bytes=float(moved[direction] * elements),
            axis="rows",
        )


def _operands(dtype: torch.dtype, rows: int, width: int, kind: str, device: torch.device) -> NormOperands:
    def vector(seed: int, around: float) -> Tensor:
        return (around + 0.1 * drawn(device, torch.float32, width, seed=seed)).to(dtype)

    scaled = kind in ("scaled", "first")
    streams = kind in ("scaled", "centered")
    return NormOperands(
        hidden=drawn(device, dtype, rows, width),
        hidden_scale=vector(1, 1.0) if scaled else None,
        hidden_bias=vector(2, 0.0) if scaled else None,
        residual=drawn(device, torch.float32, rows, width, seed=3) if streams else None,
        residual_scale=vector(4, 1.0) if kind == "scaled" else None,
        residual_bias=vector(5, 0.0) if kind == "scaled" else None,
        weight=vector(6, 1.0),
        bias=vector(7, 0.0) if kind == "centered" else None,
    )


def _forward(dtype: torch.dtype, rows: int, width: int, kind: str, device: torch.device) -> Call:
    operands = _operands(dtype, rows, width, kind, device)
    return Call(lambda: (_EPS, kind == "centered", *operands), list)


def _backward(dtype: torch.dtype, rows: int, width: int, kind: str, device: torch.device) -> Call:
    operands = _operands(dtype, rows, width, kind, device)
    _, joined, statistics = reference.forward(_EPS, kind == "centered", *operands)
    grad_x = drawn(device, dtype, rows, width, seed=8)
    grad_joined = drawn(device, torch.float32, rows, width, seed=9) if operands.joins else None
    return Call(
        lambda: (grad_x, grad_joined, joined, statistics, *operands),
        lambda gradients: [gradient for gradient in gradients if gradient is not None],
    )
