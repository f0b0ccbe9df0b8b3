"""Take AdamW's step on many tensors in one pass.

reference.py defines it. by_torch.py runs torch's own fused AdamW, which serves every device and is what a CPU
takes; hip.py one pass of 28 bytes an element, or 30 with weights. hip and the reference are equal bit by bit;
torch's functions round a product and a sum at once, and differ from one device to another.
"""

from __future__ import annotations

from typing import Any

import torch

from zslurm.kernels.adamw import by_torch, hip, reference
from zslurm.kernels.adamw.operands import Operands
from zslurm.kernels.arch import CPU, Arch
from zslurm.kernels.checks import short
from zslurm.kernels.dispatch import Implementation, Operation, Sizes

__all__ = ["OPERATIONS", "Operands", "update"]


def _check(
    operands: Operands, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> None:
    if step < 1:
        raise ValueError(f"adamw: step is {step}, but the first one is 1")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"adamw: betas are {betas}, but must be at least 0 and less than 1")


def _sizes(operands: Operands, **_: Any) -> Sizes:
    masters = operands.masters
    return {"tensors": len(masters), "elements": operands.elements, "dtype": short(masters[0].dtype)}


def _device(operands: Operands, **_: Any) -> torch.device:
    return operands.masters[0].device


def _rule(arch: Arch, _: Sizes) -> str | None:
    """Leave a CPU to torch's functions; on a GPU the first implementation that takes the operands runs."""
    return "torch" if arch == CPU else None


update = Operation(
    name="adamw",
    reference=reference.update,
    implementations=[
        Implementation("hip", hip.update, hip.supports),
        Implementation("torch", by_torch.update, lambda *_, **__: None),
    ],
    check=_check,
    device=_device,
    sizes=_sizes,
    rule=_rule,
)
"""Update both moments and the masters of all operands, and round the weights from them.

Args:
    operands: `Operands`, checked when they are put together.
    lr: learning rate.
    betas: decay rates of the moments.
    eps: added to the root of the second moment.
    weight_decay: decoupled decay.
    step: number of this step, from 1.
"""

OPERATIONS = (update,)
