"""Multiply 16-bit matrices with an fp32 result, and take losses and gradient of logits: the output head.

    product(left_MK, right_KN, out_MN)      out = left right, summed and stored in at least fp32
    losses(logits_TV, targets_T, counted_T, z_weight, dtype)
                                            log-sum-exp and the target's logit of each row, and the gradient of the
                                            logits in their place, in their format or a narrower one

The head's logits, log-sum-exp and the embedding's gradient need fp32 results, not fp32 operands: the product of
two bf16 numbers is exact in fp32, so products of narrow operands differ from those of widened ones by the order of
their sums alone. They run at the rate of the bf16 matrix units, on MI300X eight times that of fp32, and without a
widened copy of the embedding.

    reference       widens both operands, for any device and format
    torch           `torch.mm(..., out_dtype=torch.float32)`: on GPUs, of AMD from torch 2.10 on

If no table was measured, torch's runs on GPUs that can. torch has it for NVIDIA's GPUs from 2.8 on. For AMD's it
has the argument as early, but refuses it when it is called until 2.10 (pytorch/pytorch#161540 and #162600), as
some builds of 2.9 do: so one small product per device, multiplied once, decides whether it can.

`losses` is one kernel in Triton on GPUs, which reads the logits twice and writes the gradient once.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from zslurm.kernels import checks
from zslurm.kernels.arch import is_gpu
from zslurm.kernels.dispatch import REFERENCE, Implementation, Operation, Sizes, anywhere, in_triton, on_gpus
from zslurm.kernels.head import reference

__all__ = ["OPERATIONS", "add_product", "keeps_narrow", "losses", "product"]

_log = logging.getLogger(__name__)
_FORMATS = (torch.bfloat16, torch.float32, torch.float64)
PIECE_ELEMENTS = 1 << 26
"""Elements of a sum that `add_product` makes in addition to the total at one time: 256 MiB."""


def by_torch(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """Write left right, summed and stored in fp32."""
    torch.mm(left_MK, right_KN, out_dtype=torch.float32, out=out_MN)


def _lacks(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> str | None:
    """Return which operands torch does not take, as a phrase, or None."""
    if not is_gpu(left_MK.device):
        return f"operands on {left_MK.device.type}"
    if left_MK.dtype != torch.bfloat16:
        return f"{str(left_MK.dtype).removeprefix('torch.')} operands"
    return None if works_on(left_MK.device) else "operands on this GPU, which torch multiplies to 16 bits alone"


@cache
def works_on(device: torch.device) -> bool:
    """Return whether torch makes such products on a device; if not, log a warning, once."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        by_torch(ones, ones, torch.empty(16, 16, device=device))
    except (RuntimeError, TypeError) as error:  # refused by the operator, or an argument that this torch lacks
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise  # not refused: the device has no memory left, or reports a fault
        cause = str(error).strip().splitlines()[0]
        _log.warning("head.product widens its operands to fp32 on %s, which is slow (%s)", device, cause)
        return False
    return True


def _check(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    name = "head.product"
    checks.shape(name, "left", left_MK, (None, None), "MK")
    checks.shape(name, "right", right_KN, (left_MK.shape[1], None), "KN")
    checks.shape(name, "out", out_MN, (left_MK.shape[0], right_KN.shape[1]), "MN")
    checks.dtype_among(name, _FORMATS, left=left_MK)
    checks.one_dtype(name, left=left_MK, right=right_KN)
    checks.dtype_among(name, (torch.promote_types(left_MK.dtype, torch.float32),), out=out_MN)
    checks.one_device(name, left=left_MK, right=right_KN, out=out_MN)


def _check_memory(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    checks.no_overlap("head.product", "out", out_MN, left=left_MK, right=right_KN)


def _sizes(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> Sizes:
    (rows, terms), columns = left_MK.shape, right_KN.shape[1]
    return {"dtype": checks.short(left_MK.dtype), "rows": rows, "terms": terms, "columns": columns}


product = Operation(
    name="head.product",
    reference=reference.product,
    candidates=[(anywhere, Implementation("torch", by_torch, _lacks))],
    check=_check,
    check_memory=_check_memory,
    device=lambda left_MK, right_KN, out_MN: left_MK.device,
    sizes=_sizes,
)


def _check_losses(
    logits_TV: Tensor, targets_T: Tensor, counted_T: Tensor, z_weight: float, dtype: torch.dtype
) -> None:
    name = "head.losses"
    checks.shape(name, "logits", logits_TV, (None, None), "TV")
    checks.shape(name, "targets", targets_T, (len(logits_TV),), "T")
    checks.shape(name, "counted", counted_T, (len(logits_TV),), "T")
    checks.dtype_among(name, (torch.float32, torch.float64), logits=logits_TV)
    checks.dtype_among(name, (torch.int64,), targets=targets_T)
    checks.dtype_among(name, (torch.bool,), counted=counted_T)
    checks.one_device(name, logits=logits_TV, targets=targets_T, counted=counted_T)
    if logits_TV.stride(-1) != 1 or dtype.itemsize > logits_TV.dtype.itemsize:
        raise ValueError(f"{name}: a gradient in {checks.short(dtype)} does not fit in the place of the logits")


def _lacks_losses(logits_TV: Tensor, *_: object) -> str | None:
    if not is_gpu(logits_TV.device):
        return f"operands on {logits_TV.device.type}"
    return None if logits_TV.dtype == torch.float32 else f"{checks.short(logits_TV.dtype)} logits"


losses = Operation(
    name="head.losses",
    reference=reference.losses,
    candidates=[(on_gpus, in_triton("head", "losses", _lacks_losses))],
    check=_check_losses,
    device=lambda logits_TV, *_: logits_TV.device,
    sizes=lambda logits_TV, targets_T, counted_T, z_weight, dtype: {
        "dtype": checks.short(dtype),
        "rows": logits_TV.shape[0],
        "columns": logits_TV.shape[1],
    },
)

OPERATIONS = (product, losses)


def keeps_narrow(left_MK: Tensor, right_KN: Tensor) -> bool:
    """Return whether the product of such operands is made without widening them."""
    narrow = left_MK.dtype == right_KN.dtype and left_MK.dtype.itemsize < torch.float32.itemsize
    if not narrow or left_MK.device != right_KN.device:
        return False
    out_MN = left_MK.new_empty((), dtype=torch.float32).expand(left_MK.shape[0], right_KN.shape[1])
    return product.choose(left_MK, right_KN, out_MN).name != REFERENCE


def add_product(left_MK: Tensor, right_KN: Tensor, total_MN: Tensor) -> None:
    """Add left right to a matrix in at least fp32, some rows at a time, without another matrix of its size."""
    rows = max(1, PIECE_ELEMENTS // max(1, total_MN.shape[1]))
    for start in range(0, len(total_MN), rows):
        total = total_MN[start : start + rows]
        piece = torch.empty_like(total)
        product(left_MK[start : start + rows], right_KN, piece)
        total += piece
