"""What runs inside of graphs of `torch.compile`, where no dispatch can be traced.

A CPU's operands go through torch's operators as they are, which the compiler fuses; those of a GPU through one
operator for each direction, which dispatches when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from zslurm.kernels.operators import schema_of
from zslurm.kernels.residual_norm import by_torch, operations, reference
from zslurm.kernels.residual_norm.operands import NormOperands
from zslurm.kernels.residual_norm.reference import Gradients


def forward_of(centered: bool, given: NormOperands) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return what computes x, t and the statistics in a graph."""
    if given.hidden.device.type == "cpu":
        return _torch(centered, given).forward  # type: ignore[no-any-return]
    return forward_in_graph


def backward_of(centered: bool, given: NormOperands) -> Callable[..., Gradients]:
    """Return what computes the gradients in a graph."""
    if given.hidden.device.type == "cpu":
        return _torch(centered, given).backward  # type: ignore[no-any-return]
    return backward_in_graph


def _torch(centered: bool, given: NormOperands) -> ModuleType:
    return reference if by_torch.lacks(centered, given) else by_torch


@torch.library.custom_op(
    "zslurm::residual_norm",
    mutates_args=(),
    schema=f"(float eps, bool centered, {schema_of(NormOperands)}) -> (Tensor, Tensor, Tensor)",
)
def forward_in_graph(eps: float, centered: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, t and the statistics, by one operator."""
    x, joined, statistics = operations.forward(eps, centered, *operands)
    return x, joined, statistics


@forward_in_graph.register_fake
def _(eps: float, centered: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    operands_given = NormOperands(*operands)  # type: ignore[arg-type]
    hidden = operands_given.hidden
    joined = hidden.new_empty(hidden.shape if operands_given.joins else (0,), dtype=operands_given.wide)
    rows = hidden.numel() // hidden.shape[-1]
    statistics = hidden.new_empty((2 if centered else 1, rows), dtype=operands_given.wide)
    return torch.empty(hidden.shape, dtype=operands_given.weight.dtype, device=hidden.device), joined, statistics


_OF_BACKWARD = "Tensor? grad_x, Tensor? grad_joined, Tensor joined, Tensor statistics"


@torch.library.custom_op(
    "zslurm::residual_norm_backward",
    mutates_args=(),
    schema=f"({_OF_BACKWARD}, {schema_of(NormOperands)}) -> Tensor[]",
)
def _backward(*args: Tensor | None) -> list[Tensor]:
    return [gradient for gradient in operations.backward(*args) if gradient is not None]


@_backward.register_fake
def _(grad_x: Tensor | None, *others: Tensor | None) -> list[Tensor]:
    operands_given = NormOperands(*others[3:])  # type: ignore[arg-type]
    has_gradient = _has_gradient(grad_x, operands_given)
    return [
        torch.empty(operand.shape, dtype=operand.dtype, device=operand.device)
        for operand, is_there in zip(operands_given, has_gradient, strict=True)
        if operand is not None and is_there
    ]


def _has_gradient(grad_x: Tensor | None, given: NormOperands) -> Sequence[bool]:
    """Return for each operand whether it gets a gradient: those of the norm itself only with one of x."""
    behind_norm = grad_x is not None
    return [*(operand is not None for operand in given[:6]), behind_norm, behind_norm and given.bias is not None]


def backward_in_graph(
    grad_x: Tensor | None,
    grad_joined: Tensor | None,
    joined: Tensor,
    statistics: Tensor,
    *operands: Tensor | None,
) -> Gradients:
    """Return one gradient or None for each operand: operators return no None."""
    gradients = iter(_backward(grad_x, grad_joined, joined, statistics, *operands))
    given = NormOperands(*operands)  # type: ignore[arg-type]
    return tuple(next(gradients) if has_gradient else None for has_gradient in _has_gradient(grad_x, given))
