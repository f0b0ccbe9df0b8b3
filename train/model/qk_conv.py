"""From projections to queries and keys: two convolutions, mean skip, norm, temperature, rotation.

Both convolutions are linear and nothing is between them, so they are applied as one, of width w1 + w2 - 1
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
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels.matmul import batched_matmul
from zslurm.train.model.precision import at_least_fp32
from zslurm.train.model.rope import RotaryTable, rotate

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
    return MixingKernel(weight_hWPO.flatten(1, 2).to(grouped_QPW.dtype), bias_hP)


def mix(
    z_BSQ: Tensor,
    kernel: MixingKernel,
    temperature_J: Tensor,
    rotary: RotaryTable,
    linked: Linked = None,
    before_BWQ: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return queries [B, H, S, P] and keys [B, J, S, P] ready for attention, in the format of z.

    z_BSQ are projected queries and keys, side by side, temperature_J is a linear scale of each normalised key, and
    before_BWQ are the projections of the W - 1 tokens before the first (zeros where not given; no gradient reaches
    them).
    """
    q_BHSP, k_BJSP = _Mix.apply(z_BSQ, *kernel, temperature_J, *rotary, linked, before_BWQ)
    return q_BHSP, k_BJSP


class _Mix(torch.autograd.Function):
    """u = window W + b + skip; y = rotate(u) temperature sqrt(P) / |u|. Tensors [h, B, S, P] hold all heads."""

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
        z_hBSP = _by_head(z_BSQ, weight_hIP)
        queries = len(z_hBSP) - len(temperature_J)
        before_hBWP = None if before_BWQ is None else _by_head(before_BWQ, weight_hIP)
        windows_hTI = _windows(z_hBSP, weight_hIP, linked, before_hBWP)
        if z_BSQ.dtype == bias_hP.dtype:
            u_hTP = batched_matmul(windows_hTI, weight_hIP, bias_hP)
        else:
            u_hTP = at_least_fp32(batched_matmul(windows_hTI, weight_hIP)).add_(bias_hP.unsqueeze(1))
        u_hBSP = u_hTP.reshape(z_hBSP.shape)
        _add_mean_skip(u_hBSP, _by_head(at_least_fp32(z_BSQ), weight_hIP), queries)

        length_hBS1 = torch.linalg.vector_norm(u_hBSP, dim=-1, keepdim=True)
        inverse_hBS1 = math.sqrt(z_hBSP.shape[-1]) / length_hBS1.clamp_min_(torch.finfo(u_hBSP.dtype).eps)
        y_hBSP = rotate(u_hBSP, RotaryTable(cos, sin)).mul_(_with_temperature(inverse_hBS1, temperature_J))
        y_BhSP = y_hBSP.to(z_BSQ.dtype).transpose(0, 1)
        ctx.save_for_backward(z_BSQ, weight_hIP, temperature_J, cos, sin, u_hBSP, inverse_hBS1)
        ctx.linked = linked
        return y_BhSP[:, :queries], y_BhSP[:, queries:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q_BHSP: Tensor, grad_k_BJSP: Tensor) -> tuple[Tensor | None, ...]:
        z_BSQ, weight_hIP, temperature_J, cos, sin, u_hBSP, inverse_hBS1 = ctx.saved_tensors
        z_hBSP = _by_head(z_BSQ, weight_hIP)
        heads, batch, length, head_dim = z_hBSP.shape
        queries = heads - len(temperature_J)
        grad_hBSP = torch.cat([grad_q_BHSP, grad_k_BJSP], dim=1).transpose(0, 1).to(u_hBSP.dtype)
        grad_hBSP = rotate(grad_hBSP, RotaryTable(cos, -sin))

        along_hBS1 = (grad_hBSP * u_hBSP).sum(dim=-1, keepdim=True).mul_(inverse_hBS1)
        grad_temperature_J = along_hBS1[queries:].sum(dim=(1, 2, 3)).to(temperature_J.dtype)
        grad_hBSP.addcmul_(u_hBSP, along_hBS1.mul_(inverse_hBS1), value=-1 / head_dim)
        grad_hBSP.mul_(_with_temperature(inverse_hBS1, temperature_J))
        grad_bias_hP = grad_hBSP.sum(dim=(1, 2))

        ahead_hTI = _windows_ahead(grad_hBSP.to(z_BSQ.dtype), weight_hIP, ctx.linked)
        grad_weight_hPI = batched_matmul(z_hBSP.flatten(1, 2).mT, ahead_hTI)
        grad_z_hTP = batched_matmul(ahead_hTI, _reversed(weight_hIP))
        grad_z_hBSP = at_least_fp32(grad_z_hTP).reshape(z_hBSP.shape)
        _add_mean_skip_backward(grad_z_hBSP, grad_hBSP, queries)
        grad_z_BSQ = z_BSQ.new_empty(batch, length, heads * head_dim)
        _by_head(grad_z_BSQ, weight_hIP).copy_(grad_z_hBSP)
        grad_weight_hIP = _reversed(grad_weight_hPI.mT)
        return grad_z_BSQ, grad_weight_hIP, grad_bias_hP, grad_temperature_J, None, None, None, None


def _by_head(z_BSQ: Tensor, weight_hIP: Tensor) -> Tensor:
    """[B, S, h * P] seen as [h, B, S, P]."""
    return z_BSQ.unflatten(-1, (weight_hIP.shape[0], weight_hIP.shape[-1])).permute(2, 0, 1, 3)


def _reversed(weight_hIP: Tensor) -> Tensor:
    """The kernel [h, taps * P, P] that leads from outputs back to inputs: taps reversed, [P, P] transposed."""
    return weight_hIP.unflatten(1, (-1, weight_hIP.shape[-1])).flip(1).mT.flatten(1, 2)


def _windows(z_hBSP: Tensor, weight_hIP: Tensor, linked: Linked, before_hBWP: Tensor | None) -> Tensor:
    """Channels of each token and of those before it, oldest first: [h, B * S, taps * P]."""
    reach = weight_hIP.shape[1] // weight_hIP.shape[2] - 1
    padded = F.pad(z_hBSP, (0, 0, reach, 0)) if before_hBWP is None else torch.cat([before_hBWP, z_hBSP], dim=2)
    windows_hBSWP = padded.unfold(2, reach + 1, 1).mT
    if linked is not None:
        windows_hBSWP = windows_hBSWP * _seen(linked, reach).flip(-1).unsqueeze(-1)
    return windows_hBSWP.reshape(len(weight_hIP), -1, weight_hIP.shape[1])


def _windows_ahead(grad_hBSP: Tensor, weight_hIP: Tensor, linked: Linked) -> Tensor:
    """Gradients of each token and of those after it in whose windows it is, itself first: [h, B * S, taps * P]."""
    reach = weight_hIP.shape[1] // weight_hIP.shape[2] - 1
    ahead_hBSWP = F.pad(grad_hBSP, (0, 0, 0, reach)).unfold(2, reach + 1, 1).mT
    if linked is not None:
        seen_from_BSWW = F.pad(_seen(linked, reach), (0, 0, 0, reach)).unfold(1, reach + 1, 1)
        seen_BSW = seen_from_BSWW.diagonal(dim1=-2, dim2=-1).contiguous()
        ahead_hBSWP = ahead_hBSWP * seen_BSW.unsqueeze(-1)
    return ahead_hBSWP.reshape(len(weight_hIP), -1, weight_hIP.shape[1])


def _seen(linked: tuple[Tensor, ...], reach: int) -> Tensor:
    """Whether each token and those before it belong to its document, itself first: bool [B, S, 1 + reach]."""
    return torch.cat([torch.ones_like(linked[0]), *linked[:reach]], dim=-1)


def _add_mean_skip(u_hBSP: Tensor, z_hBSP: Tensor, queries: int) -> None:
    """Add to each query head its mean with its key head, and to each key head the mean of these over its group."""
    keys = len(u_hBSP) - queries
    z_JGBSP, z_JBSP = z_hBSP[:queries].unflatten(0, (keys, -1)), z_hBSP[queries:]
    mean_JGBSP = z_JGBSP + z_JBSP.unsqueeze(1)
    u_hBSP[:queries].unflatten(0, (keys, -1)).add_(mean_JGBSP, alpha=0.5)
    for mean_JBSP in mean_JGBSP.unbind(1):
        u_hBSP[queries:].add_(mean_JBSP, alpha=0.5 / mean_JGBSP.shape[1])


def _add_mean_skip_backward(grad_z_hBSP: Tensor, grad_u_hBSP: Tensor, queries: int) -> None:
    """Add the gradient of `_add_mean_skip` with respect to z."""
    keys = len(grad_u_hBSP) - queries
    u_JGBSP, u_JBSP = grad_u_hBSP[:queries].unflatten(0, (keys, -1)), grad_u_hBSP[queries:]
    mean_JGBSP = torch.add(u_JGBSP, u_JBSP.unsqueeze(1), alpha=1 / u_JGBSP.shape[1])
    grad_z_hBSP[:queries].unflatten(0, (keys, -1)).add_(mean_JGBSP, alpha=0.5)
    for mean_JBSP in mean_JGBSP.unbind(1):
        grad_z_hBSP[queries:].add_(mean_JBSP, alpha=0.5)


def _with_temperature(inverse_hBS1: Tensor, temperature_J: Tensor) -> Tensor:
    """Scale of every head: 1 / its root mean square, for keys times their temperature."""
    queries = len(inverse_hBS1) - len(temperature_J)
    keys_JBS1 = inverse_hBS1[queries:] * temperature_J.view(-1, 1, 1, 1)
    return torch.cat([inverse_hBS1[:queries], keys_JBS1])
