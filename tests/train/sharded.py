"""A few tensors in place of a model, for tests of what is done to flat buffers."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.parallel.zero import ZeroShards
from train.shapes import Kind, TensorInfo

TABLE = (
    TensorInfo("matrix", (7, 9), Kind.MATRIX),
    TensorInfo("norm", (9,), Kind.NORM),
    TensorInfo("experts", (2, 5, 3), Kind.EXPERTS),
    TensorInfo("bias", (5,), Kind.BIAS),
)


class Few(nn.Module):
    """One parameter for each row of a table, with values that depend on the row alone."""

    def __init__(self, table: tuple[TensorInfo, ...] = TABLE, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for row in table:
            self.register_parameter(row.name, nn.Parameter(values_of(row).to(dtype)))


def values_of(row: TensorInfo, seed: int = 0) -> Tensor:
    """fp32 values of a row's shape."""
    generator = torch.Generator().manual_seed(1000 * seed + len(row.name) + 7 * math.prod(row.shape))
    return torch.randn(row.shape, generator=generator)


def shards_of(
    model: nn.Module,
    group: dist.ProcessGroup,
    table: tuple[TensorInfo, ...] = TABLE,
    gradient_dtype: torch.dtype = torch.float32,
) -> ZeroShards:
    return ZeroShards(model, table, group, gradient_dtype)


def backward(model: nn.Module, seed: int, *, whole: bool = False) -> None:
    """Give every parameter a gradient by back-propagation: noise, or small whole numbers that add up exactly."""
    total = torch.zeros(())
    for name, parameter in model.named_parameters():
        row = TensorInfo(name, tuple(parameter.shape), Kind.MATRIX)
        gradient = values_of(row, seed)
        gradient = (4 * gradient).round() if whole else gradient
        total = total + (parameter * gradient.to(parameter.dtype)).float().sum()
    total.backward()
