"""A few tensors in place of a model, for tests of what is done to flat buffers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zslurm.train.parallel.levels import make_levels
from zslurm.train.parallel.topology import Topology
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.shapes import TensorInfo, TensorKind

FLAT = (
    TensorInfo("matrix", (7, 9), TensorKind.MATRIX),
    TensorInfo("norm", (9,), TensorKind.NORM),
    TensorInfo("experts", (2, 5, 3), TensorKind.EXPERTS),
    TensorInfo("bias", (5,), TensorKind.BIAS),
)
TABLE = (
    TensorInfo("embedding", (11, 6), TensorKind.EMBEDDING),
    TensorInfo("matrix", (7, 9), TensorKind.MATRIX, whole=1),
    TensorInfo("norm", (9,), TensorKind.NORM),
    TensorInfo("experts", (3, 8, 3), TensorKind.EXPERTS, whole=3),
    TensorInfo("halves", (2, 10, 4), TensorKind.EXPERTS, whole=4),
    TensorInfo("bias", (5,), TensorKind.BIAS),
    TensorInfo("second", (9, 7), TensorKind.MATRIX, whole=1),
)
TINY_BUCKETS = 512.0
"""Bytes: a few matrices of TABLE at a time, and some of them cut."""


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
    model: nn.Module, group: dist.ProcessGroup, table: tuple[TensorInfo, ...] = TABLE, **settings: Any
) -> ZeroShards:
    """The shards of a model in buckets of TINY_BUCKETS, unless `settings` say otherwise."""
    return ZeroShards(model, table, group, **({"bucket_bytes": TINY_BUCKETS} | settings))


def backward(model: nn.Module, seed: int, *, integers: bool = False) -> None:
    """Give every parameter a gradient by back-propagation: noise, or small whole numbers that add up exactly."""
    total = torch.zeros(())
    for name, parameter in model.named_parameters():
        gradient = gradient_of(name, tuple(parameter.shape), seed, integers=integers)
        total = total + (parameter * gradient.to(parameter.dtype)).float().sum()
    total.backward()


def gradient_of(name: str, shape: tuple[int, ...], seed: int, *, integers: bool = False) -> Tensor:
    """The gradient that `backward` gives."""
    gradient = values_of(TensorInfo(name, shape, TensorKind.MATRIX), seed)
    return (4 * gradient).round() if integers else gradient


def by_tensor(shards: ZeroShards, chunk: Tensor) -> dict[str, Tensor]:
    """What this rank owns of every tensor, in its shape; NaN if another rank does."""
    found = {row.name: torch.full((row.numel,), math.nan, dtype=chunk.dtype) for row in shards.table}
    for extent in shards.extents:
        found[extent.tensor][extent.start : extent.stop] = chunk[extent.in_chunk]
    return {row.name: found[row.name].view(row.shape) for row in shards.table}


def blamed(
    group: dist.ProcessGroup, faults: dict[int, str], topology: Topology | None = None
) -> tuple[str, int] | None:
    """Who is named when the gradients of these ranks' tensors are not finite; with a topology in two levels."""
    rank, model = dist.get_rank(group), Few()
    shards = shards_of(model, group, levels=None if topology is None else make_levels(topology, rank))
    shards.begin_step(backwards=1)
    if rank in faults:
        model.get_parameter(faults[rank]).register_hook(lambda gradient: gradient * math.nan)
    backward(model, 1)
    shards.reduce_gradients()
    assert bool(torch.isfinite(shards.clip_gradients(1.0))) == (not faults)
    return shards.first_nonfinite()
