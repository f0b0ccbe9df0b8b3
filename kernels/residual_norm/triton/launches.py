"""Describe a launch of every kind that the compiler makes other code of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from zslurm.kernels.arch import Arch
from zslurm.kernels.code_object import KernelLaunch
from zslurm.kernels.residual_norm.operands import NormOperands
from zslurm.kernels.residual_norm.triton.backward import backward
from zslurm.kernels.residual_norm.triton.forward import forward


def launches(arch: Arch) -> Iterator[KernelLaunch]:
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


def _drawn(rows: int, width: int, dtype: torch.dtype, *, joins: bool = True, bias: bool = False) -> NormOperands:
    vector = torch.empty(width, dtype=dtype, device="meta")
    hidden = torch.empty(rows, width, dtype=dtype, device="meta")
    residual = torch.empty(rows, width, dtype=torch.float32, device="meta")
    last = vector, vector if bias else None
    if not joins:
        return NormOperands(hidden, None, None, None, None, None, *last)
    return NormOperands(hidden, vector, vector, residual, vector, vector, *last)


def _both(name: str, given: NormOperands, *, centered: bool, wide: bool = True) -> Iterator[KernelLaunch]:
    statistics = torch.empty(2 if centered else 1, len(given.hidden), device="meta")
    joined = torch.empty(given.hidden.shape, device="meta")
    ends = (torch.empty_like(given.hidden), joined if given.joins else None, joined, statistics)
    yield KernelLaunch(f"{name} forward", partial(forward, 1e-5, centered, *given), product=False, wide=wide)
    yield KernelLaunch(f"{name} backward", partial(backward, *ends, *given), product=False, wide=wide)
