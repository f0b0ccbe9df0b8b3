"""What a run asks of its storage, from its own numbers and the time of a step: the model of arXiv 2511.17127 (II).

    pages per step        n = sigma G s b / P
    operations a second   n / t
    break-even time       n / B

with G sequences of s tokens in a step, b bytes a token, pages of P bytes, t seconds a step, and a storage that
gives B pages a second: steps that are shorter than the break-even time wait for it. sigma is how
many times the pages are touched that the tokens would fill: 1 to 2 for bundled data, 2 to 8 for fragmented ones.
Published for ZAYA1: G = s = 4,096, b = 4, P = 4,096 and t = 2.5 s give 64 MiB, 16,384 pages and 6,554 sigma
operations a second, of 70,000 that the storage gives: a break-even time of 0.234 s for sigma 1.

sigma of our bundles follows from their layout. A sequence is one piece of (s + 1) b bytes, and pieces begin at
multiples of s b bytes: whatever s is, that touches 1 + s b / P pages on average, so sigma = 1 + P / (s b). It is
1.25 for ZAYA1. The loader asks for these pages and no others (Bundle.scattered), those of many sequences at once:
if the storage counts requests and not pages, there are G / t of them a second.

A checkpoint holds fp32 masters and the optimizer's state: 4 bytes a parameter, and 4 more for Muon's momentum or 8
more for AdamW's two moments (twice as much for fp64 models). A save must be written before the next one begins, or
training waits. What is left out: evaluation, exports, and resuming.
"""

from __future__ import annotations

from dataclasses import dataclass

from zslurm.train.config import TrainConfig
from zslurm.train.data.schema import BundleHeader
from zslurm.train.shapes import owned_table

PAGE_BYTES = 4096
PUBLISHED_BUDGET = 70_000
"""Operations a second that the storage of ZAYA1's cluster gave."""


@dataclass(frozen=True)
class Reads:
    """What a step of `step_time` seconds reads."""

    global_batch: int
    context: int
    token_bytes: int
    step_time: float

    @property
    def bytes(self) -> int:
        """Return the bytes of the step's tokens."""
        return self.global_batch * self.context * self.token_bytes

    @property
    def sigma(self) -> float:
        """Return sigma for our bundles."""
        return 1 + PAGE_BYTES / (self.context * self.token_bytes)

    def pages(self, sigma: float) -> float:
        """Return the pages that a step touches."""
        return sigma * self.bytes / PAGE_BYTES

    def iops(self, sigma: float) -> float:
        """Return the pages that are touched in a second."""
        return self.pages(sigma) / self.step_time

    def break_even(self, sigma: float, budget: float) -> float:
        """Return the seconds of the shortest step that a storage of `budget` pages a second can feed."""
        return self.pages(sigma) / budget

    def margin(self, sigma: float, budget: float) -> float:
        """Return how many times the break-even time a step takes; below 1 training waits for the storage."""
        return self.step_time / self.break_even(sigma, budget)


@dataclass(frozen=True)
class CheckpointWrites:
    """Bytes of a checkpoint that `ranks` write together every `every_s` seconds."""

    bytes: int
    every_s: float
    ranks: int

    @property
    def rate(self) -> float:
        """Bytes a second, all ranks together, at which a checkpoint is written just before the next one begins."""
        return self.bytes / self.every_s


@dataclass(frozen=True)
class StoragePlan:
    """What a run asks of its storage: reads of each phase, at its largest batch, and checkpoints."""

    reads: tuple[Reads, ...]
    saves: CheckpointWrites


def plan_storage(run: TrainConfig, *, step_time: float, ranks: int) -> StoragePlan:
    """Return reads and checkpoints of a run on a number of ranks, with steps of `step_time` seconds."""
    token_bytes = BundleHeader(run.model.vocab_size, "", 0).token_dtype.itemsize
    reads = tuple(
        Reads(max(segment.global_batch for segment in phase.segments), phase.context, token_bytes, step_time)
        for phase in run.phases
    )
    saves = CheckpointWrites(checkpoint_bytes(run), run.checkpoint.every_steps * step_time, ranks)
    return StoragePlan(reads, saves)


def checkpoint_bytes(run: TrainConfig) -> int:
    """Return the bytes of one checkpoint's tensors; headers and the manifest are not counted."""
    itemsize = 8 if run.parallel.dtype == "fp64" else 4
    return sum(row.numel * itemsize * (2 if row.whole else 3) for row in owned_table(run.model, run.optim))
