"""bf16 and fp16 without torch: numpy has no bfloat16, so its bits travel in uint16, as in checkpoint_tools.

Rounding to bf16 is to nearest, ties to even, which is torch's; the largest fp32 values become infinite. A NaN
stays a NaN (torch has two that it makes, depending on where in a vector the value is).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

READABLE = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}
"""safetensors dtypes that weights may have -> the numpy dtype that carries their bits."""


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of `values` rounded to bf16."""
    bits = values.view(np.uint32)
    rounded = ((bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x7FC0
    return rounded


def to_fp32(carried: NDArray[Any], dtype: str, out: NDArray[np.float32]) -> None:
    """Fill `out` with the values that `carried` holds in the safetensors dtype `dtype`; exact."""
    if dtype == "BF16":
        np.left_shift(carried, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        out[...] = carried
