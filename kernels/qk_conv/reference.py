"""Make queries and keys, and their gradients, in torch: the definition, and what a CPU runs.

    m = depthwise(z) + b1                       each channel along time, causal
    c = grouped(m) + b2                         all channels of a head along time, causal
    mean_q[h] = (z_q[h] + z_k[j of h]) / 2      mean_k[j]: the mean of mean_q over the heads of j
    u = c + mean                                the skip past the convolutions
    y = rotate(sqrt(P) u / max(|u|, eps))       for keys times a temperature; eps is that of u's format

Sources: arXiv 2510.04476 (CCA), arXiv 2605.05365 IV-D (from the mean on in at least fp32). Zeros stand before a
sequence once: m is b1 at the tokens before the first. A token sees no token of another document, so that each
document is as if it were alone.

Both convolutions are linear and nothing is between them, so they are applied as one, of width w1 + w2 - 1 with
one group per head: its kernel is their product (a few hundred thousand numbers, made again in each forward) and
the depthwise bias, carried through the grouped convolution, joins that one's bias. This is the published order
exactly: zeros are put before the sequence once, and at its first tokens the second convolution sees the first
one's bias, not zero. tests/kernels/qk_conv/definition.py has the two one after the other.

The forward keeps the mixed form u and one number per head and token; autograd would keep about fifteen tensors of
that size. The windows are written to memory, as an operand of the product.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def rotate(x_SP: Tensor, cos_SA: Tensor, sin_SA: Tensor) -> Tensor:
    """Turn the first 2 A channels of x [..., S, P], in halves, by the angles of their positions."""
    pairs = cos_SA.shape[-1]
    first, second, still = x_SP.split_with_sizes([pairs, pairs, x_SP.shape[-1] - 2 * pairs], dim=-1)
    turned_first = torch.addcmul(first * cos_SA, second, sin_SA, value=-1)
    turned_second = torch.addcmul(second * cos_SA, first, sin_SA)
    return torch.cat([turned_first, turned_second, still], dim=-1)


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


class ConvolutionOperands(NamedTuple):
    """The tensors of one call; h counts query heads, then key heads.

    Attributes:
        z_BSQ: projected queries and keys, side by side.
        weight_hIP: of the joined kernel, for windows of I = taps * P channels.
        bias_hP: of the joined kernel.
        temperature_J: of each key head.
        cos: [S, A] or [B, S, A].
        sin: likewise.
        seen_BSW: whether a token sees each of those before it, itself first; None if it sees all.
        before_BWQ: z of the tokens before the first, or None for zeros.
    """

    z_BSQ: Tensor
    weight_hIP: Tensor
    bias_hP: Tensor
    temperature_J: Tensor
    cos: Tensor
    sin: Tensor
    seen_BSW: Tensor | None
    before_BWQ: Tensor | None

    @property
    def mixed_shape(self) -> tuple[int, int, int, int]:
        """Return the shape [h, B, S, P] of what the norm takes."""
        (heads, _, head_dim), (batch, length, _) = self.weight_hIP.shape, self.z_BSQ.shape
        return heads, batch, length, head_dim

    def empty(self, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, and what the gradient takes, without elements unless the forward `keeps` it."""
        heads, batch, length, head_dim = self.mixed_shape
        keys = self.temperature_J.shape[0]
        kept = heads if keeps else 0
        return (
            self.z_BSQ.new_empty(batch, heads - keys, length, head_dim),
            self.z_BSQ.new_empty(batch, keys, length, head_dim),
            self.bias_hP.new_empty(kept, batch, length, head_dim),
            self.bias_hP.new_empty(kept, batch, length, 1),
        )


# u = window W + b + skip; y = rotate(u) temperature sqrt(P) / |u|. Tensors [h, B, S, P] hold all heads.


def forward(keeps: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, and if it `keeps` them the mixed form [h, B, S, P] and sqrt(P) / |u| [h, B, S, 1]."""
    operands = ConvolutionOperands(*tensors)  # type: ignore[arg-type]
    z_BSQ, weight_hIP, bias_hP = operands.z_BSQ, operands.weight_hIP, operands.bias_hP
    z_hBSP = _by_head(z_BSQ, weight_hIP)
    queries = len(z_hBSP) - len(operands.temperature_J)
    before_hBWP = None if operands.before_BWQ is None else _by_head(operands.before_BWQ, weight_hIP)
    windows_hTI = _windows(z_hBSP, weight_hIP, operands.seen_BSW, before_hBWP)
    if z_BSQ.dtype == bias_hP.dtype:
        u_hTP = torch.baddbmm(bias_hP.unsqueeze(1), windows_hTI, weight_hIP)
    else:
        u_hTP = at_least_fp32(torch.bmm(windows_hTI, weight_hIP)).add_(bias_hP.unsqueeze(1))
    u_hBSP = u_hTP.reshape(z_hBSP.shape)
    _add_mean_skip(u_hBSP, _by_head(at_least_fp32(z_BSQ), weight_hIP), queries)

    length_hBS1 = torch.linalg.vector_norm(u_hBSP, dim=-1, keepdim=True)
    inverse_hBS1 = math.sqrt(z_hBSP.shape[-1]) / length_hBS1.clamp_min_(torch.finfo(u_hBSP.dtype).eps)
    y_hBSP = rotate(u_hBSP, operands.cos, operands.sin).mul_(
        _with_temperature(inverse_hBS1, operands.temperature_J)
    )
    y_BhSP = y_hBSP.to(z_BSQ.dtype).transpose(0, 1)
    kept = (u_hBSP, inverse_hBS1) if keeps else operands.empty(keeps)[2:]
    return y_BhSP[:, :queries], y_BhSP[:, queries:], *kept


def backward(
    grad_q_BHSP: Tensor, grad_k_BJSP: Tensor, u_hBSP: Tensor, inverse_hBS1: Tensor, *tensors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of z, weight, bias and temperature."""
    operands = ConvolutionOperands(*tensors)  # type: ignore[arg-type]
    z_BSQ, weight_hIP, temperature_J = (
        operands.z_BSQ,
        operands.weight_hIP,
        operands.temperature_J,
    )
    z_hBSP = _by_head(z_BSQ, weight_hIP)
    heads, batch, length, head_dim = z_hBSP.shape
    queries = heads - len(temperature_J)
    grad_hBSP = torch.cat([grad_q_BHSP, grad_k_BJSP], dim=1).transpose(0, 1).to(u_hBSP.dtype)
    grad_hBSP = rotate(grad_hBSP, operands.cos, -operands.sin)

    along_hBS1 = (grad_hBSP * u_hBSP).sum(dim=-1, keepdim=True).mul_(inverse_hBS1)
    grad_temperature_J = along_hBS1[queries:].sum(dim=(1, 2, 3)).to(temperature_J.dtype)
    grad_hBSP.addcmul_(u_hBSP, along_hBS1.mul_(inverse_hBS1), value=-1 / head_dim)
    grad_hBSP.mul_(_with_temperature(inverse_hBS1, temperature_J))
    grad_bias_hP = grad_hBSP.sum(dim=(1, 2))

    ahead_hTI = _windows_ahead(grad_hBSP.to(z_BSQ.dtype), weight_hIP, operands.seen_BSW)
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
