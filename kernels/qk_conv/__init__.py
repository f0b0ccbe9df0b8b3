"""Make queries and keys of their projections: two convolutions, mean skip, norm, temperature and rotation.

    qk_conv(z_BSQ, kernel, temperature_J, cos, sin, linked=None, before_BWQ=None) -> q_BHSP, k_BJSP

Both convolutions are applied as one. Each pass is an operation:

    reference       one batched product of windows, the gradient written out: what a CPU runs. reference.py has the
                    formula
    triton          forward in one kernel and backward in two, windows made of loads: what a GPU runs. It refuses
                    float64, and heads of more than 128 channels (64 in float32, whose products do not fit into the
                    LDS of gfx942)

Documents and tokens before the first are taken by every implementation. Differentiable once, with respect to the
projections, the kernel and the temperature; not with tokens before the first, which are for inference.

Under `torch.compile` each pass on a GPU is one operator, whose inside the compiler does not see; on a CPU it sees
through the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels import checks
from zslurm.kernels.arch import is_gpu
from zslurm.kernels.dispatch import Operation, Sizes, in_triton, on_gpus
from zslurm.kernels.qk_conv import reference
from zslurm.kernels.qk_conv.reference import ConvolutionOperands, Convolutions, JoinedKernel, join, rotate

__all__ = ["OPERATIONS", "Convolutions", "JoinedKernel", "Linked", "join", "qk_conv", "rotate"]

Linked = tuple[Tensor, ...] | None
"""For each distance looked back, from 1: whether that token belongs to the same document, bool [B, S, 1]."""

_FORMATS = (torch.bfloat16, torch.float32, torch.float64)
_IN_TRITON = (torch.bfloat16, torch.float32)
_WIDEST_HEAD, _WIDEST_HEAD_IN_FP32 = 128, 64


def qk_conv(
    z_BSQ: Tensor,
    kernel: Convolutions | JoinedKernel,
    temperature_J: Tensor,
    cos: Tensor,
    sin: Tensor,
    linked: Linked = None,
    before_BWQ: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return queries [B, H, S, P] and keys [B, J, S, P] ready for attention, in the format of z.

    Args:
        z_BSQ: projected queries and keys, side by side.
        kernel: both convolutions, or their product if the caller keeps it.
        temperature_J: linear scale of each normalised key.
        cos: of each position's angles, [S, A] or [B, S, A], in at least fp32; 2 A channels of a head rotate.
        sin: of the same.
        linked: which tokens before belong to the same document; None if sequences are not divided.
        before_BWQ: projections of the W - 1 tokens before the first; zeros if not given.

    Raises:
        ValueError: shapes, formats or devices do not fit.
    """
    differentiated = torch.is_grad_enabled() and any(
        leaf.requires_grad for leaf in (z_BSQ, *kernel, temperature_J)
    )
    if not torch.compiler.is_compiling():
        _check_kernel(z_BSQ, kernel, linked)
        if before_BWQ is not None and differentiated:
            raise ValueError("qk_conv: tokens before the first are for inference: call it under torch.no_grad()")
    seen_BSW = None
    if linked is not None:  # itself first
        seen_BSW = torch.cat([torch.ones_like(linked[0]), *linked[: kernel.reach]], dim=-1)
    operands = z_BSQ, *join(kernel), temperature_J, cos, sin, seen_BSW, before_BWQ
    q_BHSP, k_BJSP = _Mix.apply(differentiated, *operands)  # type: ignore[no-untyped-call]
    return q_BHSP, k_BJSP


class _Mix(torch.autograd.Function):
    """Queries and keys of a joined kernel.

    What the gradient takes is written, and kept, only if the caller `keeps` it: a function of autograd is not
    told whether gradients are enabled.
    """

    @staticmethod
    def forward(ctx: Any, keeps: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        run: Callable[..., _Four] = forward
        if torch.compiler.is_compiling():
            run = _compiled_forward if is_opaque(operands) else reference.forward
        q_BHSP, k_BJSP, *kept = run(keeps, *operands)
        if keeps:
            ctx.save_for_backward(*kept, *operands)
        return q_BHSP, k_BJSP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q_BHSP: Tensor, grad_k_BJSP: Tensor) -> tuple[Tensor | None, ...]:
        u_hBSP, inverse_hBS1, *operands = ctx.saved_tensors  # read once: recomputation makes them again
        run: Callable[..., _Four] = backward
        if torch.compiler.is_compiling():
            run = _compiled_backward if is_opaque(operands) else reference.backward
        return None, *run(grad_q_BHSP, grad_k_BJSP, u_hBSP, inverse_hBS1, *operands), None, None, None, None


# --- The two passes as operations ------------------------------------------------------------------------------


def _check_kernel(z_BSQ: Tensor, kernel: Convolutions | JoinedKernel, linked: Linked) -> None:
    """Raise ValueError for what cannot be joined."""
    name = "qk_conv"
    checks.shape(name, "z", z_BSQ, (None, None, None), "BSQ")
    batch, length, channels = z_BSQ.shape
    if isinstance(kernel, JoinedKernel):
        checks.shape(name, "weight", kernel.weight_hIP, (None, None, None), "hIP")
        heads, inputs, head_dim = kernel.weight_hIP.shape
        checks.shape(name, "bias", kernel.bias_hP, (heads, head_dim), "hP")
        fits = head_dim > 0 and inputs > 0 and inputs % head_dim == 0 and heads * head_dim == channels
    else:
        checks.shape(name, "depthwise", kernel.depthwise_Q1W, (channels, 1, None), "Q1W")
        checks.shape(name, "depthwise_bias", kernel.depthwise_bias_Q, (channels,), "Q")
        checks.shape(name, "grouped", kernel.grouped_QPW, (channels, None, None), "QPW")
        checks.shape(name, "grouped_bias", kernel.grouped_bias_Q, (channels,), "Q")
        head_dim = kernel.grouped_QPW.shape[1]
        fits = head_dim > 0 and channels % head_dim == 0 and kernel.reach >= 0
    if not fits:
        raise ValueError(
            f"{name}: z has {channels} channels, which are no heads of the kernel's {head_dim} channels"
        )
    if not length:
        raise ValueError(f"{name}: z has no tokens: its shape is {list(z_BSQ.shape)}")
    checks.dtype_among(name, _FORMATS, z=z_BSQ)
    narrow: dict[str, Tensor] = dict(kernel._asdict())
    if isinstance(kernel, JoinedKernel):
        checks.dtype_among(name, (_wide(z_BSQ),), bias=narrow.pop("bias_hP"))
    checks.one_dtype(name, z=z_BSQ, **narrow)
    links = {f"linked[{distance}]": link for distance, link in enumerate(linked or ())}
    for key, link in links.items():
        checks.shape(name, key, link, (batch, length, 1), "BS1")
    checks.dtype_among(name, (torch.bool,), **links)
    if linked is not None and not max(1, kernel.reach) <= len(linked):
        raise ValueError(f"{name}: linked has {len(linked)} distances, but the kernel looks back {kernel.reach}")
    checks.one_device(name, z=z_BSQ, **kernel._asdict(), **links)


def _check(keeps: bool, *tensors: Any) -> None:
    """Raise ValueError for what does not fit z and the joined kernel."""
    name, operands = "qk_conv", ConvolutionOperands(*tensors)
    z_BSQ, cos, before_BWQ = operands.z_BSQ, operands.cos, operands.before_BWQ
    heads, batch, length, head_dim = operands.mixed_shape
    checks.shape(name, "temperature", operands.temperature_J, (None,), "J")
    keys, pairs = operands.temperature_J.shape[0], cos.shape[-1] if cos.dim() else 0
    if not 0 < keys < heads or (heads - keys) % keys:
        raise ValueError(f"{name}: {keys} key heads of {heads} heads leave queries that do not divide among them")
    if 2 * pairs > head_dim:
        raise ValueError(f"{name}: {pairs} pairs of channels rotate in a head of {head_dim} channels")
    angles = {"cos": cos, "sin": operands.sin}
    positions = (batch, length, pairs) if cos.dim() == 3 else (length, pairs)
    for key, angle in angles.items():
        checks.shape(name, key, angle, positions, "BSA"[-len(positions) :])
    narrow = {"z": z_BSQ, "temperature": operands.temperature_J}
    if before_BWQ is not None:
        reach = operands.weight_hIP.shape[1] // head_dim - 1
        checks.shape(name, "before", before_BWQ, (batch, reach, heads * head_dim), "BWQ")
        narrow["before"] = before_BWQ
    checks.one_dtype(name, **narrow)
    checks.dtype_among(name, (_wide(z_BSQ),), **angles)
    checks.one_device(name, **narrow, **angles)


def _wide(z_BSQ: Tensor) -> torch.dtype:
    return torch.promote_types(z_BSQ.dtype, torch.float32)


def lacks_in_triton(z_BSQ: Tensor, weight_hIP: Tensor) -> str | None:
    """Return which operands the kernels do not take, as a phrase, or None."""
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


def _sizes(z_BSQ: Tensor, weight_hIP: Tensor) -> Sizes:
    return {
        "dtype": checks.short(z_BSQ.dtype),
        "tokens": z_BSQ.shape[0] * z_BSQ.shape[1],
        "heads": weight_hIP.shape[0],
        "head_dim": weight_hIP.shape[2],
    }


def _pass(name: str, check: Callable[..., None], before: int) -> Operation:
    """Return the operation of a pass; `before` is its number of arguments before the operands."""
    return Operation(
        name=f"qk_conv.{name}",
        reference=getattr(reference, name),
        candidates=[
            (on_gpus, in_triton("qk_conv", name, lambda *args: lacks_in_triton(*args[before : before + 2])))
        ],
        check=check,
        device=lambda *args: args[before].device,
        sizes=lambda *args: _sizes(*args[before : before + 2]),
    )


forward = _pass("forward", _check, before=1)
# Its operands are of the forward pass and of autograd: they were checked.
backward = _pass("backward", lambda *_: None, before=4)

OPERATIONS = (forward, backward)


# --- As operators of torch.compile -----------------------------------------------------------------------------

_Four = tuple[Tensor, Tensor, Tensor, Tensor]
_VECTORS = "Tensor bias, Tensor temperature, Tensor cos, Tensor sin"
_OPERANDS = f"Tensor z, Tensor weight, {_VECTORS}, Tensor? seen, Tensor? before"
_RETURNS = "(Tensor, Tensor, Tensor, Tensor)"


def is_opaque(operands: Any) -> bool:
    """Return whether a graph of `torch.compile` has one operator for each pass."""
    return bool(operands[0].device.type != "cpu")


def _unshared(x: Tensor) -> Tensor:
    """Return a contiguous tensor with memory that it shares with none: what an operator has to return."""
    owns_storage = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if owns_storage else x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "zslurm::qk_conv_forward", mutates_args=(), schema=f"(bool keeps, {_OPERANDS}) -> {_RETURNS}"
)
def _compiled_forward(keeps: bool, *operands: Tensor | None) -> _Four:
    q, k, u, inverse = map(_unshared, forward(keeps, *operands))
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
    z, weight, bias, temperature = map(_unshared, backward(*args))
    return z, weight, bias, temperature


@_compiled_backward.register_fake
def _(*args: Tensor | None) -> _Four:
    z, weight, bias, temperature = (
        operand.new_empty(operand.shape) for operand in args[4:8] if operand is not None
    )
    return z, weight, bias, temperature
