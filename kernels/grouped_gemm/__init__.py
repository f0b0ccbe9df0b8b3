"""Multiply groups of consecutive rows by one matrix per group: the products of routed experts.

    multiply(x_NI, weight_EIO, groups)              y[rows of e] = x[rows of e] W[e]            [N, O]
    weight_gradient(left_NI, right_NO, groups)      G[e] = left[rows of e]^T right[rows of e]   [E, I, O]
    add_weight_gradient(..., total_EIO, adds)       the same into a sum in fp32, without rounding it before

Groups may have no rows: their gradient is zero. Rows behind the last group are left undefined in the result.

    reference       a loop, for any device and format; the host waits to learn how many rows each group has
    triton          one persistent kernel for each of the two, the groups' ends read on the GPU
    torch           `torch.nn.functional.grouped_mm`
    aiter           AITER's `gmm` and `ptgmm`

Where no table was measured: on a CPU the loop, which is as fast there; on GPUs of NVIDIA torch's, whose kernels
there read the ends on the GPU; on gfx942 AITER's, if the package is installed and its functions have the arguments
that they are called with; on others of AMD Triton's. What that one does not take goes to another that takes it
without the host, if there is one.

Under `torch.compile` each product is one operator, whose inside the compiler does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels import checks
from zslurm.kernels.arch import is_gpu
from zslurm.kernels.dispatch import Candidates, Implementation, Operation, Sizes, on_gpus
from zslurm.kernels.grouped_gemm import aiter, grouped_mm, reference
from zslurm.kernels.grouped_gemm.reference import Groups

__all__ = ["OPERATIONS", "Groups", "add_weight_gradient", "multiply", "weight_gradient"]

_IN_TRITON = (torch.bfloat16, torch.float32)


def multiply(x_NI: Tensor, weight_EIO: Tensor, groups: Groups) -> Tensor:
    """Multiply the rows of group e by matrix e; returns [N, O], undefined behind the last group."""
    if torch.compiler.is_compiling():
        y_NO: Tensor = _compiled_multiply(x_NI, weight_EIO, groups.ends_E)
    else:
        y_NO = _multiply(x_NI, weight_EIO, groups)
    return y_NO


def weight_gradient(left_NI: Tensor, right_NO: Tensor, groups: Groups) -> Tensor:
    """Multiply left transposed by right, over the rows of each group; returns [E, I, O]."""
    run = _compiled_weight_gradient if torch.compiler.is_compiling() else None
    gradient: Tensor = (
        run(left_NI, right_NO, groups.ends_E) if run else _weight_gradient(left_NI, right_NO, groups)
    )
    return gradient


def add_weight_gradient(left_NI: Tensor, right_NO: Tensor, groups: Groups, total_EIO: Tensor, adds: bool) -> None:
    """Write left transposed by right, over the rows of each group, into a tensor, or add it to what is there.

    Triton's kernel sums in fp32 from what is there on; others make the gradient in the operands' format first.
    """
    _add_weight_gradient(left_NI, right_NO, groups, total_EIO, adds)


def chosen_for(x_NI: Tensor, weight_EIO: Tensor, groups: Groups) -> str:
    """Return the name of the implementation that multiplies operands of such shapes and formats."""
    return _multiply.choose(x_NI, weight_EIO, groups).name


def _check_multiply(x_NI: Tensor, weight_EIO: Tensor, groups: Groups) -> None:
    name = "grouped_gemm.multiply"
    checks.shape(name, "x", x_NI, (None, None), "NI")
    checks.shape(name, "weight", weight_EIO, (None, x_NI.shape[1], None), "EIO")
    checks.shape(name, "groups.ends_E", groups.ends_E, (weight_EIO.shape[0],), "E")
    _check_all(name, groups, x=x_NI, weight=weight_EIO)


def _check_weight_gradient(left_NI: Tensor, right_NO: Tensor, groups: Groups) -> None:
    name = "grouped_gemm.weight_gradient"
    checks.shape(name, "left", left_NI, (None, None), "NI")
    checks.shape(name, "right", right_NO, (left_NI.shape[0], None), "NO")
    checks.shape(name, "groups.ends_E", groups.ends_E, (None,), "E")
    _check_all(name, groups, left=left_NI, right=right_NO)


def _check_add(left_NI: Tensor, right_NO: Tensor, groups: Groups, total_EIO: Tensor, adds: bool) -> None:
    name = "grouped_gemm.add_weight_gradient"
    _check_weight_gradient(left_NI, right_NO, groups)
    shape = len(groups.ends_E), left_NI.shape[1], right_NO.shape[1]
    checks.shape(name, "total", total_EIO, shape, "EIO")
    checks.dtype_among(name, (*_IN_TRITON, torch.float64), total=total_EIO)
    checks.one_device(name, left=left_NI, total=total_EIO)


def _check_memory(left_NI: Tensor, right_NO: Tensor, groups: Groups, total_EIO: Tensor, adds: bool) -> None:
    checks.no_overlap("grouped_gemm.add_weight_gradient", "total", total_EIO, left=left_NI, right=right_NO)


def _check_all(name: str, groups: Groups, **operands: Tensor) -> None:
    checks.one_dtype(name, **operands)
    checks.dtype_among(name, (torch.int32,), **{"groups.ends_E": groups.ends_E})
    checks.one_device(name, **operands, **{"groups.ends_E": groups.ends_E})


def _sizes(left: Tensor, right: Tensor, groups: Groups) -> Sizes:
    count = len(groups.ends_E)
    return {
        "dtype": checks.short(left.dtype),
        "groups": count,
        "rows_per_group": left.shape[0] // max(1, count),
        "inputs": left.shape[1],
        "outputs": right.shape[-1],
    }


def _candidates(triton: Implementation, torchs: Implementation, aiters: Implementation) -> Candidates:
    """Return the implementations, each with the condition of its preference."""
    return [
        (lambda arch, sizes: arch.name == aiter.AUTOMATIC, aiters),
        (lambda arch, sizes: arch.is_nvidia, torchs),
        (on_gpus, triton),
        (on_gpus, torchs),
    ]


def _lacks_in_triton(left: Tensor, right: Tensor, groups: Groups) -> str | None:
    if not is_gpu(left.device):
        return f"operands on {left.device.type}"
    if left.dtype not in _IN_TRITON:
        return f"{checks.short(left.dtype)} operands"
    return checks.lacks_near_elements(left, right)


def _lacks_sum_in_triton(left: Tensor, right: Tensor, groups: Groups, total: Tensor, adds: bool) -> str | None:
    return _lacks_in_triton(left, right, groups) or checks.lacks_near_elements(total, tile=256)


def _by_triton(function: str, lacks: Callable[..., str | None] = _lacks_in_triton) -> Implementation:
    def run(left: Tensor, right: Tensor, groups: Groups, *args: Any, **settings: Any) -> Any:
        from zslurm.kernels.grouped_gemm import triton

        return getattr(triton, function)(left, right, groups.ends_E, *args, **settings)

    return Implementation("triton", run, lacks)


def _in_two_passes(name: str) -> Implementation:
    """Return what makes the gradient by an implementation of `weight_gradient`, and then adds it."""
    gradient = _weight_gradient.implementation(name)

    def run(left: Tensor, right: Tensor, groups: Groups, total: Tensor, adds: bool) -> None:
        reference.put_or_add(gradient.run(left, right, groups), total, adds)

    def lacks(left: Tensor, right: Tensor, groups: Groups, total: Tensor, adds: bool) -> str | None:
        return gradient.supports(left, right, groups)

    return Implementation(name, run, lacks, lacks_here=gradient.lacks_here)


_multiply = Operation(
    name="grouped_gemm.multiply",
    reference=reference.multiply,
    candidates=_candidates(
        _by_triton("multiply"),
        Implementation("torch", grouped_mm.multiply, grouped_mm.lacks),
        Implementation("aiter", aiter.multiply, aiter.lacks, lacks_here=aiter.lacks_here),
    ),
    check=_check_multiply,
    device=lambda x_NI, weight_EIO, groups: x_NI.device,
    sizes=_sizes,
)

_weight_gradient = Operation(
    name="grouped_gemm.weight_gradient",
    reference=reference.weight_gradient,
    candidates=_candidates(
        _by_triton("weight_gradient"),
        Implementation("torch", grouped_mm.weight_gradient, grouped_mm.lacks),
        Implementation("aiter", aiter.weight_gradient, aiter.lacks, lacks_here=aiter.lacks_here),
    ),
    check=_check_weight_gradient,
    device=lambda left_NI, right_NO, groups: left_NI.device,
    sizes=_sizes,
)

_add_weight_gradient = Operation(
    name="grouped_gemm.add_weight_gradient",
    reference=reference.add_weight_gradient,
    candidates=_candidates(
        _by_triton("add_weight_gradient", _lacks_sum_in_triton), _in_two_passes("torch"), _in_two_passes("aiter")
    ),
    check=_check_add,
    check_memory=_check_memory,
    device=lambda left_NI, *_, **__: left_NI.device,
    sizes=lambda left_NI, right_NO, groups, *_, **__: _sizes(left_NI, right_NO, groups),
)

OPERATIONS = (_multiply, _weight_gradient, _add_weight_gradient)


@torch.library.custom_op("zslurm::grouped_multiply", mutates_args=())
def _compiled_multiply(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    y_NO: Tensor = _multiply(x_NI, weight_EIO, Groups(ends_E))
    return y_NO


@_compiled_multiply.register_fake
def _(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[-1])


@torch.library.custom_op("zslurm::grouped_weight_gradient", mutates_args=())
def _compiled_weight_gradient(left_NI: Tensor, right_NO: Tensor, ends_E: Tensor) -> Tensor:
    gradient_EIO: Tensor = _weight_gradient(left_NI, right_NO, Groups(ends_E))
    return gradient_EIO


@_compiled_weight_gradient.register_fake
def _(left_NI: Tensor, right_NO: Tensor, ends_E: Tensor) -> Tensor:
    return left_NI.new_empty(ends_E.shape[0], left_NI.shape[-1], right_NO.shape[-1])
