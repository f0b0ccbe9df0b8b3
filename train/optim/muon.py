"""Muon: momentum, orthogonalised by Newton-Schulz steps, for matrices that this rank owns whole.

    M <- mu M + (1 - mu) G                 momentum, in the masters' format
    U  = (1 - mu) G + mu M  (or M)         Nesterov's look ahead
    O  = NewtonSchulz(U)                   see newton_schulz.py
    W <- (1 - lr wd) W - lr scale O        decay with the bare learning rate, as in torch.optim.Muon

scale is 0.2 sqrt(max(m, n)), so that a step is as long as one of AdamW's and its learning rates fit (arXiv
2502.16982), or Keller Jordan's sqrt(max(1, m / n)). Matrices have their own learning rate, lr_factor times the
schedule's. torch.optim.Muon does the same, one matrix at a time; on a CPU that multiplies bf16 through oneDNN the
results are equal bit by bit.

Matrices of one shape are worked on together, whichever batch they came in, within the temporary memory that
workspace.py states. Per parameter a step reads G, M and W and writes M and W (20 bytes in fp32), besides what
stays in that memory. There is no state but the momentum, which the caller owns.

What a matrix is was decided before: with muon.split_gate_up, `train.shapes.owned_table` makes the gate rows and
the up rows of an expert two matrices, each with the scale of its own shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zslurm.kernels import muon as kernel
from zslurm.train.config import MuonConfig
from zslurm.train.optim.newton_schulz import coefficient_schedule, orthogonalise_
from zslurm.train.optim.workspace import matrices_at_once, update_bytes

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class MatrixBatch:
    """K matrices of one shape: views of master weights, gradients and momentum.

    All three are [K, M, N] of one floating-point format (fp32, or fp64 for exactness); each may have strides of
    its own. A step changes master and momentum and leaves the gradient alone. If the model's weights are given,
    [K, M, N] in any format, they are rounded from the masters in the pass that updates these; or where they are in
    pieces, those of each matrix in the order of its elements.
    """

    master_KMN: Tensor
    gradient_KMN: Tensor
    momentum_KMN: Tensor
    weight_KMN: Tensor | None = None
    pieces: tuple[tuple[Tensor, ...], ...] | None = None

    def __post_init__(self) -> None:
        tensors = (self.master_KMN, self.gradient_KMN, self.momentum_KMN)
        if self.master_KMN.dim() != 3 or len({tensor.shape for tensor in tensors}) > 1:
            raise ValueError(f"expected three [K, M, N] of one shape, got {[tuple(t.shape) for t in tensors]}")
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(f"expected one format, got {[t.dtype for t in tensors]}")

    @property
    def count(self) -> int:
        """Return how many matrices there are."""
        return self.master_KMN.shape[0]

    def part(self, start: int, stop: int) -> MatrixBatch:
        """Return the matrices from `start` on, before `stop`."""
        cut = slice(start, stop)
        weight_KMN = None if self.weight_KMN is None else self.weight_KMN[cut]
        return MatrixBatch(
            self.master_KMN[cut],
            self.gradient_KMN[cut],
            self.momentum_KMN[cut],
            weight_KMN,
            None if self.pieces is None else self.pieces[cut],
        )


class Muon:
    """Muon over batches of matrices. The caller owns all tensors, and clips and reduces the gradients."""

    def __init__(self, batches: Iterable[MatrixBatch], config: MuonConfig, weight_decay: float) -> None:
        """Arrange the work on `batches`, whose views are kept; allocates nothing. The decay is decoupled."""
        self.config, self._weight_decay = config, weight_decay
        self._schedule = coefficient_schedule(config.coefficients, config.steps)
        self._chunks = [_Chunk(parts, config) for parts in _arrange(batches, config)]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update momentum and master weights from the gradients; `lr` is the schedule's learning rate."""
        lr *= self.config.lr_factor
        for chunk in self._chunks:
            x_KMN, norms_K = chunk.momentum_step(self.config.momentum, self.config.nesterov)
            orthogonalise_(x_KMN, self._schedule, norms_K=norms_K)
            chunk.apply(x_KMN, decay=1 - lr * self._weight_decay, rate=lr * chunk.scale)


class _Chunk:
    """Matrices of one shape that are worked on together, from one or more batches."""

    def __init__(self, parts: Sequence[MatrixBatch], config: MuonConfig) -> None:
        self.masters = [batch.master_KMN for batch in parts]
        self.gradients = [batch.gradient_KMN for batch in parts]
        self.momenta = [batch.momentum_KMN for batch in parts]
        weights = [batch.weight_KMN for batch in parts if batch.weight_KMN is not None]
        if weights and len(weights) < len(parts):
            raise ValueError("expected the weights of all batches of a shape, or of none")
        self.weights = weights or None
        pieces = [batch.pieces for batch in parts if batch.pieces is not None]
        if pieces and (weights or len(pieces) < len(parts)):
            raise ValueError("expected the pieces of all batches of a shape, or of none")
        self.pieces = [piece for batch in pieces for matrix in batch for piece in matrix] or None
        self.count = sum(batch.count for batch in parts)
        self.dtype = _product_dtype(parts[0], config)
        self.shape = parts[0].master_KMN.shape[1:]
        self.scale = _scale(self.shape[0], self.shape[1], config)

    def momentum_step(self, mu: float, nesterov: bool) -> tuple[Tensor, Tensor]:
        """Update the momentum; return what is to be orthogonalised, in the products' format, and its norms."""
        x_KMN = torch.empty((self.count, *self.shape), dtype=self.dtype, device=self.masters[0].device)
        return x_KMN, kernel.momentum(self.momenta, self.gradients, x_KMN, mu=mu, nesterov=nesterov)

    def apply(self, x_KMN: Tensor, *, decay: float, rate: float) -> None:
        """Decay the masters, take a step of `rate` against x, and round the weights if there are any."""
        kernel.update(self.masters, x_KMN, decay=decay, rate=rate, weights=self.weights, pieces=self.pieces)


def _arrange(batches: Iterable[MatrixBatch], config: MuonConfig) -> list[list[MatrixBatch]]:
    """Cut the batches into chunks: matrices of one shape, in order, as many as may be worked on together."""
    by_shape: dict[torch.Size, list[MatrixBatch]] = {}
    for batch in batches:
        if batch.master_KMN.numel():
            by_shape.setdefault(batch.master_KMN.shape[1:], []).append(batch)
    return [chunk for parts in by_shape.values() for chunk in _chunks(parts, config)]


def _chunks(parts: list[MatrixBatch], config: MuonConfig) -> list[list[MatrixBatch]]:
    master = parts[0].master_KMN
    itemsize = _product_dtype(parts[0], config).itemsize
    bytes_of_matrix = update_bytes(master.shape[1], master.shape[2], itemsize, master.dtype.itemsize)
    limit = matrices_at_once(bytes_of_matrix, master.device.type)
    chunks: list[list[MatrixBatch]] = []
    room = 0
    for batch in parts:
        start = 0
        while start < batch.count:
            if not room:
                chunks.append([])
                room = limit
            stop = min(batch.count, start + room)
            chunks[-1].append(batch.part(start, stop))
            room -= stop - start
            start = stop
    return chunks


def _product_dtype(batch: MatrixBatch, config: MuonConfig) -> torch.dtype:
    exact = batch.master_KMN.dtype == torch.float64
    return torch.float64 if exact else _DTYPES[config.dtype]


def _scale(rows: int, columns: int, config: MuonConfig) -> float:
    """Return what the learning rate is multiplied by for matrices of this shape."""
    if config.scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
