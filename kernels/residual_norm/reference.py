"""Join two streams and normalise their sum, and the gradients of that: the definition, and what a CPU runs.

    t = (h + b) a + (r + d) c                               residual scaling (ZAYA1, arXiv 2511.17127)
    n = t / sqrt(mean(t^2) + eps)                           RMSNorm (arXiv 1910.07467)
    n = (t - mean(t)) / sqrt(var(t) + eps)                  LayerNorm (arXiv 1607.06450)
    x = n w + v

over the last dimension, with h hidden, r residual, (a, b) and (c, d) their scales and biases, w weight, v bias.
With G the gradient of x, J that of t from elsewhere, s the inverse root and m(.) the mean over a row:

    g  = s (G w - n m(n G w) [- m(G w)]) + J                the bracket in LayerNorm alone
    dh = g a      da = sum g (h + b)      db = a sum g      dr, dc, dd alike
    dw = sum G n  dv = sum G                                sums over all rows

Everything is computed in fp32, or in fp64 if the operands are fp64, in few passes: the biases are multiplied out,
t = h a + r c + (b a + d c), and one product with G serves the sum over the rows and the one along each row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
"""One for each of `NormOperands`, in their order and format; None for those that are not there."""


class NormOperands(NamedTuple):
    """The tensors of one call; D is the width of a row.

    Attributes:
        hidden: [..., D], with one dimension or more before D.
        hidden_scale: [D].
        hidden_bias: [D].
        residual: of the shape of hidden, or None for no residual stream.
        residual_scale: [D]; there is one exactly if there is a residual stream.
        residual_bias: [D] likewise.
        weight: [D]; its format is that of the normalised result, and of all vectors.
        bias: [D], added behind the weight, or None.
    """

    hidden: Tensor
    hidden_scale: Tensor
    hidden_bias: Tensor
    residual: Tensor | None
    residual_scale: Tensor | None
    residual_bias: Tensor | None
    weight: Tensor
    bias: Tensor | None

    @property
    def wide(self) -> torch.dtype:
        """Return the format that is computed in: fp32, or fp64 if the operands are."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def streams(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return each stream with its scale and bias."""
        hidden, residual = self[:3], self[3:6]
        return [hidden] if None in residual else [hidden, residual]  # type: ignore[list-item]


def forward(eps: float, centered: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x in the weight's format, t in fp32 at least, and the statistics of each row.

    Args:
        eps: added under the root.
        centered: LayerNorm instead of RMSNorm.
        tensors: the fields of `NormOperands`.

    Returns:
        x and t of the shape of hidden, and the inverse roots [1, R] of all R rows, for LayerNorm with their means
        behind [2, R].
    """
    operands = NormOperands(*tensors)  # type: ignore[arg-type]
    wide = operands.wide
    shifts = [bias * scale.to(wide) for _, scale, bias in operands.streams]
    products = [(x.to(wide), scale.to(wide)) for x, scale, _ in operands.streams]
    joined = torch.addcmul(sum(shifts[1:], start=shifts[0]), *products[0])
    for product in products[1:]:
        joined.addcmul_(*product)
    mean = joined.mean(dim=-1, keepdim=True) if centered else None
    deviation = joined if mean is None else joined - mean
    inverse = torch.linalg.vector_norm(deviation, dim=-1, keepdim=True)
    inverse = inverse.square_().div_(joined.shape[-1]).add_(eps).rsqrt_()
    x = (deviation * inverse).mul_(operands.weight.to(wide))
    if operands.bias is not None:
        x.add_(operands.bias)
    statistics = torch.stack([statistic.flatten() for statistic in (inverse, mean) if statistic is not None])
    return x.to(operands.weight.dtype), joined, statistics


def backward(
    grad_x: Tensor, grad_joined: Tensor, joined: Tensor, statistics: Tensor, *tensors: Tensor | None
) -> Gradients:
    """Return the gradients of the operands.

    Args:
        grad_x: gradient of x.
        grad_joined: gradient of t from elsewhere.
        joined: t, as `forward` returned it.
        statistics: as `forward` returned them.
        tensors: those of `forward`.
    """
    operands = NormOperands(*tensors)  # type: ignore[arg-type]
    wide_x, weight = grad_x.to(operands.wide), operands.weight.to(operands.wide)
    inverse, *means = (row.view(*joined.shape[:-1], 1) for row in statistics.unbind())
    deviation = joined - means[0] if means else joined
    product = wide_x * deviation
    grad_weight = inverse.flatten() @ product.flatten(0, -2)
    along = (product @ weight).unsqueeze(-1) * inverse.square() / weight.numel()
    grad = (wide_x * weight).addcmul_(deviation, along, value=-1)
    if means:
        grad.sub_((wide_x @ weight).unsqueeze(-1) / weight.numel())
    grad.mul_(inverse).add_(grad_joined)

    total = _sum_rows(grad)
    of_streams: list[Tensor | None] = []
    for x, scale, bias in operands.streams:
        of_scale = _sum_rows(grad * x) + total * bias
        of_streams += (grad * scale).to(x.dtype), of_scale.to(scale.dtype), (total * scale).to(bias.dtype)
    if operands.residual is None:
        of_streams += None, None, None
    grad_bias = None if operands.bias is None else _sum_rows(wide_x).to(operands.bias.dtype)
    return *of_streams, grad_weight.to(operands.weight.dtype), grad_bias


def _sum_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(dim=0)
