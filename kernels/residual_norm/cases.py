"""Cases of a stage's entry, forward and backward: what it is checked and measured on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from zslurm.kernels.case import TOLERANCE, Call, Case, drawn
from zslurm.kernels.residual_norm import reference

_EPS = 1e-5


def checks() -> Iterator[Case]:
    """Yield the entry of ZAYA1's stages, its first one, and LayerNorm, of several widths."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows, width in ((96, 64), (33, 80), (5, 1024)):
            for kind in ("scaled", "first", "centered"):
                yield from _both(dtype, rows, width, kind)


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield zaya1-8b's entry of a stage for microbatches of several sizes."""
    for rows in (64, 512) if small else (4096, 16384, 65536):
        yield from _both(torch.bfloat16, rows, 128 if small else 2048, "scaled")


def _both(dtype: torch.dtype, rows: int, width: int, kind: str) -> Iterator[Case]:
    name = f"{str(dtype).removeprefix('torch.')} {rows} x {width}, {kind}"
    # Hidden states and the norm in their format, the residual stream and the sum in fp32; and their gradients.
    for direction, moved in (("forward", 2 * dtype.itemsize + 8), ("backward", 3 * dtype.itemsize + 12)):
        make = partial(_call, direction, dtype, rows, width, kind)
        size = float(moved * rows * width)
        yield Case(f"residual_norm.{direction}", name, make, TOLERANCE[dtype], bytes=size, axis="rows")


def _call(direction: str, dtype: torch.dtype, rows: int, width: int, kind: str, device: torch.device) -> Call:
    def vector(seed: int, around: float) -> Tensor:
        return (around + 0.1 * drawn(device, torch.float32, width, seed=seed)).to(dtype)

    def stream(seed: int) -> Tensor:
        return drawn(device, torch.float32, rows, width, seed=seed)

    residual = (None, None, None) if kind == "first" else (stream(3), vector(4, 1.0), vector(5, 0.0))
    bias = vector(7, 0.0) if kind == "centered" else None
    hidden = drawn(device, dtype, rows, width), vector(1, 1.0), vector(2, 0.0)
    operands = *hidden, *residual, vector(6, 1.0), bias
    settings = _EPS, kind == "centered"
    if direction == "forward":
        return Call(lambda: (*settings, *operands), list)
    kept = reference.forward(*settings, *operands)[1:]
    grads = drawn(device, dtype, rows, width, seed=8), stream(9)
    return Call(lambda: (*grads, *kept, *operands), lambda found: [grad for grad in found if grad is not None])
