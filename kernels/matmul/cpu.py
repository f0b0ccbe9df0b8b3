"""Multiply fp32 matrices on CPUs from AMD with oneDNN.

torch multiplies fp32 matrices with MKL, which on processors of AMD keeps to AVX2. oneDNN, which torch holds too
and uses for bf16, takes their AVX-512: on an EPYC of the Zen 5 generation that is about twice MKL's rate
(`python -m benchmarks matmul`). No setting of torch makes it use oneDNN in fp32. The operator called here is one
that torch's own compiler uses for linear layers of models that are not trained.

oneDNN makes a kernel for every shape that it has not met, and keeps the last 1,024.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from zslurm.kernels import matmul_limits as limits

OPERATOR_ARGUMENTS = ["Tensor", "Tensor", "Optional[Tensor]", "str", "List[Optional[number]]", "Optional[str]"]


def is_faster() -> bool:
    """Return whether this is a processor of AMD with AVX-512, and torch has both libraries and the operator."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    if not _operator_is_known():
        return False
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.startswith("AVX512") and onednn_has_avx512() and processor_vendor() == "AuthenticAMD"


def onednn_has_avx512() -> bool:
    """Return whether oneDNN itself uses AVX-512, which ONEDNN_MAX_CPU_ISA may forbid: then it takes no bf16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _operator_is_known() -> bool:
    """Return whether this torch has the operator, with the arguments that it gets here: it is not public."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    arguments = torch.ops.mkldnn._linear_pointwise.default._schema.arguments
    return [str(argument.type) for argument in arguments] == OPERATOR_ARGUMENTS


def processor_vendor() -> str:
    """Return the processor's maker as /proc/cpuinfo has it; empty where it does not."""
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", described, re.MULTILINE)
    return found[1] if found else ""


IS_FASTER = is_faster()
"""Whether this path is used at all on this machine."""


def pays(left_MK: Tensor, right_KN: Tensor) -> bool:
    """Return whether oneDNN multiplies these two faster than torch does."""
    if not IS_FASTER or left_MK.dtype != torch.float32 or left_MK.device.type != "cpu":
        return False
    (rows, terms), columns = left_MK.shape, right_KN.shape[1]
    fewest = limits.FEWEST_TERMS if left_MK.is_contiguous() else limits.fewest_copied_terms(rows * columns)
    multiplications = rows * terms * columns
    return rows >= limits.FEWEST_ROWS and terms >= fewest and multiplications >= limits.FEWEST_MULTIPLICATIONS


def pays_for_batch(left_XMK: Tensor, right_XKN: Tensor) -> bool:
    """Return whether oneDNN, one pair after the other, is faster than torch.bmm."""
    multiplications = left_XMK.shape[1] * left_XMK.shape[2] * right_XKN.shape[2]
    enough = multiplications >= limits.FEWEST_IN_A_BATCH
    return len(left_XMK) > 0 and enough and pays(left_XMK[0], right_XKN[0])


def matmul(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Return left @ right for any strides, with as little copied as can be.

    The operator copies a left matrix whose rows are not contiguous. If that is the larger copy, the transposed
    product is taken: its left matrix is the other one, and its result may have to be transposed.
    """
    copied = 0 if right_KN.T.is_contiguous() else right_KN.numel()
    if not left_MK.is_contiguous() and copied + left_MK.shape[0] * right_KN.shape[1] < left_MK.numel():
        return multiply(right_KN.T, left_MK.T).T
    return multiply(left_MK, right_KN)


def multiply(left_MK: Tensor, right_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return left @ right plus a bias, the operands in this order."""
    right_NK = right_KN.T
    if not (right_KN.is_contiguous() or right_NK.is_contiguous()):
        right_NK = right_NK.contiguous()  # for others oneDNN has only its slow reference
    return (_compiled if torch.compiler.is_compiling() else by_operator)(left_MK, right_NK, bias_N)


def by_operator(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return the product by oneDNN, which torch offers as an operator."""
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(left_MK, right_NK, bias_N, "none", [], "")
    return y_MN


@torch.library.custom_op("zslurm::onednn_matmul", mutates_args=())
def _compiled(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Hide the operator from the compiler, which takes its own only if the right matrix never changes."""
    return by_operator(left_MK, right_NK, bias_N)


@_compiled.register_fake
def _(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return left_MK.new_empty(left_MK.shape[0], right_NK.shape[0])
