"""Run AdamW's step by torch's fused AdamW: any device, format and strides.

The function is called, not the class `torch.optim.AdamW`, which would import all of torch's compiler: a second
of every rank's start.
"""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw

from zslurm.kernels.adamw.operands import Operands


@torch.no_grad()
def update(
    operands: Operands, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> None:
    """Run `adamw`."""
    device = operands.masters[0].device
    adamw(
        operands.masters,
        operands.gradients,
        operands.exp_avgs,
        operands.exp_avg_sqs,
        max_exp_avg_sqs=[],
        # torch counts each of them up by itself
        state_steps=[torch.full((), float(step - 1), device=device) for _ in operands.masters],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    if operands.weights is not None:
        torch._foreach_copy_(operands.weights, operands.masters)
