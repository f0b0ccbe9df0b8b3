"""From projections to queries and keys: two convolutions, mean skip, norm, temperature, rotation.

Both convolutions are linear and nothing lies between them, so they are applied as one, of width w1 + w2 - 1
with one group per head: its kernel is their product (a few hundred thousand numbers, made anew in each forward)
and the depthwise bias, carried through the grouped convolution, joins that one's bias. This is the published
order exactly: zeros are put before the sequence once, and at its first tokens the second convolution sees the
first one's bias, not zero.

The whole step is one autograd function with its gradient written out. It keeps the projections, their mixed
form and one number per head, where autograd would keep about fifteen tensors of that size; the mixed form,
norms and rotation are in at least fp32 (arXiv 2605.05365, IV-D).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.model.precision import at_least_fp32
from train.model.rope import RotaryTable, rotate

Linked = tuple[Tensor, ...] | None
"""For each distance looked back, from 1: whether that token belongs to the same document, [B, S, 1]."""


class MixingKernel(NamedTuple):
    """Both convolutions as one: head h's output is its window of W tokens [W * P] times weight_hIP[h] + bias."""

    weight_hIP: Tensor
    bias_hP: Tensor


def joined_kernel(
    depthwise_Q1W: Tensor, depthwise_bias_Q: Tensor, grouped_QPW: Tensor, grouped_bias_Q: Tensor
) -> MixingKernel:
    """Multiply out the depthwise and the grouped convolution (torch.nn.Conv1d's layouts), oldest token first.

    The weight is in the parameters' format, the bias in at least fp32.
    """
    head_dim, later_taps = grouped_QPW.shape[1:]
    earlier_taps = depthwise_Q1W.shape[-1]
    first_hPW = at_least_fp32(depthwise_Q1W).view(-1, head_dim, earlier_taps)
    second_hOPW = at_least_fp32(grouped_QPW).view(-1, head_dim, head_dim, later_taps)
    weight_hOPW = sum(
        (
            F.pad(second_hOPW * first_hPW[:, None, :, tap, None], (tap, earlier_taps - 1 - tap))
            for tap in range(earlier_taps)
        ),
        start=second_hOPW.new_zeros(()),
    )
    carried_hP = second_hOPW.sum(dim=-1) @ at_least_fp32(depthwise_bias_Q).view(-1, head_dim, 1)
    bias_hP = at_least_fp32(grouped_bias_Q).view(-1, head_dim) + carried_hP.squeeze(-1)
    weight_hIP = weight_hOPW.permute(0, 3, 2, 1).flatten(1, 2).to(grouped_QPW.dtype)
    return MixingKernel(weight_hIP, bias_hP)


def mix(
    z_BSQ: Tensor,
    kernel: MixingKernel,
    temperature_J: Tensor,
    rotary: RotaryTable,
    linked: Linked = None,
    before_BWQ: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries [B, H, S, P] and keys [B, J, S, P] ready for attention, in the format of z.

    Args:
        z_BSQ: projected queries and keys, side by side.
        kernel: from `joined_kernel`.
        temperature_J: linear scale of each normalised key.
        rotary: angles of the tokens' positions.
        linked: where the sequence holds several documents.
        before_BWQ: projections of the W - 1 tokens before the first; zeros where not given. No gradient
            reaches them.
    """
    q_BHSP, k_BJSP = _Mix.apply(z_BSQ, *kernel, temperature_J, *rotary, linked, before_BWQ)
    return q_BHSP, k_BJSP


class _Mix(torch.autograd.Function):
    """u = window W + b + skip; y = rotate(u) temperature sqrt(P) / |u|. Tensors [h, T, P] hold all heads."""

    @staticmethod
    def forward(
        ctx: Any,
        z_BSQ: Tensor,
        weight_hIP: Tensor,
        bias_hP: Tensor,
        temperature_J: Tensor,
        cos: Tensor,
        sin: Tensor,
        linked: Linked,
        before_BWQ: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        heads, _, head_dim = weight_hIP.shape
        queries = heads - temperature_J.shape[0]
        windows_hTI = _windows(z_BSQ, weight_hIP, linked, before_BWQ)
        if z_BSQ.dtype == bias_hP.dtype:
            u_hTP = torch.baddbmm(bias_hP.unsqueeze(1), windows_hTI, weight_hIP)
        else:
            u_hTP = at_least_fp32(torch.bmm(windows_hTI, weight_hIP)).add_(bias_hP.unsqueeze(1))
        _add_mean_skip(u_hTP, at_least_fp32(z_BSQ).view(-1, heads, head_dim).transpose(0, 1), queries)

        length_hT1 = torch.linalg.vector_norm(u_hTP, dim=-1, keepdim=True)
        inverse_hT1 = math.sqrt(head_dim) / length_hT1.clamp_min(torch.finfo(u_hTP.dtype).eps)
        scale_hT1 = _with_temperature(inverse_hT1, temperature_J)
        y_hTP = rotate(u_hTP.unflatten(1, z_BSQ.shape[:2]), RotaryTable(cos, sin)).flatten(1, 2).mul_(scale_hT1)
        y_BhSP = y_hTP.to(z_BSQ.dtype).unflatten(1, z_BSQ.shape[:2]).transpose(0, 1)
        ctx.save_for_backward(z_BSQ, weight_hIP, temperature_J, cos, sin, u_hTP, inverse_hT1)
        ctx.linked = linked
        return y_BhSP[:, :queries], y_BhSP[:, queries:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q_BHSP: Tensor, grad_k_BJSP: Tensor) -> tuple[Tensor | None, ...]:
        z_BSQ, weight_hIP, temperature_J, cos, sin, u_hTP, inverse_hT1 = ctx.saved_tensors
        heads, _, head_dim = weight_hIP.shape
        queries = heads - temperature_J.shape[0]
        grad_hBSP = torch.cat([grad_q_BHSP, grad_k_BJSP], dim=1).transpose(0, 1).to(u_hTP.dtype)
        grad_hTP = rotate(grad_hBSP, RotaryTable(cos, -sin)).flatten(1, 2)

        unit_hTP = u_hTP * inverse_hT1
        along_hT1 = (grad_hTP * unit_hTP).sum(dim=-1, keepdim=True)
        grad_temperature_J = along_hT1[queries:].sum(dim=(1, 2))
        grad_hTP.addcmul_(unit_hTP, along_hT1, value=-1 / head_dim)
        grad_hTP.mul_(_with_temperature(inverse_hT1, temperature_J))

        grad_bias_hP = grad_hTP.sum(dim=1)
        narrow_hTP = grad_hTP.to(z_BSQ.dtype)
        windows_hTI = _windows(z_BSQ, weight_hIP, ctx.linked, None)
        grad_weight_hIP = torch.bmm(windows_hTI.transpose(1, 2), narrow_hTP)
        grad_windows_hTI = torch.bmm(narrow_hTP, weight_hIP.transpose(1, 2))

        grad_z_BShP = grad_hTP.new_empty(*z_BSQ.shape[:2], heads, head_dim)
        _mean_skip_backward(grad_z_BShP.flatten(0, 1).transpose(0, 1), grad_hTP, queries)
        _add_windows_backward(grad_z_BShP, grad_windows_hTI.unflatten(1, z_BSQ.shape[:2]), ctx.linked)
        grad_z_BSQ = grad_z_BShP.flatten(2).to(z_BSQ.dtype)
        grad_temperature_J = grad_temperature_J.to(temperature_J.dtype)
        return grad_z_BSQ, grad_weight_hIP, grad_bias_hP, grad_temperature_J, None, None, None, None


def _windows(z_BSQ: Tensor, weight_hIP: Tensor, linked: Linked, before_BWQ: Tensor | None) -> Tensor:
    """Channels of each token and of those before it, oldest first, by head: [h, B * S, taps * P]."""
    heads, width, head_dim = weight_hIP.shape
    reach, length = width // head_dim - 1, z_BSQ.shape[1]
    z_BWQ = F.pad(z_BSQ, (0, 0, reach, 0)) if before_BWQ is None else torch.cat([before_BWQ, z_BSQ], dim=1)
    parts = [z_BWQ[:, tap : tap + length] for tap in range(reach + 1)]
    if linked is not None:
        parts = [part * linked[reach - tap - 1] if tap < reach else part for tap, part in enumerate(parts)]
    by_head = torch.cat([part.unflatten(-1, (heads, head_dim)) for part in parts], dim=-1)
    return by_head.flatten(0, 1).transpose(0, 1)


def _add_windows_backward(grad_z_BShP: Tensor, grad_windows_hBSI: Tensor, linked: Linked) -> None:
    """Give each token its share of the gradient of every window that it lies in."""
    length, head_dim = grad_z_BShP.shape[1], grad_z_BShP.shape[-1]
    parts = grad_windows_hBSI.permute(1, 2, 0, 3).split(head_dim, dim=-1)
    for tap, part_BShP in enumerate(parts):
        distance = len(parts) - 1 - tap
        if linked is not None and distance:
            part_BShP = part_BShP * linked[distance - 1].unsqueeze(-1)
        if distance < length:
            grad_z_BShP[:, : length - distance].add_(part_BShP[:, distance:])


def _add_mean_skip(u_hTP: Tensor, z_hTP: Tensor, queries: int) -> None:
    """Add to each query head its mean with its key head, and to each key head the mean of these over its group."""
    keys = u_hTP.shape[0] - queries
    z_JGTP, z_JTP = z_hTP[:queries].unflatten(0, (keys, -1)), z_hTP[queries:]
    u_JGTP, u_JTP = u_hTP[:queries].unflatten(0, (keys, -1)), u_hTP[queries:]
    u_JGTP.add_(z_JGTP, alpha=0.5).add_(z_JTP.unsqueeze(1), alpha=0.5)
    u_JTP.add_(z_JTP, alpha=0.5).add_(z_JGTP.sum(dim=1), alpha=0.5 / z_JGTP.shape[1])


def _mean_skip_backward(grad_z_hTP: Tensor, grad_u_hTP: Tensor, queries: int) -> None:
    """Write the gradient of `_add_mean_skip` with respect to z."""
    keys = grad_u_hTP.shape[0] - queries
    u_JGTP, u_JTP = grad_u_hTP[:queries].unflatten(0, (keys, -1)), grad_u_hTP[queries:]
    z_JGTP, z_JTP = grad_z_hTP[:queries].unflatten(0, (keys, -1)), grad_z_hTP[queries:]
    z_JGTP.copy_(u_JGTP).add_(u_JTP.unsqueeze(1), alpha=1 / u_JGTP.shape[1]).mul_(0.5)
    z_JTP.copy_(u_JTP).add_(u_JGTP.sum(dim=1)).mul_(0.5)


def _with_temperature(inverse_hT1: Tensor, temperature_J: Tensor) -> Tensor:
    """Scale of every head: 1 / its root mean square, for keys times their temperature."""
    queries = inverse_hT1.shape[0] - temperature_J.shape[0]
    keys_JT1 = inverse_hT1[queries:] * temperature_J.view(-1, 1, 1)
    return torch.cat([inverse_hT1[:queries], keys_JT1])
