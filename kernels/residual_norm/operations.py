"""The two passes as operations: what is wrong with operands, and which implementation takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zslurm.kernels import checks
from zslurm.kernels.dispatch import Implementation, Operation, Sizes
from zslurm.kernels.residual_norm import by_torch, reference
from zslurm.kernels.residual_norm.operands import Operands, check


def _check_forward(eps: float, centered: bool, *operands: Any) -> None:
    if not eps >= 0:
        raise ValueError(f"residual_norm: eps is {eps}, but must be at least 0")
    check("residual_norm", Operands(*operands))


def _check_backward(
    grad_x: Tensor | None, grad_joined: Tensor | None, joined: Tensor, statistics: Tensor, *operands: Any
) -> None:
    name, given = "residual_norm.backward", Operands(*operands)
    check(name, given)
    if grad_x is None and grad_joined is None:
        raise ValueError(f"{name}: neither grad_x nor grad_joined is given")
    shape, letters = tuple(given.hidden.shape), "." * given.hidden.dim()
    checks.dtype_among(name, (given.wide,), statistics=statistics, joined=joined)
    checks.shape(name, "statistics", statistics, (None, given.hidden.numel() // shape[-1]), "KR")
    gradients = {"grad_x": grad_x, "grad_joined": grad_joined, "joined": joined if given.joins else None}
    there = {key: value for key, value in gradients.items() if value is not None}
    for key, value in there.items():
        checks.shape(name, key, value, shape, letters)
    checks.one_device(name, hidden=given.hidden, statistics=statistics, **there)


def _sizes(given: Operands) -> Sizes:
    width = given.hidden.shape[-1]
    return {"dtype": checks.short(given.hidden.dtype), "rows": given.hidden.numel() // width, "width": width}


def _lacks_in_triton(given: Operands) -> str | None:
    if given.hidden.device.type != "cuda":
        return f"operands on {given.hidden.device.type}"
    return "float64 operands" if given.hidden.dtype == torch.float64 else None


def _by_triton(function: str) -> Any:
    def run(*args: Any) -> Any:
        from zslurm.kernels.residual_norm import triton

        return getattr(triton, function)(*args)

    return run


forward = Operation(
    name="residual_norm.forward",
    reference=reference.forward,
    implementations=[
        Implementation(
            "triton",
            _by_triton("forward"),
            lambda eps, centered, *operands: _lacks_in_triton(Operands(*operands)),
        ),
        Implementation(
            "torch",
            by_torch.forward,
            lambda eps, centered, *operands: by_torch.lacks(centered, Operands(*operands)),
        ),
    ],
    check=_check_forward,
    device=lambda eps, centered, hidden, *_: hidden.device,
    sizes=lambda eps, centered, *operands: _sizes(Operands(*operands)),
)

backward = Operation(
    name="residual_norm.backward",
    reference=reference.backward,
    implementations=[
        Implementation(
            "triton",
            _by_triton("backward"),
            lambda grad_x, grad_joined, joined, statistics, *operands: _lacks_in_triton(Operands(*operands)),
        ),
        Implementation(
            "torch",
            by_torch.backward,
            lambda grad_x, grad_joined, joined, statistics, *operands: by_torch.lacks(
                len(statistics) == 2, Operands(*operands)
            ),
        ),
    ],
    check=_check_backward,
    device=lambda grad_x, grad_joined, joined, statistics, hidden, *_: hidden.device,
    sizes=lambda grad_x, grad_joined, joined, statistics, *operands: _sizes(Operands(*operands)),
)

OPERATIONS = (forward, backward)
