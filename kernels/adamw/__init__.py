"""Take AdamW's step on many tensors in one pass.

reference.py defines it. by_torch.py runs torch's own fused AdamW, which serves every device and is what a CPU
takes; hip.py one pass of 28 bytes an element, or 30 with weights. hip and the reference are equal bit by bit;
torch's functions round a product and a sum at once, and differ from one device to another.
"""

from __future__ import annotations

from typing import Any

from zslurm.kernels.adamw import by_torch, hip, reference
from zslurm.kernels.adamw.operands import Operands
from zslurm.kernels.multi_tensor import operation

__all__ = ["OPERATIONS", "Operands", "update"]


def _check(_: Operands, *, betas: tuple[float, float], step: int, **__: Any) -> None:
    if step < 1:
        raise ValueError(f"adamw: step is {step}, but the first one is 1")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"adamw: betas are {betas}, but must be at least 0 and less than 1")


update = operation(
    "adamw",
    reference,
    hip,
    by_torch,
    check=_check,
    tensor=lambda operands, **_: operands.masters[0],
    sizes=lambda operands, **_: {"tensors": len(operands.masters), "elements": operands.elements},
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
