"""The two passes as operations: what is wrong with operands, and which implementation takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels import checks
from zslurm.kernels.arch import is_gpu
from zslurm.kernels.dispatch import Implementation, Operation, Sizes, in_triton
from zslurm.kernels.residual_norm import by_torch, reference
from zslurm.kernels.residual_norm.operands import NormOperands, check


def _check_forward(eps: float, centered: bool, *operands: Any) -> None:
    if not eps >= 0:
        raise ValueError(f"residual_norm: eps is {eps}, but must be at least 0")
    check("residual_norm", NormOperands(*operands))


def _check_backward(
    grad_x: Tensor | None, grad_joined: Tensor | None, joined: Tensor, statistics: Tensor, *operands: Any
) -> None:
    name, operands_given = "residual_norm.backward", NormOperands(*operands)
    check(name, operands_given)
    if grad_x is None and grad_joined is None:
        raise ValueError(f"{name}: neither grad_x nor grad_joined is given")
    shape, letters = tuple(operands_given.hidden.shape), "." * operands_given.hidden.dim()
    checks.dtype_among(name, (operands_given.wide,), statistics=statistics, joined=joined)
    checks.shape(name, "statistics", statistics, (None, operands_given.hidden.numel() // shape[-1]), "KR")
    gradients = {"grad_x": grad_x, "grad_joined": grad_joined, "joined": joined if operands_given.joins else None}
    gradients_given = {key: value for key, value in gradients.items() if value is not None}
    for key, value in gradients_given.items():
        checks.shape(name, key, value, shape, letters)
    checks.one_device(name, hidden=operands_given.hidden, statistics=statistics, **gradients_given)


def _sizes(given: NormOperands) -> Sizes:
    width = given.hidden.shape[-1]
    return {"dtype": checks.short(given.hidden.dtype), "rows": given.hidden.numel() // width, "width": width}


def _lacks_in_triton(given: NormOperands) -> str | None:
    if not is_gpu(given.hidden.device):
        return f"operands on {given.hidden.device.type}"
    return "float64 operands" if given.hidden.dtype == torch.float64 else None


def _pass(name: str, check: Callable[..., None], before: int, centered: Callable[..., bool]) -> Operation:
    """Return a pass as an operation, which has so many arguments before the operands."""

    def given(args: Sequence[Any]) -> NormOperands:
        return NormOperands(*args[before:])

    return Operation(
        name=f"residual_norm.{name}",
        reference=getattr(reference, name),
        implementations=[
            in_triton("residual_norm", name, lambda *args: _lacks_in_triton(given(args))),
            Implementation(
                "torch", getattr(by_torch, name), lambda *args: by_torch.lacks(centered(*args), given(args))
            ),
        ],
        check=check,
        device=lambda *args: args[before].device,
        sizes=lambda *args: _sizes(given(args)),
    )


forward = _pass("forward", _check_forward, 2, lambda eps, centered, *_: centered)
backward = _pass("backward", _check_backward, 4, lambda x, joined, t, statistics, *_: len(statistics) == 2)

OPERATIONS = (forward, backward)
