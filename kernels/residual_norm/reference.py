"""Join two streams and normalise their sum, and the gradients of that, as the definition has it.

    t = (h + b) a + (r + d) c                               residual scaling (ZAYA1, arXiv 2511.17127)
    n = t / sqrt(mean(t^2) + eps)                           RMSNorm (arXiv 1910.07467)
    n = (t - mean(t)) / sqrt(var(t) + eps)                  LayerNorm (arXiv 1607.06450)
    x = n w + v

over the last dimension, with h hidden, r residual, (a, b) and (c, d) their scales and biases, w weight, v bias.
With G the gradient of x, J that of t from elsewhere, s the inverse root and m(.) the mean over a row:

    g  = s (G w - n m(n G w) [- m(G w)]) + J                the bracket in LayerNorm alone
    dh = g a      da = sum g (h + b)      db = a sum g      dr, dc, dd alike
    dw = sum G n  dv = sum G                                sums over all rows

Everything is computed in fp32, or in fp64 if the operands are fp64.
"""

from __future__ import annotations

from torch import Tensor

from zslurm.kernels.residual_norm.operands import NormOperands

Gradients = tuple[Tensor | None, ...]
"""One for each of `NormOperands`, in their order and format; None for those that are not there or do not count."""


def forward(eps: float, centered: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x in the weight's format, t, and the statistics of each row.

    Args:
        eps: added under the root.
        centered: LayerNorm instead of RMSNorm.
        operands: the fields of `NormOperands`.

    Returns:
        x of the shape of hidden; t likewise, in fp32 at least, or without elements if nothing is joined; and
        the inverse roots [1, R] of all R rows, for LayerNorm with their means behind [2, R].
    """
    operands_given = NormOperands(*operands)  # type: ignore[arg-type]
    joined = _join(operands_given)
    mean = joined.mean(dim=-1, keepdim=True) if centered else joined.new_zeros(())
    inverse = ((joined - mean).square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    x = (joined - mean) * inverse * operands_given.weight.to(operands_given.wide)
    if operands_given.bias is not None:
        x = x + operands_given.bias
    statistics = joined.new_empty(2 if centered else 1, inverse.numel())
    statistics[0] = inverse.flatten()
    if centered:
        statistics[1] = mean.flatten()
    return x.to(operands_given.weight.dtype), joined if operands_given.joins else joined.new_empty(0), statistics


def _join(given: NormOperands) -> Tensor:
    joined = _affine(given.hidden.to(given.wide), given.hidden_scale, given.hidden_bias)
    if given.residual is not None:
        joined = joined + _affine(given.residual.to(given.wide), given.residual_scale, given.residual_bias)
    return joined


def _affine(x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return x if scale is None or bias is None else (x + bias) * scale


def backward(
    grad_x: Tensor | None,
    grad_joined: Tensor | None,
    joined: Tensor,
    statistics: Tensor,
    *operands: Tensor | None,
) -> Gradients:
    """Return the gradients of the operands.

    Args:
        grad_x: gradient of x, or None if x does not count.
        grad_joined: gradient of t, or None if t does not count; one of the two does.
        joined: t, as `forward` returned it.
        statistics: as `forward` returned them.
        operands: those of `forward`.
    """
    operands_given = NormOperands(*operands)  # type: ignore[arg-type]
    grad_weight = grad_bias = None
    gradients = [] if grad_joined is None else [grad_joined.to(operands_given.wide)]
    if grad_x is not None:
        grad_x = grad_x.to(operands_given.wide)
        per_row = [statistic.view(*operands_given.hidden.shape[:-1], 1) for statistic in statistics.unbind()]
        inverse, mean = per_row[0], per_row[1] if len(per_row) > 1 else None
        centered = joined if operands_given.joins else operands_given.hidden.to(operands_given.wide)
        centered = centered if mean is None else centered - mean
        normal = centered * inverse
        weighted = grad_x * operands_given.weight
        gradient = weighted - normal * (weighted * normal).mean(dim=-1, keepdim=True)
        if mean is not None:
            gradient = gradient - weighted.mean(dim=-1, keepdim=True)
        gradients.append(gradient * inverse)
        grad_weight = _sum_rows(grad_x * normal).to(operands_given.weight.dtype)
        grad_bias = _sum_rows(grad_x).to(operands_given.bias.dtype) if operands_given.bias is not None else None
    total = sum(gradients[1:], start=gradients[0])
    of_hidden = _affine_backward(
        total, operands_given.hidden, operands_given.hidden_scale, operands_given.hidden_bias
    )
    of_residual = _affine_backward(
        total, operands_given.residual, operands_given.residual_scale, operands_given.residual_bias
    )
    return *of_hidden, *of_residual, grad_weight, grad_bias


def _affine_backward(gradient: Tensor, x: Tensor | None, scale: Tensor | None, bias: Tensor | None) -> Gradients:
    """Return the gradients of (x + bias) scale with respect to x, scale and bias."""
    if x is None:
        return None, None, None
    if scale is None or bias is None:
        return gradient.to(x.dtype), None, None
    grad_scale = _sum_rows(gradient * (x.to(gradient.dtype) + bias))
    grad_bias = _sum_rows(gradient) * scale
    return (gradient * scale).to(x.dtype), grad_scale.to(scale.dtype), grad_bias.to(bias.dtype)


def _sum_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(dim=0)
