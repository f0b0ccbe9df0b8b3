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
from zslurm.kernels.arch import Arch
from zslurm.kernels.dispatch import Implementation, Operation, Sizes
from zslurm.kernels.qk_conv import by_torch

_IN_TRITON = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST_HEAD, _WIDEST_HEAD_IN_FP32 = 128, 64


def lacks_in_triton(z_BSQ: Tensor, weight_hIP: Tensor) -> str | None:
    """Return what of these operands the kernels do not take, or None."""
    if z_BSQ.device.type != "cuda":
        return f"operands on {z_BSQ.device.type}"
    if z_BSQ.dtype not in _IN_TRITON:
        return f"{checks.short(z_BSQ.dtype)} operands"
    head_dim = weight_hIP.shape[-1]
    if head_dim > _WIDEST_HEAD:
        return f"heads of more than {_WIDEST_HEAD} channels"
    if z_BSQ.dtype == torch.float32 and head_dim > _WIDEST_HEAD_IN_FP32:
        return f"heads of more than {_WIDEST_HEAD_IN_FP32} channels in float32"
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


def _checked(*_: object) -> None:
    """Check nothing: the caller's operands were."""


def _by_triton(function: str, supports: Any) -> Implementation:
    def run(*args: object) -> Any:
        from zslurm.kernels.qk_conv import triton

        return getattr(triton, function)(*args)

    return Implementation("triton", run, supports)


# The frame's reference is here what the kernels fall back to: the same function of a joined kernel, in torch.
forward = Operation(
    name="qk_conv.forward",
    reference=by_torch.forward,
    implementations=[_by_triton("forward", lambda z_BSQ, weight_hIP, *_: lacks_in_triton(z_BSQ, weight_hIP))],
    check=_checked,
    device=lambda z_BSQ, *_: z_BSQ.device,
    sizes=lambda z_BSQ, weight_hIP, *_: sizes(z_BSQ, weight_hIP),
    rule=lambda arch, _: "reference" if arch.name == "cpu" else "triton",
)

backward = Operation(
    name="qk_conv.backward",
    reference=by_torch.backward,
    implementations=[
        _by_triton("backward", lambda q, k, z_BSQ, weight_hIP, *_: lacks_in_triton(z_BSQ, weight_hIP))
    ],
    check=_checked,
    device=lambda q, k, z_BSQ, *_: z_BSQ.device,
    sizes=lambda q, k, z_BSQ, weight_hIP, *_: sizes(z_BSQ, weight_hIP),
    rule=lambda arch, _: "reference" if arch.name == "cpu" else "triton",
)


class Mix(torch.autograd.Function):
    """Queries and keys of a joined kernel; `chosen` runs the operations, otherwise by_torch."""

    @staticmethod
    def forward(
        ctx: Any,
        z_BSQ: Tensor,
        weight_hIP: Tensor,
        bias_hP: Tensor,
        temperature_J: Tensor,
        cos: Tensor,
        sin: Tensor,
        seen_BSW: Tensor | None,
        before_BWQ: Tensor | None,
        chosen: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute queries and keys, and keep what the gradient needs if there will be one."""
        if not chosen:
            run: Any = by_torch.forward
        else:
            run = _compiled_forward if torch.compiler.is_compiling() else forward
        q_BHSP, k_BJSP, u_hBSP, inverse_hBS1 = run(
            z_BSQ, weight_hIP, bias_hP, temperature_J, cos, sin, seen_BSW, before_BWQ, any(ctx.needs_input_grad)
        )
        ctx.save_for_backward(z_BSQ, weight_hIP, temperature_J, cos, sin, seen_BSW, u_hBSP, inverse_hBS1)
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
        return (*run(grad_q_BHSP, grad_k_BJSP, *ctx.saved_tensors), None, None, None, None, None)


# --- As operators of torch.compile -----------------------------------------------------------------------------


def _alone(x: Tensor) -> Tensor:
    """Return a contiguous tensor with memory that it shares with none: what an operator has to return."""
    whole = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if whole else x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("zslurm::qk_conv_forward", mutates_args=())
def _compiled_forward(
    z_BSQ: Tensor,
    weight_hIP: Tensor,
    bias_hP: Tensor,
    temperature_J: Tensor,
    cos: Tensor,
    sin: Tensor,
    seen_BSW: Tensor | None,
    before_BWQ: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, u, inverse = forward(
        z_BSQ, weight_hIP, bias_hP, temperature_J, cos, sin, seen_BSW, before_BWQ, True
    )  # the shapes are then what the compiler expects
    return _alone(q), _alone(k), _alone(u), _alone(inverse)


@_compiled_forward.register_fake
def _(
    z_BSQ: Tensor,
    weight_hIP: Tensor,
    bias_hP: Tensor,
    temperature_J: Tensor,
    cos: Tensor,
    sin: Tensor,
    seen_BSW: Tensor | None,
    before_BWQ: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, length, _), (heads, _, head_dim), keys = z_BSQ.shape, weight_hIP.shape, temperature_J.shape[0]
    return (
        z_BSQ.new_empty(batch, heads - keys, length, head_dim),
        z_BSQ.new_empty(batch, keys, length, head_dim),
        bias_hP.new_empty(heads, batch, length, head_dim),
        bias_hP.new_empty(heads, batch, length, 1),
    )


@torch.library.custom_op("zslurm::qk_conv_backward", mutates_args=())
def _compiled_backward(
    grad_q_BHSP: Tensor,
    grad_k_BJSP: Tensor,
    z_BSQ: Tensor,
    weight_hIP: Tensor,
    temperature_J: Tensor,
    cos: Tensor,
    sin: Tensor,
    seen_BSW: Tensor | None,
    u_hBSP: Tensor,
    inverse_hBS1: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor, Tensor] = backward(
        grad_q_BHSP, grad_k_BJSP, z_BSQ, weight_hIP, temperature_J, cos, sin, seen_BSW, u_hBSP, inverse_hBS1
    )
    z, weight, bias, temperature = map(_alone, gradients)
    return z, weight, bias, temperature


@_compiled_backward.register_fake
def _(
    grad_q_BHSP: Tensor,
    grad_k_BJSP: Tensor,
    z_BSQ: Tensor,
    weight_hIP: Tensor,
    temperature_J: Tensor,
    cos: Tensor,
    sin: Tensor,
    seen_BSW: Tensor | None,
    u_hBSP: Tensor,
    inverse_hBS1: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        z_BSQ.new_empty(z_BSQ.shape),
        weight_hIP.new_empty(weight_hIP.shape),
        u_hBSP.new_empty(weight_hIP.shape[0], weight_hIP.shape[2]),
        temperature_J.new_empty(temperature_J.shape),
    )
