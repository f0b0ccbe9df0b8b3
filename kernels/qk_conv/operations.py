"""Choose how the two passes run, both convolutions as one, and run them as one function of autograd.

Under `torch.compile` each pass on a GPU is one operator, whose inside the compiler does not see; on a CPU it sees
through torch's functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels import checks
from zslurm.kernels.arch import Arch, is_gpu
from zslurm.kernels.dispatch import Operation, Sizes, in_triton
from zslurm.kernels.operators import schema_of
from zslurm.kernels.qk_conv import by_torch
from zslurm.kernels.qk_conv.operands import ConvolutionOperands

_IN_TRITON = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST_HEAD, _WIDEST_HEAD_IN_FP32 = 128, 64


def lacks_in_triton(z_BSQ: Tensor, weight_hIP: Tensor) -> str | None:
    """Return what of these operands the kernels do not take, or None."""
    if not is_gpu(z_BSQ.device):
        return f"operands on {z_BSQ.device.type}"
    if z_BSQ.dtype not in _IN_TRITON:
        return f"{checks.short(z_BSQ.dtype)} operands"
    head_dim = weight_hIP.shape[-1]
    if head_dim > _WIDEST_HEAD:
        return f"heads of more than {_WIDEST_HEAD} channels"
    if z_BSQ.dtype == torch.float32 and head_dim > _WIDEST_HEAD_IN_FP32:
        return f"heads of more than {_WIDEST_HEAD_IN_FP32} channels in float32"
    if z_BSQ.shape[1] * head_dim >= 2**31:  # what the kernels count in 32 bits
        return "sequences of 2^31 elements of a head"
    return None


def sizes(z_BSQ: Tensor, weight_hIP: Tensor) -> Sizes:
    """Return what the measured tables are about."""
    return {
        "dtype": checks.short(z_BSQ.dtype),
        "tokens": z_BSQ.shape[0] * z_BSQ.shape[1],
        "heads": weight_hIP.shape[0],
        "head_dim": weight_hIP.shape[2],
    }


def rule(arch: Arch, _: Sizes) -> str:
    """Leave a CPU to torch's functions, and give a GPU the kernels."""
    return "torch" if arch.name == "cpu" else "triton"


def _pass(name: str, before: int) -> Operation:
    """Return a pass as an operation, which has so many arguments before the operands.

    The frame's reference is here what the kernels fall back to: the same function of a joined kernel, in torch.
    """
    return Operation(
        name=f"qk_conv.{name}",
        reference=getattr(by_torch, name),
        implementations=[
            in_triton("qk_conv", name, lambda *args: lacks_in_triton(*args[before : before + 2])),
        ],
        check=lambda *_: None,  # the caller's operands were checked
        device=lambda *args: args[before].device,
        sizes=lambda *args: sizes(*args[before : before + 2]),
        rule=lambda arch, _: "reference" if arch.name == "cpu" else "triton",
    )


forward, backward = _pass("forward", before=1), _pass("backward", before=4)


class Mix(torch.autograd.Function):
    """Queries and keys of a joined kernel; `chosen` runs the operations, otherwise by_torch.

    What the gradient takes is written, and kept, only if the caller `keeps` it: a function of autograd is not
    told whether gradients are enabled.
    """

    @staticmethod
    def forward(ctx: Any, chosen: bool, keeps: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute queries and keys, and keep what the gradient needs if there will be one."""
        if not chosen:
            run: Any = by_torch.forward
        else:
            run = _compiled_forward if torch.compiler.is_compiling() else forward
        q_BHSP, k_BJSP, *kept = run(keeps, *operands)
        if keeps:
            ctx.save_for_backward(*kept, *operands)
        ctx.chosen = chosen
        return q_BHSP, k_BJSP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q_BHSP: Tensor, grad_k_BJSP: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of z, weight, bias and temperature."""
        if not ctx.chosen:
            run: Any = by_torch.backward
        else:
            run = _compiled_backward if torch.compiler.is_compiling() else backward
        return None, None, *run(grad_q_BHSP, grad_k_BJSP, *ctx.saved_tensors), None, None, None, None


# --- As operators of torch.compile -----------------------------------------------------------------------------

_Four = tuple[Tensor, Tensor, Tensor, Tensor]
_OPERANDS, _RETURNS = schema_of(ConvolutionOperands), "(Tensor, Tensor, Tensor, Tensor)"


def _alone(x: Tensor) -> Tensor:
    """Return a contiguous tensor with memory that it shares with none: what an operator has to return."""
    owns_storage = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if owns_storage else x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "zslurm::qk_conv_forward", mutates_args=(), schema=f"(bool keeps, {_OPERANDS}) -> {_RETURNS}"
)
def _compiled_forward(keeps: bool, *operands: Tensor | None) -> _Four:
    q, k, u, inverse = map(_alone, forward(keeps, *operands))
    return q, k, u, inverse


@_compiled_forward.register_fake
def _(keeps: bool, *operands: Tensor | None) -> _Four:
    return ConvolutionOperands(*operands).empty(keeps)  # type: ignore[arg-type]


@torch.library.custom_op(
    "zslurm::qk_conv_backward",
    mutates_args=(),
    schema=f"(Tensor grad_q, Tensor grad_k, Tensor u, Tensor inverse, {_OPERANDS}) -> {_RETURNS}",
)
def _compiled_backward(*args: Tensor | None) -> _Four:
    z, weight, bias, temperature = map(_alone, backward(*args))
    return z, weight, bias, temperature


@_compiled_backward.register_fake
def _(*args: Tensor | None) -> _Four:
    z, weight, bias, temperature = (
        operand.new_empty(operand.shape) for operand in args[4:8] if operand is not None
    )
    return z, weight, bias, temperature
