"""Multiply groups of rows by AITER's kernels in Triton: `gmm`, and `ptgmm` for the weights' gradient.

Read in ROCm/aiter, aiter/ops/triton/gmm.py and utils/gmm_common.py, of v0.1.16 to v0.1.20:

    gmm(lhs [M, K], rhs [G, K, N], group_sizes [G])       out [M, N]        rows behind the last group are left
    ptgmm(lhs [K, M], rhs [M, N], group_sizes [G])        out [G, K, N]     zeros for a group without rows

Both read the groups' sizes on the GPU. Before 0.1.16 `gmm` waits for the host three times a call, and refuses
groups that have no rows at all: such versions are not taken. `ptgmm` is the persistent one; `nptgmm` leaves the
gradient of a group without rows as memory had it.

Operands are compared with their layouts by the numbers of their strides. A square matrix whose rows are contiguous
fits two of them and is refused; its columns are made contiguous here, which costs one copy of the matrices.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels.arch import arch_of
from zslurm.kernels.checks import short
from zslurm.kernels.dispatch import UnavailableError
from zslurm.kernels.grouped_gemm.reference import Groups, rows_per_group

_ARGUMENTS = frozenset({"lhs", "rhs", "group_sizes", "preferred_element_type"})
PACKAGE, LEAST = "amd-aiter", "0.1.16"
AUTOMATIC = "gfx942"
"""The architecture on which the rule takes it, if it is installed and its functions fit."""
_ARCHITECTURES = ("gfx942", "gfx950")
"""Those that AITER has a tuned configuration for (configs/gfx942-GMM.json) and that we read the code for."""


def lacks_here() -> str | None:
    """Return that the package is missing, too old, or has functions with other arguments; or None."""
    return _lacks_package(PACKAGE, LEAST) or (_lacks_arguments() if torch.version.hip else None)


@cache
def _lacks_arguments() -> str | None:
    """Return the first difference of AITER's functions from those that were read; imports the package."""
    for name in ("gmm", "ptgmm"):
        try:
            parameters = inspect.signature(_function(name)).parameters
        except Exception as error:  # its import compiles, and makes files and directories
            return f"operands with the installed {PACKAGE}, which cannot be imported ({error})".splitlines()[0]
        if lacking := sorted(_ARGUMENTS - parameters.keys()):
            return f"operands with the installed {PACKAGE}, whose {name} has no {', '.join(lacking)}"
    return None


def lacks(left: Tensor, right: Tensor, groups: Groups) -> str | None:
    """Return which operands AITER does not take, as a phrase, or None."""
    if min(left.shape[-1], right.shape[-1]) < 2:
        return "matrices of one row or column"  # their strides fit several layouts
    return _lacks_operands(left, right, _ARCHITECTURES) or lacks_here()


def multiply(x_NI: Tensor, weight_EIO: Tensor, groups: Groups) -> Tensor:
    """Multiply the rows of group e by matrix e; returns [N, O].

    Raises:
        UnavailableError: AITER cannot be imported, or refuses the operands.
    """
    if not x_NI.shape[0] or not weight_EIO.shape[0]:
        return x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[-1])
    by_columns = weight_EIO.mT
    _, inputs, outputs = weight_EIO.shape
    if inputs == outputs or by_columns.is_contiguous():
        weight_EIO = _row_major(by_columns).mT
    else:
        weight_EIO = _row_major(weight_EIO)
    return _call("gmm", _row_major(x_NI), weight_EIO, groups)


def weight_gradient(left_NI: Tensor, right_NO: Tensor, groups: Groups) -> Tensor:
    """Multiply left transposed by right, over the rows of each group; returns [E, I, O].

    Raises:
        UnavailableError: AITER cannot be imported, or refuses the operands.
    """
    if not left_NI.shape[0] or not len(groups.ends_E):
        return left_NI.new_zeros(len(groups.ends_E), left_NI.shape[1], right_NO.shape[1])
    return _call("ptgmm", _row_major(left_NI).T, _row_major(right_NO), groups)


def _call(name: str, left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    function = _function(name)
    with _current_device_of(left):
        try:
            result: Tensor = function(
                left, right, rows_per_group(groups.ends_E), preferred_element_type=left.dtype
            )
        except (AssertionError, LookupError) as error:  # before anything was launched
            raise UnavailableError(f"AITER refuses the operands: {type(error).__name__}: {error}") from error
    return result


def _function(name: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = getattr(importlib.import_module("aiter.ops.triton.gmm"), name)
    except (AttributeError, RuntimeError) as error:  # of a package that was built for another torch or GPU
        raise UnavailableError(f"AITER cannot be imported: {error}") from error
    return function


@cache
def _lacks_package(distribution: str, least: str) -> str | None:
    """Return that a package is missing or older than a version, as a phrase behind "does not take", or None."""
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"operands without the package {distribution}, which is not installed"
    if _numbers(installed) < _numbers(least):
        return f"operands with {distribution} {installed}: it needs {least} or newer"
    return None


def _lacks_operands(left: Tensor, right: Tensor, known: tuple[str, ...]) -> str | None:
    """Return which of two operands bf16 kernels on these architectures do not take, as a phrase, or None."""
    arch = arch_of(left.device).name
    if arch not in known:
        return f"operands on {arch}, only on {', '.join(known)}"
    return None if left.dtype == torch.bfloat16 else f"{short(left.dtype)} operands"


def _row_major(x: Tensor) -> Tensor:
    """Return x with exactly the strides of a new tensor of its shape: packages compare them as numbers.

    `contiguous` leaves the strides of dimensions of size 1 as they are.
    """
    new = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return x if x.stride() == new.stride() else torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def _current_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of a tensor the current one, on which kernels in Triton are launched."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 1, 16) of 0.1.16.post1."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()
