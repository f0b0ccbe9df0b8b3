"""Balancing of the experts: AdamW on a pseudo-gradient, outside of back-propagation.

Each layer's bias of class c follows the pseudo-gradient p_c - 1/C, p_c being the share of the step's choices
that fell on class c, over all C classes, the skip class included (arXiv 2605.05365, eq. 5): a class that gets
more than its share is preferred less. No weight decay.

The scope is a setting, for the two reports differ (2511.17127 balances each microbatch, 2605.05365 the whole
batch). Either way the biases are constant during an optimizer step and are moved after it, with counts of all
ranks: once for the batch, or once for each of its microbatches in their order. How many ranks there are, and
whether activations are recomputed, changes nothing. The state is [layers, classes] fp32, a few KiB, the same on
every rank. Every operation is elementwise or a sum of integers, so equal counts give equal bits on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zslurm.train.config import ModelConfig
from zslurm.train.model.init import initial_balancing_bias

BETAS = (0.9, 0.999)
"""AdamW's decay rates, of the mean and of the mean square."""
BALANCE_TENSORS = ("bias", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class BalanceState:
    """All there is to save: three fp32 tensors [layers, classes] and the number of steps taken."""

    bias: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int

    @staticmethod
    def initial(config: ModelConfig, device: torch.device | str = "cpu") -> BalanceState:
        """Return the state before the first step."""
        bias = initial_balancing_bias(config).to(device)
        return BalanceState(bias, torch.zeros_like(bias), torch.zeros_like(bias), step=0)


@torch.no_grad()
def balance_step(
    state: BalanceState, counts_LC: Tensor, *, lr: float, betas: tuple[float, float], eps: float = 1e-8
) -> BalanceState:
    """Return the state after one step; nothing is changed in place.

    counts_LC are the choices of each class in the whole step, over all ranks, integers or whole floats; every
    layer has some. `lr` is in units of router probability, `betas` are the decay rates of the mean and of the
    mean square.
    """
    counts_LC = counts_LC.double()  # a step has more tokens than fp32 has integers
    shares_LC = counts_LC / counts_LC.sum(dim=-1, keepdim=True)
    excess_LC = (shares_LC - 1 / counts_LC.shape[-1]).to(state.bias.dtype)

    step = state.step + 1
    exp_avg = state.exp_avg * betas[0] + excess_LC * (1 - betas[0])
    exp_avg_sq = state.exp_avg_sq * betas[1] + excess_LC.square() * (1 - betas[1])
    mean = exp_avg / (1 - betas[0] ** step)
    root = exp_avg_sq.sqrt() / math.sqrt(1 - betas[1] ** step)
    return BalanceState(state.bias - lr * mean / (root + eps), exp_avg, exp_avg_sq, step)


def balance_over(
    state: BalanceState, counts_MLC: Tensor, *, lr: float, betas: tuple[float, float] = BETAS
) -> BalanceState:
    """Return the state after one step for each share of a batch, in their order; share m made counts_MLC[m]."""
    for counts_LC in counts_MLC:
        state = balance_step(state, counts_LC, lr=lr, betas=betas)
    return state
