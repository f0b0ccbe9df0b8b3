"""Multiply groups of rows by Primus-Turbo's `grouped_gemm`.

Read in AMD-AGI/Primus-Turbo, primus_turbo/pytorch/ops/grouped_gemm.py, of v0.4.0 and the commits after it:

    grouped_gemm(a [N, K], b [G, K, N] or with trans_b [G, N, K], group_lens [G] int64)     out [N, O]

where the lengths add up to the rows of `a`. Rows behind the last group are counted as the last group's here, so
that this is true without waiting for the host: their results are not defined anyway. Since 0.4.0 the kernels are
Triton's by default, which read the groups on the GPU; its own setting PRIMUS_TURBO_GROUPED_GEMM_BACKEND can choose
hipBLASLt, which waits for the host.

There is no public function for the weights' gradient: backward takes another implementation for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

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

PACKAGE, LEAST = "primus-turbo", "0.4.0"
_ARCHITECTURES = ("gfx942", "gfx950")
_MULTIPLE = 128  # of the widths: its own tests have no others, and its loads assume whole blocks of columns


def lacks_here() -> str | None:
    """Return that the package is missing or too old, or None."""
    return lacks_package(PACKAGE, LEAST)


def lacks(x_NI: Tensor, weight_EIO: Tensor, groups: Groups) -> str | None:
    """Return what of these operands Primus-Turbo does not take, or None."""
    if any(size % _MULTIPLE for size in weight_EIO.shape[1:]):
        return f"widths that are no multiple of {_MULTIPLE}"
    return lacks_operands(x_NI, weight_EIO, _ARCHITECTURES) or lacks_here()


def multiply(x_NI: Tensor, weight_EIO: Tensor, groups: Groups) -> Tensor:
    """Multiply the rows of group e by matrix e; returns [N, O].

    Raises:
        UnavailableError: Primus-Turbo cannot be imported, or has no kernel for the operands.
    """
    rows = x_NI.shape[0]
    if not rows or not weight_EIO.shape[0]:
        return x_NI.new_empty(rows, weight_EIO.shape[-1])
    lengths_E = rows_per_group(groups.ends_E).long()
    lengths_E[-1] += rows - groups.ends_E[-1]
    transposed = weight_EIO.mT.is_contiguous()
    weight = row_major(weight_EIO.mT if transposed else weight_EIO)
    function = _function()
    with current_device_of(x_NI):
        try:
            result: Tensor = function(row_major(x_NI), weight, lengths_E, trans_b=transposed)
        except (AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            raise UnavailableError(
                f"Primus-Turbo refuses the operands: {type(error).__name__}: {error}"
            ) from error
    return result


def _function() -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = importlib.import_module("primus_turbo.pytorch.ops").grouped_gemm
    except (AttributeError, RuntimeError) as error:  # of a package that was built for another torch or GPU
        raise UnavailableError(f"Primus-Turbo cannot be imported: {error}") from error
    return function
