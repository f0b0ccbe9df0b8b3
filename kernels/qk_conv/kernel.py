"""The two convolutions of queries and keys, and their product, which is one convolution.

Both are linear and nothing is between them, so they can be applied as one, of width w1 + w2 - 1 with one group per
head: its kernel is their product (a few hundred thousand numbers, made again in each forward) and the depthwise
bias, carried through the grouped convolution, joins that one's bias. This is the published order exactly: zeros
are put before the sequence once, and at its first tokens the second convolution sees the first one's bias, not
zero.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.kernels.qk_conv.rotation import at_least_fp32


class Convolutions(NamedTuple):
    """A depthwise convolution and, behind it, one with a group per head: torch.nn.Conv1d's layouts, no padding."""

    depthwise_Q1W: Tensor
    depthwise_bias_Q: Tensor
    grouped_QPW: Tensor
    grouped_bias_Q: Tensor

    @property
    def reach(self) -> int:
        """Return how many tokens both together look back."""
        return self.depthwise_Q1W.shape[-1] + self.grouped_QPW.shape[-1] - 2


class JoinedKernel(NamedTuple):
    """Both convolutions as one: head h's output is its window of W tokens [W * P] times weight_hIP[h] + bias.

    The weight is in the parameters' format, the bias in at least fp32.
    """

    weight_hIP: Tensor
    bias_hP: Tensor

    @property
    def reach(self) -> int:
        """Return how many tokens it looks back."""
        return self.weight_hIP.shape[1] // self.weight_hIP.shape[2] - 1

    def as_convolutions(self) -> Convolutions:
        """Return it as a depthwise convolution that changes nothing, and this one."""
        heads, _, head_dim = self.weight_hIP.shape
        weight_hWPO = torch.unflatten(self.weight_hIP, 1, (-1, head_dim))
        one_Q11 = self.bias_hP.new_ones(heads * head_dim, 1, 1)
        return Convolutions(
            one_Q11,
            torch.zeros_like(one_Q11[:, 0, 0]),
            weight_hWPO.permute(0, 3, 2, 1).flatten(0, 1),
            self.bias_hP.flatten(),
        )


def join(kernel: Convolutions | JoinedKernel) -> JoinedKernel:
    """Multiply out both convolutions; differentiable. What is joined is returned as it is."""
    if isinstance(kernel, JoinedKernel):
        return kernel
    depthwise_Q1W, depthwise_bias_Q, grouped_QPW, grouped_bias_Q = kernel
    head_dim, later_taps = grouped_QPW.shape[1:]
    earlier_taps = depthwise_Q1W.shape[-1]
    first_hPW = at_least_fp32(depthwise_Q1W).view(-1, head_dim, earlier_taps)
    second_hOPW = at_least_fp32(grouped_QPW).view(-1, head_dim, head_dim, later_taps)
    second_hWPO = second_hOPW.permute(0, 3, 2, 1).contiguous()
    weight_hWPO = reduce(
        torch.add,
        (
            F.pad(second_hWPO * first_hPW[:, None, :, tap, None], (0, 0, 0, 0, tap, earlier_taps - 1 - tap))
            for tap in range(earlier_taps)
        ),
    )
    carried_h1O = at_least_fp32(depthwise_bias_Q).view(-1, 1, head_dim) @ second_hWPO.sum(dim=1)
    bias_hP = at_least_fp32(grouped_bias_Q).view(-1, head_dim) + carried_h1O.squeeze(1)
    return JoinedKernel(weight_hWPO.flatten(1, 2).to(grouped_QPW.dtype), bias_hP)
