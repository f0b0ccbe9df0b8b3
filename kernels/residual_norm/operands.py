"""What the operation works on, and what is wrong with it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zslurm.kernels import checks

_FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class NormOperands(NamedTuple):
    """The tensors of one call; D is the width of a row.

    Attributes:
        hidden: [..., D], with one dimension or more before D.
        hidden_scale: [D], or None for 1.
        hidden_bias: [D], or None for 0; there is one exactly if there is a scale.
        residual: of the shape of hidden, or None for no residual stream.
        residual_scale: [D] or None, as for hidden.
        residual_bias: [D] or None, as for hidden.
        weight: [D]; its format is that of the normalised result.
        bias: [D], added behind the weight, or None.
    """

    hidden: Tensor
    hidden_scale: Tensor | None
    hidden_bias: Tensor | None
    residual: Tensor | None
    residual_scale: Tensor | None
    residual_bias: Tensor | None
    weight: Tensor
    bias: Tensor | None

    @property
    def joins(self) -> bool:
        """Return whether anything is added or scaled before the norm."""
        return self.residual is not None or self.hidden_scale is not None

    @property
    def wide(self) -> torch.dtype:
        """Return the format that is computed in: fp32, or fp64 if the operands are."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def given(self) -> dict[str, Tensor]:
        """Return those that are there, by their names."""
        return {name: operand for name, operand in self._asdict().items() if operand is not None}


def check(name: str, operands: NormOperands) -> None:
    """Raise ValueError for operands that no implementation takes."""
    if _fit(operands):
        return  # the usual case, without the cost of messages: small entries take a CPU 100 microseconds
    shape = list(operands.hidden.shape)
    if len(shape) < 2 or not shape[-1]:
        raise ValueError(f"{name}: hidden has the shape {shape}, but must have [..., D] with D of at least 1")
    for stream in ("hidden", "residual"):
        _check_affine(name, stream, operands)
    operands_by_name = operands.given()
    for operand_name, operand in operands_by_name.items():
        if operand_name == "residual":
            checks.shape(name, operand_name, operand, tuple(operands.hidden.shape), "." * operands.hidden.dim())
        elif operand_name != "hidden":
            checks.shape(name, operand_name, operand, (operands.hidden.shape[-1],), "D")
    checks.dtype_among(name, _FORMATS, **operands_by_name)
    if torch.float64 in {operand.dtype for operand in operands_by_name.values()}:
        checks.one_dtype(name, **operands_by_name)  # what is computed in fp64 is in fp64 throughout
    checks.one_device(name, **operands_by_name)


def _check_affine(name: str, stream: str, operands: NormOperands) -> None:
    operands_by_name = operands.given()
    scale, bias = f"{stream}_scale", f"{stream}_bias"
    if (scale in operands_by_name) != (bias in operands_by_name):
        raise ValueError(f"{name}: {scale} and {bias} are given together, or neither of them")
    if scale in operands_by_name and stream not in operands_by_name:
        raise ValueError(f"{name}: {scale} is given without {stream}")


def _fit(given: NormOperands) -> bool:
    """Return whether the operands are right as `check` has it; False may be wrong, True may not."""
    hidden, scale, bias, residual, residual_scale, residual_bias, weight, own_bias = given
    vectors = [
        operand
        for operand in (scale, bias, residual_scale, residual_bias, weight, own_bias)
        if operand is not None
    ]
    everything = [hidden, *vectors] if residual is None else [hidden, residual, *vectors]
    formats = {operand.dtype for operand in everything}
    size = hidden.shape
    return (
        len(size) > 1
        and size[-1] > 0
        and (scale is None) == (bias is None)
        and (residual_scale is None) == (residual_bias is None)
        and (residual_scale is None or residual is not None)
        and (residual is None or residual.shape == size)
        and all(operand.shape == size[-1:] for operand in vectors)
        and formats.issubset(_FORMATS)
        and (len(formats) == 1 or torch.float64 not in formats)
        and len({operand.device for operand in everything}) == 1
    )
