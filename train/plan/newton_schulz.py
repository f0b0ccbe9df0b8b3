"""The Newton-Schulz steps of Muon (train/optim/newton_schulz.py) as a list of matrices, without torch.

A step of a matrix with sides s <= l is X X^T (2 s^2 l), its square (2 s^3) and a product with X (2 s^2 l). The
products are made in `optim.muon.dtype`, bf16 by default whatever `parallel.dtype` is, so they have rates apart
from those of forward and backward: an fp32 run on a processor with bf16 units makes them several times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zslurm.train.config import TrainConfig
from zslurm.train.optim.workspace import matrices_at_once, update_bytes
from zslurm.train.parallel.memory import ITEMSIZE
from zslurm.train.shapes import owned_table

KIND = "newton_schulz"
"""Of rows in results of `zslurm bench gemm`: of M x N matrices, in K steps, `batch` of them in a call."""


@dataclass(frozen=True)
class MuonMatrices:
    """All matrices of one shape.

    Attributes:
        rows, columns: of each.
        count: in the whole model.
        steps: of Newton-Schulz.
        dtype: in which they are multiplied.
    """

    rows: int
    columns: int
    count: int
    steps: int
    dtype: Literal["bf16", "fp32", "fp64"]

    @property
    def flops(self) -> float:
        """Return the FLOPs of one matrix."""
        short, long = sorted((self.rows, self.columns))
        return self.steps * (4.0 * short**2 * long + 2.0 * short**3)

    def in_a_call(self, device: str) -> int:
        """Return how many of them one rank with all of them works on together."""
        master = "fp64" if self.dtype == "fp64" else "fp32"
        bytes_of_matrix = update_bytes(self.rows, self.columns, ITEMSIZE[self.dtype], ITEMSIZE[master])
        return min(self.count, matrices_at_once(bytes_of_matrix, device))


def matrix_batches(config: TrainConfig) -> list[MuonMatrices]:
    """Return the matrices that Muon trains, by shape; none if AdamW trains all."""
    muon = config.optim.muon
    dtype: Literal["bf16", "fp32", "fp64"] = "fp64" if config.parallel.dtype == "fp64" else muon.dtype
    counts: dict[tuple[int, int], int] = {}
    for row in owned_table(config.model, config.optim):
        if row.whole and row.matrices:
            count, rows, columns = row.matrices
            shape = rows * count // row.whole, columns  # gate and up rows may be a matrix each
            counts[shape] = counts.get(shape, 0) + row.whole
    return [MuonMatrices(*shape, count, muon.steps, dtype) for shape, count in counts.items()]
