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
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels.dispatch import UnavailableError
from zslurm.kernels.grouped_gemm.groups import Groups
from zslurm.kernels.grouped_gemm.packages import (
    current_device_of,
    lacks_operands,
    lacks_package,
    row_major,
    rows_per_group,
)

_ARGUMENTS = frozenset({"lhs", "rhs", "group_sizes", "preferred_element_type"})
PACKAGE, LEAST = "amd-aiter", "0.1.16"
AUTOMATIC = "gfx942"
"""The architecture on which the rule takes it, if it is installed and its functions fit."""
_ARCHITECTURES = ("gfx942", "gfx950")
"""Those that AITER has a tuned configuration for (configs/gfx942-GMM.json) and that we read the code for."""


def lacks_here() -> str | None:
    """Return that the package is missing, too old, or has functions with other arguments; or None."""
    return lacks_package(PACKAGE, LEAST) or (_lacks_arguments() if torch.version.hip else None)


@cache
def _lacks_arguments() -> str | None:
    """Return what of AITER's functions is not as it was read; imports the package."""
    for name in ("gmm", "ptgmm"):
        try:
            parameters = inspect.signature(_function(name)).parameters
        except Exception as error:  # its import compiles, and makes files and directories
            return f"operands with the installed {PACKAGE}, which cannot be imported ({error})".splitlines()[0]
        if lacking := sorted(_ARGUMENTS - parameters.keys()):
            return f"operands with the installed {PACKAGE}, whose {name} has no {', '.join(lacking)}"
    return None


def lacks(left: Tensor, right: Tensor, groups: Groups) -> str | None:
    """Return what of these operands AITER does not take, or None."""
    if min(left.shape[-1], right.shape[-1]) < 2:
        return "matrices of one row or column"  # their strides fit several layouts
    return lacks_operands(left, right, _ARCHITECTURES) or lacks_here()


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
        weight_EIO = row_major(by_columns).mT
    else:
        weight_EIO = row_major(weight_EIO)
    return _call("gmm", row_major(x_NI), weight_EIO, groups)


def weight_gradient(left_NI: Tensor, right_NO: Tensor, groups: Groups) -> Tensor:
    """Multiply left transposed by right, over the rows of each group; returns [E, I, O].

    Raises:
        UnavailableError: AITER cannot be imported, or refuses the operands.
    """
    if not left_NI.shape[0] or not len(groups.ends_E):
        return left_NI.new_zeros(len(groups.ends_E), left_NI.shape[1], right_NO.shape[1])
    return _call("ptgmm", row_major(left_NI).T, row_major(right_NO), groups)


def _call(name: str, left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    function = _function(name)
    with current_device_of(left):
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
