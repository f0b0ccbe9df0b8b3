"""Check the operands of the experts' operations, and state which of them Triton's kernels take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zslurm.kernels import checks
from zslurm.kernels.arch import is_gpu
from zslurm.kernels.experts.reference import Order

MOST_CLASSES = 1024
_IN_TRITON = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int32)


def lacks_in_triton(*args: Any) -> str | None:
    """Return what of these operands the kernels do not take, or None."""
    tensors = [operand for operand in args if isinstance(operand, Tensor)]
    for operand in tensors:
        if not is_gpu(operand.device):
            return f"operands on {operand.device.type}"
        if operand.dtype not in _IN_TRITON:
            return f"{checks.short(operand.dtype)} operands"
    contiguous = all(operand.is_contiguous() for operand in tensors)
    return None if contiguous else "operands that are not contiguous"


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return a format in at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def check_choose(logits_TC: Tensor, bias_C: Tensor, choices: int) -> None:
    """Raise ValueError for operands that no implementation of `choose` takes."""
    name = "experts.choose"
    checks.shape(name, "logits", logits_TC, (None, None), "TC")
    classes = logits_TC.shape[1]
    checks.shape(name, "bias", bias_C, (classes,), "C")
    if not 1 <= choices <= classes:
        raise ValueError(f"{name}: {choices} choices among {classes} classes")
    if classes > MOST_CLASSES:
        raise ValueError(f"{name}: {classes} classes, but at most {MOST_CLASSES} are routed to")
    checks.one_device(name, logits=logits_TC, bias=bias_C)


def check_choose_backward(
    grad_weights_TK: Tensor, classes_TK: Tensor, probabilities_TC: Tensor, dtype: torch.dtype
) -> None:
    """Raise ValueError for operands that no implementation of `choose_backward` takes."""
    name = "experts.choose_backward"
    checks.shape(name, "probabilities", probabilities_TC, (None, None), "TC")
    checks.shape(name, "grad_weights", grad_weights_TK, (len(probabilities_TC), None), "TK")
    checks.shape(name, "classes", classes_TK, tuple(grad_weights_TK.shape), "TK")
    checks.one_dtype(name, grad_weights=grad_weights_TK, probabilities=probabilities_TC)
    checks.one_device(name, grad_weights=grad_weights_TK, classes=classes_TK, probabilities=probabilities_TC)


def check_sort(classes_TK: Tensor, classes: int, experts: int) -> None:
    """Raise ValueError for operands that no implementation of `sort` takes."""
    name = "experts.sort"
    checks.shape(name, "classes", classes_TK, (None, None), "TK")
    checks.dtype_among(name, (torch.int64,), classes=classes_TK)
    if not 1 <= experts <= classes <= MOST_CLASSES:
        raise ValueError(
            f"{name}: {experts} experts among {classes} classes, of which there may be {MOST_CLASSES}"
        )


def check_gather(x_TD: Tensor, order_N: Tensor, choices: int) -> None:
    """Raise ValueError for operands that no implementation of `gather` takes."""
    name = "experts.gather"
    checks.shape(name, "x", x_TD, (None, None), "TD")
    checks.shape(name, "order", order_N, (len(x_TD) * choices,), "N")
    _rows_of_int64(name, order=order_N)
    checks.one_device(name, x=x_TD, order=order_N)


def check_activate(both_NO: Tensor, weights_N: Tensor) -> None:
    """Raise ValueError for operands that no implementation of `activate` takes."""
    _check_activation("experts.activate", both_NO, weights_N)


def check_activate_backward(grad_NF: Tensor, both_NO: Tensor, weights_N: Tensor) -> None:
    """Raise ValueError for operands that no implementation of `activate_backward` takes."""
    name = "experts.activate_backward"
    _check_activation(name, both_NO, weights_N)
    checks.shape(name, "grad", grad_NF, (len(both_NO), both_NO.shape[1] // 2), "NF")
    checks.one_dtype(name, grad=grad_NF, both=both_NO)
    checks.one_device(name, grad=grad_NF, both=both_NO)


def _check_activation(name: str, both_NO: Tensor, weights_N: Tensor) -> None:
    checks.shape(name, "both", both_NO, (None, None), "NO")
    if both_NO.shape[1] % 2:
        raise ValueError(f"{name}: both has {both_NO.shape[1]} columns, but must have gate and up of one width")
    checks.shape(name, "weights", weights_N, (len(both_NO),), "N")
    checks.dtype_among(name, (wide(both_NO.dtype),), weights=weights_N)
    checks.one_device(name, both=both_NO, weights=weights_N)


def check_combine(
    y_ND: Tensor, x_TD: Tensor, weights_TK: Tensor, back_N: Tensor, ends_E: Tensor, identity: bool
) -> None:
    """Raise ValueError for operands that no implementation of `combine` takes."""
    name = "experts.combine"
    checks.shape(name, "x", x_TD, (None, None), "TD")
    checks.shape(name, "weights", weights_TK, (len(x_TD), None), "TK")
    checks.shape(name, "y", y_ND, (weights_TK.numel(), x_TD.shape[1]), "ND")
    _check_back(name, weights_TK, back_N, ends_E)
    checks.one_dtype(name, y=y_ND, x=x_TD)
    checks.dtype_among(name, (wide(x_TD.dtype),), weights=weights_TK)
    checks.one_device(name, y=y_ND, x=x_TD, weights=weights_TK, back=back_N, ends=ends_E)


def check_weights_backward(
    grad_weights_N: Tensor, grad_TD: Tensor, x_TD: Tensor, back_N: Tensor, ends_E: Tensor, identity: bool
) -> None:
    """Raise ValueError for operands that no implementation of `weights_backward` takes."""
    name = "experts.weights_backward"
    checks.shape(name, "x", x_TD, (None, None), "TD")
    checks.shape(name, "grad", grad_TD, tuple(x_TD.shape), "TD")
    checks.shape(name, "grad_weights", grad_weights_N, (None,), "N")
    if len(grad_weights_N) % max(1, len(x_TD)):
        raise ValueError(f"{name}: {len(grad_weights_N)} choices of {len(x_TD)} tokens")
    _check_back(name, grad_weights_N, back_N, ends_E)
    checks.one_dtype(name, grad=grad_TD, x=x_TD)
    checks.one_device(name, grad_weights=grad_weights_N, grad=grad_TD, x=x_TD, back=back_N, ends=ends_E)


def _check_back(name: str, weights: Tensor, back_N: Tensor, ends_E: Tensor) -> None:
    checks.shape(name, "back", back_N, (weights.numel(),), "N")
    checks.shape(name, "ends", ends_E, (None,), "E")
    if not len(ends_E):
        raise ValueError(f"{name}: there must be an expert")
    _rows_of_int64(name, back=back_N)
    checks.dtype_among(name, (torch.int32,), ends=ends_E)


def _rows_of_int64(name: str, **rows: Tensor) -> None:
    checks.dtype_among(name, (torch.int64,), **rows)


def check_network(
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EOD: Tensor,
    down_EDF: Tensor,
    order: Order,
    identity: bool,
    sums: object = None,
) -> None:
    """Raise ValueError for operands that no implementation of `network` takes."""
    name = "experts.network"
    checks.shape(name, "x", x_TD, (None, None), "TD")
    width = x_TD.shape[1]
    checks.shape(name, "weights", weights_TK, (len(x_TD), None), "TK")
    checks.shape(name, "down", down_EDF, (None, width, None), "EDF")
    experts, _, inner = down_EDF.shape
    checks.shape(name, "gate_up", gate_up_EOD, (experts, 2 * inner, width), "EOD")
    checks.shape(name, "order", order.order_N, (weights_TK.numel(),), "N")
    checks.shape(name, "ends", order.ends_E, (experts,), "E")
    checks.one_dtype(name, x=x_TD, gate_up=gate_up_EOD, down=down_EDF)
    checks.dtype_among(name, (wide(x_TD.dtype),), weights=weights_TK)
    checks.one_device(name, x=x_TD, weights=weights_TK, gate_up=gate_up_EOD, down=down_EDF, order=order.order_N)
