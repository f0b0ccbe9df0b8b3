"""Cases of Muon's passes: what they are checked and measured on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from zslurm.kernels.case import TOLERANCE, Call, Case, drawn

_EXACT = frozenset({"hip"})
_COUNTS = (1, 4, 16)
"""Matrices of 4096 x 2048 at once."""


def checks() -> Iterator[Case]:
    """Yield sizes in addition to those of a chunk, from several tensors."""
    for dtype in (torch.bfloat16, torch.float32):
        for counts, rows, columns in (((2, 1), 65, 33), ((3,), 64, 256), ((1, 1, 1), 1, 7)):
            yield from _both(dtype, counts, rows, columns)


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield matrices of one of ZAYA1's experts."""
    rows, columns = (64, 128) if small else (4096, 2048)
    for count in _COUNTS[:2] if small else _COUNTS:
        yield from _both(torch.bfloat16, (count,), rows, columns)


def _both(dtype: torch.dtype, counts: tuple[int, ...], rows: int, columns: int) -> Iterator[Case]:
    name = f"{str(dtype).removeprefix('torch.')} {'+'.join(map(str, counts))} x {rows} x {columns}"
    elements = sum(counts) * rows * columns
    moved = {"momentum": 12 + dtype.itemsize, "update": 10 + dtype.itemsize}  # bytes an element
    for operation, make in (("momentum", _momentum), ("update", _update)):
        yield Case(
            f"muon.{operation}",
            name,
            partial(make, dtype, counts, rows, columns),
            TOLERANCE[dtype],
            exact=_EXACT,
            bytes=float(elements * moved[operation]),
            axis="elements",
        )


def _tensors(device: torch.device, counts: tuple[int, ...], rows: int, columns: int, seed: int) -> Any:
    pairs = enumerate(counts)
    return [drawn(device, torch.float32, count, rows, columns, seed=seed + index) for index, count in pairs]


def _momentum(dtype: torch.dtype, counts: tuple[int, ...], rows: int, columns: int, device: torch.device) -> Call:
    momenta, gradients = (_tensors(device, counts, rows, columns, seed) for seed in (0, 100))
    x_KMN = torch.empty(sum(counts), rows, columns, dtype=dtype, device=device)
    return Call(
        lambda: (momenta, gradients, x_KMN),
        lambda norms_K: [norms_K, x_KMN, *momenta],
        {"mu": 0.95, "nesterov": True},
    )


def _update(dtype: torch.dtype, counts: tuple[int, ...], rows: int, columns: int, device: torch.device) -> Call:
    masters = _tensors(device, counts, rows, columns, 0)
    x_KMN = drawn(device, dtype, sum(counts), rows, columns, seed=100)
    weights = [torch.empty_like(master, dtype=torch.bfloat16) for master in masters]
    return Call(
        lambda: (masters, x_KMN),
        lambda _: [*masters, *weights],
        {"decay": 0.999, "rate": 0.01, "weights": weights},
    )
