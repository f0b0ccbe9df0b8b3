"""Route tokens to experts and run these, without waiting for the device anywhere.

    choose              softmax over the router's classes, biased choice of K, their probabilities; differentiable
    sort                the order of the choices by class, how many each class has, where each expert's rows end
    network             gather, product, SwiGLU with the probability, product, and the sum back at the tokens;
                        differentiable
    gather, activate, combine, ...      the steps of `network`, each with its own kernel

`network` has two forms. `cpu` (by_rows.py) sorts rows, multiplies and sorts back by autograd functions that
torch's compiler sees through: CPUs are fastest with it. The reference (steps.py) is made of the steps of this
folder, each in one kernel of Triton's on GPUs: the router's weight is multiplied in before the second product, and
neither gathered rows nor results are kept for backward. Compiled layers on GPUs run it as operators (compiled.py).

Numbers of rows stay on the device: `sort` counts in blocks, and adds the blocks' counts up; torch would
sort. Every sum is one workgroup's, so the same operands give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels import checks
from zslurm.kernels.dispatch import Implementation, Operation, Sizes, everything, on_cpus
from zslurm.kernels.experts import by_rows, compiled, reference, steps
from zslurm.kernels.experts.reference import Order
from zslurm.kernels.experts.steps import ExpertSums, WeightSum

__all__ = ["OPERATIONS", "ExpertSums", "Order", "WeightSum", "choose", "network", "sort"]


def choose(logits_TC: Tensor, bias_C: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """Return K classes of each token, int64, most preferred first, and their probabilities in at least fp32."""
    if torch.compiler.is_compiling():
        if is_opaque(logits_TC):
            weights_TK, classes_TK, _ = compiled.choose(logits_TC, bias_C, choices)
            return classes_TK, weights_TK
        return reference.choose(logits_TC, bias_C, choices)[:2]
    steps.check_choose(logits_TC, bias_C, choices)
    if logits_TC.device.type == "cpu":
        # torch's own autograd does it. The device alone decides: were it whether the kernels can start, a layer
        # whose first run found out that they cannot would keep other tensors when it is recomputed.
        return reference.choose(logits_TC, bias_C, choices)[:2]
    classes_TK, weights_TK = Choice.apply(logits_TC, bias_C, choices)  # type: ignore[no-untyped-call]  # torch's
    return classes_TK, weights_TK


class Choice(torch.autograd.Function):
    """What a GPU takes: the choice and its gradient as operations, whichever implementations run them."""

    @staticmethod
    def forward(ctx: Any, logits_TC: Tensor, bias_C: Tensor, choices: int) -> tuple[Tensor, Tensor]:
        classes_TK, weights_TK, probabilities_TC = steps.choose(logits_TC, bias_C, choices)
        ctx.save_for_backward(classes_TK, probabilities_TC)
        ctx.dtype = logits_TC.dtype
        ctx.mark_non_differentiable(classes_TK)
        return classes_TK, weights_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad_weights_TK: Tensor) -> tuple[Tensor, None, None]:
        classes_TK, probabilities_TC = ctx.saved_tensors
        return (
            steps.choose_backward(grad_weights_TK.contiguous(), classes_TK, probabilities_TC, ctx.dtype),
            None,
            None,
        )


def is_opaque(x: Tensor) -> bool:
    """Return whether the experts are operators in a graph of `torch.compile`, whose inside it does not see.

    On a CPU it sees torch's operators and fuses them.
    """
    return x.device.type != "cpu"


def sort(classes_TK: Tensor, classes: int, experts: int) -> Order:
    """Sort the choices by class, keeping the order of tokens within a class."""
    if torch.compiler.is_compiling() and is_opaque(classes_TK):
        return Order(*compiled.sort(classes_TK, classes, experts))
    run = reference.sort if torch.compiler.is_compiling() else steps.sort
    order: Order = run(classes_TK, classes, experts)
    return order


def network(
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EOD: Tensor,
    down_EDF: Tensor,
    order: Order,
    identity: bool,
    sums: ExpertSums | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts.

    Args:
        x_TD: the tokens, in the weights' format.
        weights_TK: how much each choice counts, in at least fp32.
        gate_up_EOD: the matrices of gate and up, which are joined.
        down_EDF: the matrices behind the activation.
        order: from `sort`.
        identity: whether a choice that skips gives the token itself, or nothing.
        sums: what the matrices' gradients are added to; autograd then gets none. Graphs of the compiler give them
            to autograd all the same.
    """
    if torch.compiler.is_compiling() and is_opaque(x_TD):
        of_order = order.order_N, order.back_N, order.ends_E
        opaque: Tensor = compiled.network(x_TD, weights_TK, gate_up_EOD, down_EDF, *of_order, identity)[0]
        return opaque
    if torch.compiler.is_compiling():
        return by_rows.network(x_TD, weights_TK, gate_up_EOD, down_EDF, order, identity)
    y_TD: Tensor = _network(x_TD, weights_TK, gate_up_EOD, down_EDF, order, identity, sums)
    return y_TD


def _network_sizes(x_TD: Tensor, weights_TK: Tensor, gate_up_EOD: Tensor, *_: Any) -> Sizes:
    experts, outputs, inputs = gate_up_EOD.shape
    return {
        "dtype": checks.short(x_TD.dtype),
        "tokens": len(x_TD),
        "experts": experts,
        "width": inputs,
        "inner": outputs // 2,
    }


_network = Operation(
    name="experts.network",
    reference=steps.network,
    candidates=[(on_cpus, Implementation("cpu", by_rows.network, everything))],
    check=steps.check_network,
    device=lambda x_TD, *_: x_TD.device,
    sizes=_network_sizes,
    deciding=6,  # without the sums
)

OPERATIONS = (
    steps.choose,
    steps.choose_backward,
    steps.sort,
    steps.gather,
    steps.activate,
    steps.activate_backward,
    steps.combine,
    steps.weights_backward,
    _network,
)
