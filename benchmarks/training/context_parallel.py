"""What sharing a sequence costs and saves: an attention stage on one rank against 2 and 4, by ring and all-gather.

One stage of compressed convolutional attention with the head ratios of ZAYA1 (8 query and 2 key heads), forward
and backward, one sequence in fp32, one thread a rank. In the same processes, turn by turn: rank 0 alone computes
the whole sequence while the others wait, then all share it both ways. Besides the times: bytes that autograd
keeps, bytes sent, the time in which a rank waited for an exchange, and what the same exchanges take with nothing
to compute: one less their ratio is the share that was hidden, or 0 where a rank waited for a late peer for longer.

gloo moves bytes on the cores that compute, and four ranks on two cores cannot be four times as fast: read the
ratio of ring to all-gather and the memory, and the speed-up beside `cores`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import alternate, ratio, write_result
from tests.train.ranks import in_group
from zslurm.train.config import ModelConfig
from zslurm.train.context.context_parallel import ContextParallel, Pending
from zslurm.train.context.gather import GatheredKeys
from zslurm.train.context.key_parts import KeyExchange
from zslurm.train.context.layout import reach
from zslurm.train.context.ring import RingOfKeys
from zslurm.train.model.attention import CompressedConvolutionalAttention
from zslurm.train.model.packing import Packing, pack
from zslurm.train.model.zaya import build

MODEL = ModelConfig(
    vocab_size=64, hidden_size=512, layers=1, query_heads=8, kv_heads=2, head_dim=32, expert_hidden_size=64
)
RANKS = (2, 4)
LENGTHS = (1024, 4096, 8192)
RUNS = 3


@dataclass(frozen=True)
class Waits(ContextParallel):
    """Ranks whose waits for each other are timed."""

    waited: list[float] = field(init=False, default_factory=list)

    def start_shift(self, *tensors: Tensor) -> Pending:
        return self._timed(super().start_shift(*tensors))

    def start_all_gather(self, part: Tensor) -> Pending:
        return self._timed(super().start_all_gather(part))

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        started = time.perf_counter()
        part = super().reduce_scatter(whole)
        self.waited.append(time.perf_counter() - started)
        return part

    def _timed(self, pending: Pending) -> Pending:
        return Pending([_Work(work, self.waited) for work in pending.works], *pending[1:])  # type: ignore[misc]


class _Work:
    def __init__(self, work: dist.Work, waited: list[float]) -> None:
        self._work, self._waited = work, waited

    def wait(self) -> None:
        started = time.perf_counter()
        self._work.wait()
        self._waited.append(time.perf_counter() - started)


class Stage:
    """An attention stage on a sequence of some length."""

    def __init__(self, length: int, context: ContextParallel) -> None:
        attention = build(MODEL, 1, dtype=torch.float32).layers[0].attention
        assert isinstance(attention, CompressedConvolutionalAttention)
        self.attention, self.context = attention, context
        generator = torch.Generator().manual_seed(1)
        whole_BSD = torch.randn(1, length, MODEL.hidden_size, generator=generator)
        self.x_BSD = context.take(whole_BSD).requires_grad_()
        self.packing: Packing = pack(
            torch.arange(length),
            rotary_dim=MODEL.rotary_dim,
            rope_base=1e4,
            reach=reach(MODEL),
            dtype=torch.float32,
            context=context,
        )

    def run(self) -> None:
        """Forward and backward."""
        self.attention(self.x_BSD, self.packing).square().sum().backward()

    def kept(self) -> int:
        """Return the bytes that autograd keeps, beside weights and the input."""
        known = {x.untyped_storage().data_ptr() for x in (self.x_BSD, *self.attention.parameters())}
        storages: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            self.run()
        return sum(size for pointer, size in storages.items() if pointer not in known)


def communicate(context: ContextParallel, length: int) -> None:
    """Make the exchanges of keys, values and their gradients of one forward and backward, and compute nothing."""
    shape = (2, 1, MODEL.kv_heads, length // context.size, MODEL.head_dim)
    for backward in (False, True):
        kv_2BJSP = torch.zeros(shape)
        exchange: KeyExchange = GatheredKeys(context, kv_2BJSP)
        if context.attention == "ring":
            exchange = RingOfKeys(context, kv_2BJSP, backward=backward)
        for part in exchange.parts():
            if backward:
                exchange.add(part, torch.zeros_like(part.kv_2BJSP))
        if backward:
            exchange.gradient()


def measured(group: dist.ProcessGroup, runs: int) -> list[dict[str, Any]]:
    """Time and memory of one length after the other, as this rank sees them."""
    alone, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(group.size())])
    return [_at(group, alone, length, runs) for length in LENGTHS]


def _at(group: dist.ProcessGroup, alone: dist.ProcessGroup, length: int, runs: int) -> dict[str, Any]:
    ways: tuple[Literal["ring", "all_gather"], ...] = ("ring", "all_gather")
    shared = {way: Stage(length, Waits(group, way)) for way in ways}
    one = Stage(length, ContextParallel(alone)) if group.rank() == 0 else None

    def alone_run() -> None:
        if one is not None:
            one.run()
        dist.barrier(group)

    def shared_run(way: str) -> None:
        shared[way].run()
        dist.barrier(group)

    def exchanges(way: Literal["ring", "all_gather"]) -> None:
        communicate(ContextParallel(group, way), length)
        dist.barrier(group)

    contenders: dict[str, Callable[[], None]] = {"one_rank": alone_run}
    for way in ways:
        contenders[way] = partial(shared_run, way)
        contenders[f"{way}_communication"] = partial(exchanges, way)
    timings = alternate(contenders, runs=runs)
    found: dict[str, Any] = {
        "tokens": length,
        "ring_over_all_gather": ratio(timings["ring"], timings["all_gather"]),
        "speed_up_over_one_rank": {way: ratio(timings["one_rank"], timings[way]) for way in ways},
        "kept_over_one_rank": {},
        "communication_alone_over_stage": {},
        "waited_over_stage": {},
        "communication_hidden": {},
        "sent_mib": {},
        "timings": [timing.row() for timing in timings.values()],
    }
    for way in ways:
        context = shared[way].context
        assert isinstance(context, Waits)
        waited = sum(context.waited) / (runs + 1)
        communication, stage = timings[f"{way}_communication"].median, timings[way].median
        found["communication_alone_over_stage"][way] = round(communication / stage, 4)
        found["waited_over_stage"][way] = round(waited / stage, 4)
        found["communication_hidden"][way] = round(max(0.0, 1 - waited / communication), 3)
        found["sent_mib"][way] = round(sum(context.sent.values()) / (runs + 1) / 2**20, 3)
        kept = shared[way].kept()
        if one is not None:
            found["kept_over_one_rank"][way] = round(kept / one.kept(), 4)
    return found


def run() -> None:
    """Measure and write results/context_parallel.json."""
    write_result(
        "context_parallel",
        {
            "torch": torch.__version__,
            "heads": [MODEL.query_heads, MODEL.kv_heads],
            "head_dim": MODEL.head_dim,
            "rank_0": {str(ranks): in_group(measured, ranks, RUNS)[0] for ranks in RANKS},
        },
    )
