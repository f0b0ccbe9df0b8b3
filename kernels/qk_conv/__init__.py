"""Make queries and keys of their projections: two convolutions, mean skip, norm, temperature and rotation.

    qk_conv(z_BSQ, kernel, temperature_J, cos, sin, linked=None, before_BWQ=None) -> q_BHSP, k_BJSP

reference.py has the formula. The other implementations apply both convolutions as one (kernel.py):

    reference       the two convolutions one after the other, its gradient by autograd
    torch           one batched product of windows, the gradient written out: what a CPU runs
    triton          forward in one kernel and backward in two, windows made of loads: what a GPU runs. If it
                    cannot start, either pass is torch's. It refuses float64, and heads of more than 128 channels
                    (64 in float32, whose products do not fit into the LDS of gfx942)

Documents and tokens before the first are taken by every implementation. Differentiable once, with respect to the
projections, the kernel and the temperature; not with tokens before the first, which are for inference.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zslurm.kernels import checks
from zslurm.kernels.dispatch import Implementation, Operation, Sizes
from zslurm.kernels.qk_conv import operations, reference
from zslurm.kernels.qk_conv.kernel import Convolutions, JoinedKernel, join
from zslurm.kernels.qk_conv.operands import ConvolutionOperands
from zslurm.kernels.qk_conv.rotation import rotate

__all__ = ["OPERATIONS", "Convolutions", "JoinedKernel", "Linked", "join", "qk_conv", "rotate"]

Linked = tuple[Tensor, ...] | None
"""For each distance looked back, from 1: whether that token belongs to the same document, bool [B, S, 1]."""

_FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    arguments = z_BSQ, kernel, temperature_J, cos, sin, linked, before_BWQ
    if torch.compiler.is_compiling():
        return _joined(z_BSQ.device.type != "cpu", *arguments)
    q_BHSP, k_BJSP = _mix(*arguments)
    return q_BHSP, k_BJSP


class _Arguments(NamedTuple):
    """Those of `qk_conv`."""

    z_BSQ: Tensor
    kernel: Convolutions | JoinedKernel
    temperature_J: Tensor
    cos: Tensor
    sin: Tensor
    linked: Linked = None
    before_BWQ: Tensor | None = None

    @property
    def differentiated(self) -> bool:
        """Return whether there will be a gradient."""
        leaves = (self.z_BSQ, *self.kernel, self.temperature_J)
        return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)


def _joined(chosen: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
    arguments_given = _Arguments(*arguments)
    seen_BSW = None
    if arguments_given.linked is not None:  # itself first
        seen_BSW = torch.cat(
            [torch.ones_like(arguments_given.linked[0]), *arguments_given.linked[: arguments_given.kernel.reach]],
            dim=-1,
        )
    operands = ConvolutionOperands(
        arguments_given.z_BSQ,
        *join(arguments_given.kernel),
        arguments_given.temperature_J,
        arguments_given.cos,
        arguments_given.sin,
        seen_BSW,
        arguments_given.before_BWQ,
    )
    q_BHSP, k_BJSP = operations.Mix.apply(chosen, arguments_given.differentiated, *operands)  # type: ignore[no-untyped-call]
    return q_BHSP, k_BJSP


def _check(*arguments: Any) -> None:
    arguments_given = _Arguments(*arguments)
    z_BSQ, kernel, temperature_J, cos, sin, linked, before_BWQ = arguments_given
    name = "qk_conv"
    checks.shape(name, "z", z_BSQ, (None, None, None), "BSQ")
    checks.shape(name, "temperature", temperature_J, (None,), "J")
    batch, length, channels = z_BSQ.shape
    heads, head_dim = _check_kernel(name, kernel, channels)
    keys, pairs = temperature_J.shape[0], cos.shape[-1] if cos.dim() else 0
    if not length:
        raise ValueError(f"{name}: z has no tokens: its shape is {list(z_BSQ.shape)}")
    if not 0 < keys < heads or (heads - keys) % keys:
        raise ValueError(f"{name}: {keys} key heads of {heads} heads leave queries that do not divide among them")
    if 2 * pairs > head_dim:
        raise ValueError(f"{name}: {pairs} pairs of channels rotate in a head of {head_dim} channels")
    positions = (batch, length, pairs) if cos.dim() == 3 else (length, pairs)
    checks.shape(name, "cos", cos, positions, "BSA"[-len(positions) :])
    checks.shape(name, "sin", sin, positions, "BSA"[-len(positions) :])
    optional = {f"linked[{distance}]": link for distance, link in enumerate(linked or ())}
    for what, link in optional.items():
        checks.shape(name, what, link, (batch, length, 1), "BS1")
    checks.dtype_among(name, (torch.bool,), **optional)
    if linked is not None and not max(1, kernel.reach) <= len(linked):
        raise ValueError(f"{name}: linked has {len(linked)} distances, but the kernel looks back {kernel.reach}")
    if before_BWQ is not None:
        checks.shape(name, "before", before_BWQ, (batch, kernel.reach, channels), "BWQ")
        optional["before"] = before_BWQ
    _check_formats(name, z_BSQ, kernel, temperature_J, {"cos": cos, "sin": sin}, before_BWQ)
    checks.one_device(name, z=z_BSQ, temperature=temperature_J, cos=cos, sin=sin, **optional, **kernel._asdict())
    if before_BWQ is not None and arguments_given.differentiated:
        raise ValueError(f"{name}: tokens before the first are for inference: call it under torch.no_grad()")


def _check_kernel(name: str, kernel: Convolutions | JoinedKernel, channels: int) -> tuple[int, int]:
    """Return the number of heads and their channels."""
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
        heads = channels // max(1, head_dim)
        fits = head_dim > 0 and heads * head_dim == channels and kernel.reach >= 0
    if not fits:
        raise ValueError(
            f"{name}: z has {channels} channels, which are no heads of the kernel's {head_dim} channels"
        )
    return heads, head_dim


def _check_formats(
    name: str,
    z_BSQ: Tensor,
    kernel: Convolutions | JoinedKernel,
    temperature_J: Tensor,
    angles: dict[str, Tensor],
    before_BWQ: Tensor | None,
) -> None:
    checks.dtype_among(name, _FORMATS, z=z_BSQ)
    wide = (torch.float64,) if z_BSQ.dtype == torch.float64 else (torch.float32,)
    narrow: dict[str, Tensor] = dict(kernel._asdict())
    if isinstance(kernel, JoinedKernel):
        checks.dtype_among(name, wide, bias=narrow.pop("bias_hP"))
    if before_BWQ is not None:
        narrow["before"] = before_BWQ
    checks.one_dtype(name, z=z_BSQ, temperature=temperature_J, **narrow)
    checks.dtype_among(name, wide, **angles)


def _lacks_in_triton(z_BSQ: Tensor, kernel: Convolutions | JoinedKernel, *_: object) -> str | None:
    return operations.lacks_in_triton(z_BSQ, _weight(kernel))


def _weight(kernel: Convolutions | JoinedKernel) -> Tensor:
    """Return something with the shape of the joined weight, but for its taps."""
    if isinstance(kernel, JoinedKernel):
        return kernel.weight_hIP
    return kernel.grouped_QPW[:, :, 0].view(-1, *[kernel.grouped_QPW.shape[1]] * 2)


def _sizes(z_BSQ: Tensor, kernel: Convolutions | JoinedKernel, *_: object) -> Sizes:
    return operations.sizes(z_BSQ, _weight(kernel))


_mix = Operation(
    name="qk_conv.mix",
    reference=reference.mix,
    implementations=[
        Implementation("triton", partial(_joined, True), _lacks_in_triton),
        Implementation("torch", partial(_joined, False), lambda *_: None),
    ],
    check=_check,
    device=lambda z_BSQ, *_: z_BSQ.device,
    sizes=_sizes,
    rule=operations.rule,
)

OPERATIONS = (_mix, operations.forward, operations.backward)
