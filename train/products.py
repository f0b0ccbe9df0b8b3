"""Products of two matrices, on a CPU by the library that does them fastest there.

torch multiplies fp32 matrices with MKL, which on processors of AMD keeps to AVX2. oneDNN, which torch holds too
and uses for bf16, takes their AVX-512: on an EPYC of the Zen 5 generation that is about twice MKL's rate
(`python -m benchmarks products`). No setting of torch makes it use oneDNN in fp32. The operator called here is one
that torch's own compiler uses for linear layers of models that are not trained.

Everywhere else, and where a product is too small to pay for its start or its copies, these functions are torch's.
Which library multiplies depends on the processor, the format, the shapes and the strides alone: runs on one
machine repeat bit by bit. Between the two, results differ by rounding.

oneDNN makes a kernel for every shape that it has not met, which takes longer than a small product, and keeps the
last 1,024. Where the number of rows is another one in every step, as the experts' is, multiples of `EVEN_ROWS`
keep the shapes few.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_FEWEST_ROWS = 16
_FEWEST_TERMS = 16
_FEWEST_MULTIPLICATIONS = 1 << 20
"""Rows, terms of each sum, and multiplications of the smallest product for which oneDNN is used."""
_FEWEST_IN_A_BATCH = 1 << 21
"""Multiplications of each product of a batch, for which MKL takes one call."""
_FEWEST_SUMMED = 64
_FEWEST_SUMMED_OF_MANY = 256
_MANY = 1 << 20
"""Terms of each sum where the left matrix has to be copied, as for the gradients of weights; and for results of
more elements than fit into a cache."""

_ARGUMENTS = ["Tensor", "Tensor", "Optional[Tensor]", "str", "List[Optional[number]]", "Optional[str]"]

EVEN_ROWS = 32
"""What numbers of rows that vary are rounded up to."""


def _onednn_is_faster() -> bool:
    """Whether this is a processor of AMD with AVX-512, and torch has both libraries and the operator."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if not _operator_is_known():
        return False
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.startswith("AVX512") and _onednn_has_avx512() and _vendor() == "AuthenticAMD"


def _onednn_has_avx512() -> bool:
    """Whether oneDNN itself uses AVX-512, which ONEDNN_MAX_CPU_ISA may forbid: without it, it takes no bf16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _operator_is_known() -> bool:
    """Whether this torch has the operator, and with the arguments that it gets here: it is not public."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    arguments = torch.ops.mkldnn._linear_pointwise.default._schema.arguments
    return [str(argument.type) for argument in arguments] == _ARGUMENTS


def _vendor() -> str:
    """The processor's maker as the kernel tells it; empty where it does not."""
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", described, re.MULTILINE)
    return found[1] if found else ""


_USE_ONEDNN = _onednn_is_faster()


def product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """left @ right for two matrices of one format and any strides; returns [M, N] of any strides, no gradient."""
    if not _by_onednn(left_MK, right_KN):
        return torch.mm(left_MK, right_KN)
    # The operator copies a left matrix whose rows do not lie together. If that is the larger copy, the transposed
    # product is taken: its left matrix is the other one, and its result may have to be turned.
    copied = 0 if right_KN.T.is_contiguous() else right_KN.numel()
    if not left_MK.is_contiguous() and copied + left_MK.shape[0] * right_KN.shape[1] < left_MK.numel():
        return _multiply(right_KN.T, left_MK.T).T
    return _multiply(left_MK, right_KN)


def batched_product(left_XMK: Tensor, right_XKN: Tensor, bias_XN: Tensor | None = None) -> Tensor:
    """Products of X pairs, as torch.bmm, plus a bias of each; returns [X, M, N], no gradient."""
    multiplications = left_XMK.shape[1] * left_XMK.shape[2] * right_XKN.shape[2]
    batch = len(left_XMK)
    if not batch or multiplications < _FEWEST_IN_A_BATCH or not _by_onednn(left_XMK[0], right_XKN[0]):
        if bias_XN is None:
            return torch.bmm(left_XMK, right_XKN)
        return torch.baddbmm(bias_XN.unsqueeze(1), left_XMK, right_XKN)
    pairs = zip(left_XMK.unbind(), right_XKN.unbind(), strict=True)
    if bias_XN is None:
        return torch.stack([product(left_MK, right_KN) for left_MK, right_KN in pairs])
    biases = bias_XN.unbind()
    return torch.stack([_multiply(*pair, bias_N) for pair, bias_N in zip(pairs, biases, strict=True)])


def write_product(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """Write `product` into a matrix of at least its format."""
    if _by_onednn(left_MK, right_KN) or left_MK.dtype != out_MN.dtype:
        out_MN.copy_(product(left_MK, right_KN))
    else:
        torch.mm(left_MK, right_KN, out=out_MN)


def add_product(left_MK: Tensor, right_KN: Tensor, total_MN: Tensor) -> None:
    """Add `product` to a matrix of at least its format."""
    if _by_onednn(left_MK, right_KN) or left_MK.dtype != total_MN.dtype:
        total_MN += product(left_MK, right_KN)
    else:
        total_MN.addmm_(left_MK, right_KN)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x weight^T + bias over the last dimension, as `torch.nn.functional.linear`; differentiable once."""
    if not _USE_ONEDNN or x.dim() < 2 or x.device.type != "cpu":
        return F.linear(x, weight_OI, bias_O)
    x_NI = x.flatten(0, -2)
    if not _by_onednn(x_NI, weight_OI.T):
        return F.linear(x, weight_OI, bias_O)
    y_NO: Tensor = _Linear.apply(x_NI, weight_OI, bias_O)
    return y_NO.view(*x.shape[:-1], weight_OI.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return _multiply(x_NI, weight_OI.T, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            product(grad_NO, weight_OI) if wanted[0] else None,
            product(grad_NO.T, x_NI) if wanted[1] else None,
            grad_NO.sum(dim=0) if wanted[2] else None,
        )


def kernels_are_made(x: Tensor) -> bool:
    """Whether products of this format on this device get a kernel for every shape."""
    return x.device.type == "cpu" and (x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and _USE_ONEDNN))


def _by_onednn(left_MK: Tensor, right_KN: Tensor) -> bool:
    if not _USE_ONEDNN or left_MK.dtype != torch.float32 or left_MK.device.type != "cpu":
        return False
    (rows, terms), columns = left_MK.shape, right_KN.shape[1]
    fewest = _FEWEST_TERMS
    if not left_MK.is_contiguous():
        fewest = _FEWEST_SUMMED if rows * columns <= _MANY else _FEWEST_SUMMED_OF_MANY
    return rows >= _FEWEST_ROWS and terms >= fewest and rows * terms * columns >= _FEWEST_MULTIPLICATIONS


def _multiply(left_MK: Tensor, right_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    right_NK = right_KN.T
    if not (right_KN.is_contiguous() or right_NK.is_contiguous()):
        right_NK = right_NK.contiguous()  # for others oneDNN has only its slow reference
    return (_compiled if torch.compiler.is_compiling() else _by_operator)(left_MK, right_NK, bias_N)


def _by_operator(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(left_MK, right_NK, bias_N, "none", [], "")
    return y_MN


@torch.library.custom_op("zslurm::onednn_product", mutates_args=())
def _compiled(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The compiler takes its own operator only if the right matrix never changes, so it gets to see this one."""
    return _by_operator(left_MK, right_NK, bias_N)


@_compiled.register_fake
def _(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return left_MK.new_empty(left_MK.shape[0], right_NK.shape[0])
