"""Cases of AdamW's step: what it is checked and measured on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from zslurm.kernels.adamw.operands import Operands
from zslurm.kernels.case import TOLERANCE, Call, Case, drawn

_BYTES = 30  # of an element, with its weight
_ELEMENTS = (2**20, 2**24, 2**27)
_TENSORS = 64


def checks() -> Iterator[Case]:
    """Yield one tensor and many, with odd sizes."""
    yield _case((1,))
    yield _case((8191, 3, 40_000))
    yield _case(tuple(range(1, 200)))


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield elements in tensors of one size."""
    for elements in (2**12, 2**14) if small else _ELEMENTS:
        yield _case((elements // _TENSORS,) * _TENSORS)


def _case(sizes: tuple[int, ...]) -> Case:
    return Case(
        "adamw",
        f"{len(sizes)} tensors, {sum(sizes)} elements",
        partial(_update, sizes),
        TOLERANCE[torch.bfloat16],  # of the weights
        exact=frozenset({"hip"}),
        bytes=float(_BYTES * sum(sizes)),
        axis="elements",
    )


def _update(sizes: tuple[int, ...], device: torch.device) -> Call:
    def tensors(seed: int) -> list[torch.Tensor]:
        whole = drawn(device, torch.float32, sum(sizes), seed=seed)
        return [part.clone() for part in torch.split(whole, list(sizes))]

    masters, gradients, means = tensors(0), tensors(1), tensors(2)
    squares = [tensor.square_() for tensor in tensors(3)]
    weights = [torch.empty_like(master, dtype=torch.bfloat16) for master in masters]
    operands = Operands(masters, gradients, means, squares, weights)
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 7}
    return Call(lambda: (operands,), lambda _: [*masters, *means, *squares, *weights], settings)
