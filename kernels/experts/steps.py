"""Run routing and the experts in steps, without waiting for the device: each an operation, with what it refuses.

`network` is what GPUs run. Kept for backward are the tokens, which others keep as well, and the first product. The
gathered rows are gathered again there, and the router's weights get their gradient from the activation's, so that
results are not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels import checks
from zslurm.kernels.arch import is_gpu
from zslurm.kernels.checks import short
from zslurm.kernels.dispatch import Operation, Sizes, in_triton, on_gpus
from zslurm.kernels.experts import reference
from zslurm.kernels.experts.reference import Order
from zslurm.kernels.grouped_gemm import Groups, add_weight_gradient, multiply, weight_gradient

# --- What is wrong with operands ---------------------------------------------------------------------------------

_MOST_CLASSES = 1024
_IN_TRITON = (torch.bfloat16, torch.float32, torch.int64, torch.int32)


def _lacks_in_triton(*args: Any) -> str | None:
    """Return which operands the kernels do not take, as a phrase, or None."""
    tensors = [operand for operand in args if isinstance(operand, Tensor)]
    for operand in tensors:
        if not is_gpu(operand.device):
            return f"operands on {operand.device.type}"
        if operand.dtype not in _IN_TRITON:
            return f"{short(operand.dtype)} operands"
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
    if classes > _MOST_CLASSES:
        raise ValueError(f"{name}: {classes} classes, but at most {_MOST_CLASSES} are routed to")
    checks.one_device(name, logits=logits_TC, bias=bias_C)


def _check_choose_backward(
    grad_weights_TK: Tensor, classes_TK: Tensor, probabilities_TC: Tensor, dtype: torch.dtype
) -> None:
    """Raise ValueError for operands that no implementation of `choose_backward` takes."""
    name = "experts.choose_backward"
    checks.shape(name, "probabilities", probabilities_TC, (None, None), "TC")
    checks.shape(name, "grad_weights", grad_weights_TK, (len(probabilities_TC), None), "TK")
    checks.shape(name, "classes", classes_TK, tuple(grad_weights_TK.shape), "TK")
    checks.one_dtype(name, grad_weights=grad_weights_TK, probabilities=probabilities_TC)
    checks.one_device(name, grad_weights=grad_weights_TK, classes=classes_TK, probabilities=probabilities_TC)


def _check_sort(classes_TK: Tensor, classes: int, experts: int) -> None:
    """Raise ValueError for operands that no implementation of `sort` takes."""
    name = "experts.sort"
    checks.shape(name, "classes", classes_TK, (None, None), "TK")
    checks.dtype_among(name, (torch.int64,), classes=classes_TK)
    if not 1 <= experts <= classes <= _MOST_CLASSES:
        raise ValueError(
            f"{name}: {experts} experts among {classes} classes, of which there may be {_MOST_CLASSES}"
        )


def _check_gather(x_TD: Tensor, order_N: Tensor, choices: int) -> None:
    """Raise ValueError for operands that no implementation of `gather` takes."""
    name = "experts.gather"
    checks.shape(name, "x", x_TD, (None, None), "TD")
    checks.shape(name, "order", order_N, (len(x_TD) * choices,), "N")
    _rows_of_int64(name, order=order_N)
    checks.one_device(name, x=x_TD, order=order_N)


def _check_activate(both_NO: Tensor, weights_N: Tensor) -> None:
    """Raise ValueError for operands that no implementation of `activate` takes."""
    _check_activation("experts.activate", both_NO, weights_N)


def _check_activate_backward(grad_NF: Tensor, both_NO: Tensor, weights_N: Tensor) -> None:
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


def _check_combine(
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


def _check_weights_backward(
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


# --- The operations ----------------------------------------------------------------------------------------------


def _operation(name: str, check: Callable[..., None], sizes: Callable[..., Sizes]) -> Operation:
    """Return an operation of this folder, whose implementations have functions of one name."""
    return Operation(
        name=f"experts.{name}",
        reference=getattr(reference, name),
        candidates=[(on_gpus, in_triton("experts", name, _lacks_in_triton))],
        check=check,
        device=lambda first, *_: first.device,
        sizes=sizes,
    )


def _rows(first: Tensor, *_: Any) -> Sizes:
    return {"dtype": short(first.dtype), "rows": len(first), "width": first.shape[-1]}


def _choices(first: Tensor, *_: Any) -> Sizes:
    return {"dtype": short(first.dtype), "tokens": len(first)}


_route, _step = partial(_operation, sizes=_choices), partial(_operation, sizes=_rows)
choose = _route("choose", check_choose)
choose_backward = _route("choose_backward", _check_choose_backward)
sort = _route("sort", _check_sort)
gather = _step("gather", _check_gather)
activate = _step("activate", _check_activate)
activate_backward = _step("activate_backward", _check_activate_backward)
combine = _step("combine", _check_combine)
weights_backward = _step("weights_backward", _check_weights_backward)


# --- The network, with its gradients -----------------------------------------------------------------------------


class WeightSum(Protocol):
    """The sum of one weight's gradients."""

    def begin(self) -> tuple[Tensor, bool]:
        """Return the tensor, and whether to add to what is in it."""
        ...

    def end(self) -> None:
        """Note that the gradient of one backward pass is in the sum."""
        ...


class ExpertSums(NamedTuple):
    """The sums of both tensors of an expert network."""

    gate_up: WeightSum
    down: WeightSum


def gradient_or_sum(left_NI: Tensor, right_NO: Tensor, groups: Groups, sum_of: WeightSum | None) -> Tensor | None:
    """Return left transposed by right over the rows of each group; None if there is a sum, which gets it."""
    if sum_of is None:
        return weight_gradient(left_NI, right_NO, groups)
    total_EIO, adds = sum_of.begin()
    add_weight_gradient(left_NI, right_NO, groups, total_EIO, adds)
    sum_of.end()
    return None


def network(
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EOD: Tensor,
    down_EDF: Tensor,
    order: Order,
    identity: bool,
    sums: ExpertSums | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts; of a choice that skips, the token itself, or zero."""
    operands_of_order = order.order_N, order.back_N, order.ends_E
    y_TD: Tensor = _Network.apply(  # type: ignore[no-untyped-call]  # torch's
        x_TD.contiguous(), weights_TK.contiguous(), gate_up_EOD, down_EDF, *operands_of_order, identity, sums
    )
    return y_TD


def forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EOD: Tensor,
    down_EDF: Tensor,
    order_N: Tensor,
    back_N: Tensor,
    ends_E: Tensor,
    identity: bool,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each token's experts, and the first product, which `backward` needs."""
    groups = Groups(ends_E)
    x_ND = gather(x_TD, order_N, weights_TK.shape[1])
    both_NO = multiply(x_ND, gate_up_EOD.mT, groups)
    del x_ND
    active_NF = activate(both_NO, weights_TK.flatten().index_select(0, order_N))
    y_ND = multiply(active_NF, down_EDF.mT, groups)
    return combine(y_ND, x_TD, weights_TK, back_N, ends_E, identity), both_NO


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EOD: Tensor,
    down_EDF: Tensor,
    order_N: Tensor,
    back_N: Tensor,
    ends_E: Tensor,
    both_NO: Tensor,
    identity: bool,
    sums: ExpertSums | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the tokens, the router's weights and both matrices, None for what has a sum."""
    groups, choices = Groups(ends_E), weights_TK.shape[1]
    grad_ND = gather(grad_TD, order_N, choices)
    grad_active_NF = multiply(grad_ND, down_EDF, groups)
    weights_N = weights_TK.flatten().index_select(0, order_N)
    active_NF, grad_both_NO, grad_weights_N = activate_backward(grad_active_NF, both_NO, weights_N)
    del grad_active_NF
    grad_down_EDF = gradient_or_sum(grad_ND, active_NF, groups, sums and sums.down)
    del grad_ND, active_NF
    x_ND = gather(x_TD, order_N, choices)
    grad_gate_up_EOD = gradient_or_sum(grad_both_NO, x_ND, groups, sums and sums.gate_up)
    del x_ND
    grad_rows_ND = multiply(grad_both_NO, gate_up_EOD, groups)
    grad_x_TD = combine(grad_rows_ND, grad_TD, weights_TK, back_N, ends_E, identity)
    grad_weights_TK = weights_backward(grad_weights_N, grad_TD, x_TD, back_N, ends_E, identity)
    return grad_x_TD, grad_weights_TK, grad_gate_up_EOD, grad_down_EDF


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, identity, sums = arguments
        y_TD, both_NO = forward(*arguments[:-1])
        ctx.save_for_backward(*tensors, both_NO)
        ctx.identity, ctx.sums = identity, sums
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        # Kernels refuse expanded gradients.
        arguments: tuple[Any, ...] = (grad_TD.contiguous(), *ctx.saved_tensors, ctx.identity, ctx.sums)
        return *backward(*arguments), None, None, None, None, None
