"""The optimizer of one rank: Muon on the matrices that it owns whole, AdamW on its share of everything else.

    chunk        | flat share                    | matrices, batched by shape |
    master       | x                             | x                          |
    exp_avg      | x                             |                            |   AdamW
    exp_avg_sq   | x                             |                            |   AdamW
    momentum     |                               | x                          |   Muon

Each state is one flat buffer in the format of the master weights: 12 bytes per flat parameter and 8 per parameter
of a matrix, for 1/N of each. Nothing is communicated. With `optim.matrices: adamw` the table has nothing whole,
and all of it is AdamW's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zslurm.checkpoint_tools import Batch, Extent
from zslurm.checkpoint_tools.format.partition import Partition
from zslurm.train.config import OptimConfig
from zslurm.train.optim.adamw import MOMENTS, AdamW
from zslurm.train.optim.muon import MatrixBatch, Muon
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.shapes import TensorInfo

MASTER = "master"
MOMENTUM = "momentum"


def states_of(row: TensorInfo) -> tuple[str, ...]:
    """Return the names of what is kept of a tensor."""
    return (MASTER, MOMENTUM) if row.whole else (MASTER, *MOMENTS)


def spans_of(layout: Partition, position: int) -> dict[str, tuple[int, int]]:
    """Return the elements [start, stop) of a chunk that each state is kept of."""
    share, chunk = layout.flat_share, layout.chunk(position)
    return {MASTER: (0, chunk), **dict.fromkeys(MOMENTS, (0, share)), MOMENTUM: (share, chunk)}


@dataclass(frozen=True, eq=False)
class OwnedState:
    """One state of the elements [start, start + len(values)) of this rank's chunk; `values` is the live tensor."""

    name: str
    start: int
    values: Tensor

    def covers(self, extent: Extent) -> bool:
        """Return whether this state is kept of an extent of the chunk."""
        return self.start <= extent.offset_in_chunk < self.start + len(self.values)

    def where(self, extent: Extent) -> slice:
        """Return the slice of `values` that holds an extent."""
        return slice(extent.offset_in_chunk - self.start, extent.offset_in_chunk - self.start + extent.numel)


class ShardedOptimizer:
    """AdamW and Muon for one rank's chunk of master weights.

    Attributes:
        steps: optimizer steps taken; set with the states from a checkpoint.
        states: all there is to save in addition to the number of steps.
        rounds: whether a step also rounds the weights of what this rank owns; `start_gathering` must know.
    """

    def __init__(self, shards: ZeroShards, config: OptimConfig, *, rounds: bool | None = None) -> None:
        """Set up zero moments and momenta.

        By default bf16 weights on a GPU are rounded by the kernels that update the masters, which saves a pass
        over both: in place the flat share's, and on one rank those of the matrices; on several ranks the
        matrices' to where they are packed for the others.
        """
        self.steps = 0
        on_gpu = shards.weights.device.type == "cuda" and shards.weights.dtype == torch.bfloat16
        self.rounds = on_gpu if rounds is None else rounds
        share = shards.layout.flat_share
        master, gradient = shards.master, shards.master_gradient
        flat = [extent for extent in shards.extents if extent.offset_in_chunk < share]
        decays = {row.name: row.decay for row in shards.table}
        flat_weights = shards.flat_weights if self.rounds else None
        self._adamw = AdamW(master[:share], gradient[:share], flat, decays, config, flat_weights)
        momentum = torch.zeros_like(master[share:])
        batches = []
        for batch in shards.layout.batches(shards.position):
            full_batch = MatrixBatch(
                master_KMN=matrices_of(master, batch),
                gradient_KMN=matrices_of(gradient, batch),
                momentum_KMN=matrices_of(momentum, batch, start=share),
            )
            if not self.rounds:
                batches.append(full_batch)
            elif shards.world_size > 1:
                batches.append(replace(full_batch, pieces=shards.packed_weights(batch)))
            else:
                batches += _with_weights(full_batch, shards.matrix_weights(batch))
        self._muon = Muon(batches, config.muon, config.weight_decay)
        self.states: tuple[OwnedState, ...] = (
            OwnedState(MASTER, 0, master),
            *(OwnedState(name, 0, moment) for name, moment in self._adamw.moments.items()),
            OwnedState(MOMENTUM, share, momentum),
        )

    def step(self, lr: float) -> None:
        """Update the master weights from the reduced gradient; see `rounds` for the weights."""
        self._adamw.step(lr, self.steps)
        self._muon.step(lr)
        self.steps += 1


def matrices_of(values: Tensor, batch: Batch, *, start: int = 0) -> Tensor:
    """Return the matrices [K, m, n] of a batch.

    A strided view of `values`, elements of a chunk from `start` on.
    """
    shape = (batch.count, batch.rows, batch.columns)
    first = values.storage_offset() + batch.offset - start
    return values.as_strided(shape, (batch.stride, batch.columns, 1), first)


def _with_weights(batch: MatrixBatch, weights: list[Tensor]) -> list[MatrixBatch]:
    """Cut a batch into one for each tensor of weights."""
    parts, start = [], 0
    for weight_KMN in weights:
        stop = start + len(weight_KMN)
        parts.append(replace(batch.part(start, stop), weight_KMN=weight_KMN))
        start = stop
    return parts
