"""Make queries and keys with both convolutions as one, the gradient written out: what a CPU runs.

The forward keeps the mixed form and one number per head and token; autograd would keep about fifteen
tensors of that size; the mixed form, norms and rotation are in at least fp32 (arXiv 2605.05365, IV-D). The windows
are written to memory, as an operand of the product.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.kernels.qk_conv.operands import ConvolutionOperands
from zslurm.kernels.qk_conv.rotation import at_least_fp32, rotate

# u = window W + b + skip; y = rotate(u) temperature sqrt(P) / |u|. Tensors [h, B, S, P] hold all heads.


def forward(keeps: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, and if it `keeps` them the mixed form [h, B, S, P] and sqrt(P) / |u| [h, B, S, 1]."""
    operands_given = ConvolutionOperands(*operands)  # type: ignore[arg-type]
    z_BSQ, weight_hIP, bias_hP = operands_given.z_BSQ, operands_given.weight_hIP, operands_given.bias_hP
    z_hBSP = _by_head(z_BSQ, weight_hIP)
    queries = len(z_hBSP) - len(operands_given.temperature_J)
    before_hBWP = None if operands_given.before_BWQ is None else _by_head(operands_given.before_BWQ, weight_hIP)
    windows_hTI = _windows(z_hBSP, weight_hIP, operands_given.seen_BSW, before_hBWP)
    if z_BSQ.dtype == bias_hP.dtype:
        u_hTP = torch.baddbmm(bias_hP.unsqueeze(1), windows_hTI, weight_hIP)
    else:
        u_hTP = at_least_fp32(torch.bmm(windows_hTI, weight_hIP)).add_(bias_hP.unsqueeze(1))
    u_hBSP = u_hTP.reshape(z_hBSP.shape)
    _add_mean_skip(u_hBSP, _by_head(at_least_fp32(z_BSQ), weight_hIP), queries)

    length_hBS1 = torch.linalg.vector_norm(u_hBSP, dim=-1, keepdim=True)
    inverse_hBS1 = math.sqrt(z_hBSP.shape[-1]) / length_hBS1.clamp_min_(torch.finfo(u_hBSP.dtype).eps)
    y_hBSP = rotate(u_hBSP, operands_given.cos, operands_given.sin).mul_(
        _with_temperature(inverse_hBS1, operands_given.temperature_J)
    )
    y_BhSP = y_hBSP.to(z_BSQ.dtype).transpose(0, 1)
    kept = (u_hBSP, inverse_hBS1) if keeps else operands_given.empty(keeps)[2:]
    return y_BhSP[:, :queries], y_BhSP[:, queries:], *kept


def backward(
    grad_q_BHSP: Tensor, grad_k_BJSP: Tensor, u_hBSP: Tensor, inverse_hBS1: Tensor, *operands: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of z, weight, bias and temperature."""
    operands_given = ConvolutionOperands(*operands)  # type: ignore[arg-type]
    z_BSQ, weight_hIP, temperature_J = (
        operands_given.z_BSQ,
        operands_given.weight_hIP,
        operands_given.temperature_J,
    )
    z_hBSP = _by_head(z_BSQ, weight_hIP)
    heads, batch, length, head_dim = z_hBSP.shape
    queries = heads - len(temperature_J)
    grad_hBSP = torch.cat([grad_q_BHSP, grad_k_BJSP], dim=1).transpose(0, 1).to(u_hBSP.dtype)
    grad_hBSP = rotate(grad_hBSP, operands_given.cos, -operands_given.sin)

    along_hBS1 = (grad_hBSP * u_hBSP).sum(dim=-1, keepdim=True).mul_(inverse_hBS1)
    grad_temperature_J = along_hBS1[queries:].sum(dim=(1, 2, 3)).to(temperature_J.dtype)
    grad_hBSP.addcmul_(u_hBSP, along_hBS1.mul_(inverse_hBS1), value=-1 / head_dim)
    grad_hBSP.mul_(_with_temperature(inverse_hBS1, temperature_J))
    grad_bias_hP = grad_hBSP.sum(dim=(1, 2))

    ahead_hTI = _windows_ahead(grad_hBSP.to(z_BSQ.dtype), weight_hIP, operands_given.seen_BSW)
    grad_weight_hPI = torch.bmm(z_hBSP.flatten(1, 2).mT, ahead_hTI)
    grad_z_hTP = torch.bmm(ahead_hTI, _reversed(weight_hIP))
    grad_z_hBSP = at_least_fp32(grad_z_hTP).reshape(z_hBSP.shape)
    _add_mean_skip_backward(grad_z_hBSP, grad_hBSP, queries)
    grad_z_BSQ = z_BSQ.new_empty(batch, length, heads * head_dim)
    _by_head(grad_z_BSQ, weight_hIP).copy_(grad_z_hBSP)
    return grad_z_BSQ, _reversed(grad_weight_hPI.mT), grad_bias_hP, grad_temperature_J


def _by_head(z_BSQ: Tensor, weight_hIP: Tensor) -> Tensor:
    """[B, S, h * P] seen as [h, B, S, P]."""
    return torch.unflatten(z_BSQ, -1, (weight_hIP.shape[0], weight_hIP.shape[-1])).permute(2, 0, 1, 3)


def _reversed(weight_hIP: Tensor) -> Tensor:
    """Return the kernel [h, taps * P, P] from outputs back to inputs: taps reversed, [P, P] transposed."""
    return torch.unflatten(weight_hIP, 1, (-1, weight_hIP.shape[-1])).flip(1).mT.flatten(1, 2)


def _windows(z_hBSP: Tensor, weight_hIP: Tensor, seen_BSW: Tensor | None, before_hBWP: Tensor | None) -> Tensor:
    """Channels of each token and of those before it, oldest first: [h, B * S, taps * P]."""
    reach = weight_hIP.shape[1] // weight_hIP.shape[2] - 1
    padded = F.pad(z_hBSP, (0, 0, reach, 0)) if before_hBWP is None else torch.cat([before_hBWP, z_hBSP], dim=2)
    windows_hBSWP = padded.unfold(2, reach + 1, 1).mT
    if seen_BSW is not None:
        windows_hBSWP = windows_hBSWP * seen_BSW.flip(-1).unsqueeze(-1)
    return windows_hBSWP.reshape(len(weight_hIP), -1, weight_hIP.shape[1])


def _windows_ahead(grad_hBSP: Tensor, weight_hIP: Tensor, seen_BSW: Tensor | None) -> Tensor:
    """Gradients of each token and of those after it in whose windows it is, itself first: [h, B * S, taps * P]."""
    reach = weight_hIP.shape[1] // weight_hIP.shape[2] - 1
    ahead_hBSWP = F.pad(grad_hBSP, (0, 0, 0, reach)).unfold(2, reach + 1, 1).mT
    if seen_BSW is not None:
        seen_from_BSWW = F.pad(seen_BSW, (0, 0, 0, reach)).unfold(1, reach + 1, 1)
        ahead_BSW = seen_from_BSWW.diagonal(dim1=-2, dim2=-1).contiguous()
        ahead_hBSWP = ahead_hBSWP * ahead_BSW.unsqueeze(-1)
    return ahead_hBSWP.reshape(len(weight_hIP), -1, weight_hIP.shape[1])


def _add_mean_skip(u_hBSP: Tensor, z_hBSP: Tensor, queries: int) -> None:
    """Add to each query head its mean with its key head, and to each key head the mean of these over its group."""
    keys = len(u_hBSP) - queries
    z_JGBSP, z_JBSP = torch.unflatten(z_hBSP[:queries], 0, (keys, -1)), z_hBSP[queries:]
    mean_JGBSP = z_JGBSP + z_JBSP.unsqueeze(1)
    torch.unflatten(u_hBSP[:queries], 0, (keys, -1)).add_(mean_JGBSP, alpha=0.5)
    for mean_JBSP in mean_JGBSP.unbind(1):
        u_hBSP[queries:].add_(mean_JBSP, alpha=0.5 / mean_JGBSP.shape[1])


def _add_mean_skip_backward(grad_z_hBSP: Tensor, grad_u_hBSP: Tensor, queries: int) -> None:
    """Add the gradient of `_add_mean_skip` with respect to z."""
    keys = len(grad_u_hBSP) - queries
    u_JGBSP, u_JBSP = torch.unflatten(grad_u_hBSP[:queries], 0, (keys, -1)), grad_u_hBSP[queries:]
    mean_JGBSP = torch.add(u_JGBSP, u_JBSP.unsqueeze(1), alpha=1 / u_JGBSP.shape[1])
    torch.unflatten(grad_z_hBSP[:queries], 0, (keys, -1)).add_(mean_JGBSP, alpha=0.5)
    for mean_JBSP in mean_JGBSP.unbind(1):
        grad_z_hBSP[queries:].add_(mean_JBSP, alpha=0.5)


def _with_temperature(inverse_hBS1: Tensor, temperature_J: Tensor) -> Tensor:
    """Scale of every head: 1 / its root mean square, for keys times their temperature."""
    queries = len(inverse_hBS1) - len(temperature_J)
    keys_JBS1 = inverse_hBS1[queries:] * temperature_J.view(-1, 1, 1, 1)
    return torch.cat([inverse_hBS1[:queries], keys_JBS1])
