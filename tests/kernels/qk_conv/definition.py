"""Queries and keys in the published order, the two convolutions one after the other: what both forms repeat."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.kernels.qk_conv import Convolutions, JoinedKernel, rotate
from zslurm.kernels.qk_conv.reference import at_least_fp32


def as_convolutions(kernel: JoinedKernel) -> Convolutions:
    """Return a joined kernel as a depthwise convolution that changes nothing, and this one."""
    heads, _, head_dim = kernel.weight_hIP.shape
    weight_hWPO = torch.unflatten(kernel.weight_hIP, 1, (-1, head_dim))
    one_Q11 = kernel.bias_hP.new_ones(heads * head_dim, 1, 1)
    return Convolutions(
        one_Q11,
        torch.zeros_like(one_Q11[:, 0, 0]),
        weight_hWPO.permute(0, 3, 2, 1).flatten(0, 1),
        kernel.bias_hP.flatten(),
    )


def mix(
    z_BSQ: Tensor,
    kernel: Convolutions | JoinedKernel,
    temperature_J: Tensor,
    cos_SA: Tensor,
    sin_SA: Tensor,
    linked: tuple[Tensor, ...] | None = None,
    before_BWQ: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return queries [B, H, S, P] and keys [B, J, S, P]; differentiable by torch."""
    convolutions = as_convolutions(kernel) if isinstance(kernel, JoinedKernel) else kernel
    depthwise_Q1W, depthwise_bias_Q, grouped_QPW, grouped_bias_Q = map(at_least_fp32, convolutions)
    head_dim, reach, keys = grouped_QPW.shape[1], convolutions.reach, len(temperature_J)
    channels = z_BSQ.shape[2]
    wide_BSQ = at_least_fp32(z_BSQ)

    if before_BWQ is None:
        padded_BSQ = F.pad(wide_BSQ, (0, 0, reach, 0))
    else:
        padded_BSQ = torch.cat([before_BWQ.to(wide_BSQ.dtype), wide_BSQ], dim=1)
    windows_BSQW = padded_BSQ.unfold(1, reach + 1, 1)
    if linked is not None:
        seen_BSW = torch.cat([torch.ones_like(linked[0]), *linked[:reach]], dim=-1).flip(-1)
        windows_BSQW = windows_BSQW.where(seen_BSW.unsqueeze(2), 0)
    middle_TQW = F.conv1d(windows_BSQW.flatten(0, 1), depthwise_Q1W, depthwise_bias_Q, groups=channels)
    mixed_TQ1 = F.conv1d(middle_TQW, grouped_QPW, grouped_bias_Q, groups=channels // head_dim)

    z_BSQP = torch.unflatten(wide_BSQ, 2, (-1, head_dim))
    z_BSJGP = torch.unflatten(z_BSQP[:, :, :-keys], 2, (keys, -1))
    mean_BSJGP = (z_BSJGP + z_BSQP[:, :, -keys:].unsqueeze(3)) / 2
    mean_BSQP = torch.cat([mean_BSJGP.flatten(2, 3), mean_BSJGP.mean(dim=3)], dim=2)
    u_BQSP = (mixed_TQ1.view(z_BSQP.shape) + mean_BSQP).transpose(1, 2)

    length_BQS1 = torch.linalg.vector_norm(u_BQSP, dim=-1, keepdim=True).clamp_min(torch.finfo(u_BQSP.dtype).eps)
    unit_BQSP = u_BQSP / length_BQS1 * math.sqrt(head_dim)
    if cos_SA.dim() == 3:
        cos_SA, sin_SA = cos_SA.unsqueeze(1), sin_SA.unsqueeze(1)
    y_BQSP = rotate(unit_BQSP, cos_SA, sin_SA)
    k_BJSP = y_BQSP[:, -keys:] * temperature_J.view(-1, 1, 1)
    return y_BQSP[:, :-keys].to(z_BSQ.dtype), k_BJSP.to(z_BSQ.dtype)
