"""Define AdamW's step: each operation of torch is one rounding, so every implementation can repeat the bits.

With t the number of the step and m, v the moments, in the masters' format (arXiv 1711.05101):

    m <- m + (G - m) (1 - beta1)
    v <- v beta2 + ((1 - beta2) G) G
    W <- W (1 - lr decay) - (lr / (1 - beta1^t)) m / (sqrt(v) (1 / sqrt(1 - beta2^t)) + eps)

from left to right as it stands. What depends on the settings alone is computed in fp64 and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zslurm.kernels.adamw.operands import Operands
from zslurm.kernels.rounding import root


@dataclass(frozen=True)
class Factors:
    """The numbers of one step, the same for all elements; hip.py has them in this order.

    Attributes:
        decay: of the masters.
        mean_weight: of the gradient in the first moment.
        square_decay: of the second moment.
        square_weight: of the squared gradient in it.
        root_scale: corrects the root of the second moment.
        rate: the learning rate, corrected for the first moment.
        eps: added to the root.
    """

    decay: float
    mean_weight: float
    square_decay: float
    square_weight: float
    root_scale: float
    rate: float
    eps: float


def factors(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> Factors:
    """Return the numbers of one step."""
    return Factors(
        decay=1 - lr * weight_decay,
        mean_weight=1 - betas[0],
        square_decay=betas[1],
        square_weight=1 - betas[1],
        root_scale=1 / math.sqrt(1 - betas[1] ** step),
        rate=lr / (1 - betas[0] ** step),
        eps=eps,
    )


def update(operands: Operands, **settings: Any) -> None:
    """Run `adamw`."""
    by = factors(**settings)
    lists = (operands.masters, operands.gradients, operands.exp_avgs, operands.exp_avg_sqs)
    for master, gradient, mean, square in zip(*lists, strict=True):
        mean.add_((gradient - mean) * by.mean_weight)
        square.copy_(square * by.square_decay + gradient * by.square_weight * gradient)
        denominator = root(square) * by.root_scale + by.eps
        master.copy_(master * by.decay - mean * by.rate / denominator)
    for weight, master in zip(operands.weights or (), operands.masters, strict=False):
        weight.copy_(master)
