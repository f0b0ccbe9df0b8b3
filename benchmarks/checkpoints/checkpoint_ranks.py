"""Saving with four ranks: the part of the checkpoint benchmark that runs in every rank.

State as ZeRO-1 has it: three flat fp32 arrays per rank. The contenders save the same arrays:

    gather        to rank 0, torch.save, fsync: what there is without any of this
    dcp           torch.distributed.checkpoint.save
    dcp_async     its async_save, as its defaults are; the save before is waited for first
    ours          zslurm.train.checkpointing.writer: staging, and a thread per rank
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from zslurm.checkpoint_tools import Checkpoint, Entry, Manifest, ShardReport, Tensor, assemble
from zslurm.train.checkpointing.snapshot import HostSnapshot
from zslurm.train.checkpointing.writer import CheckpointWriter, SaveRequest, SaveState

STATES = ("master", "exp_avg", "exp_avg_sq")
COMPUTE_SIZE = 512


@dataclass(frozen=True)
class Settings:
    """What is measured: elements of each state on each rank, repetitions, and the loop."""

    elements: int
    runs: int
    steps: int
    save_at: tuple[int, ...]
    products: int


class Bench:
    """One rank."""

    def __init__(self, rank: int, ranks: int, port: int, root: Path, settings: Settings) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks, self.root, self.settings = rank, ranks, root, settings
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group("gloo", store=dist.PrefixStore("pg", store), rank=rank, world_size=ranks)
        self.background = dist.new_group(backend="gloo")  # async_save's collectives must not meet the loop's
        generator = torch.Generator().manual_seed(rank)
        self.live = {name: torch.randn(settings.elements, generator=generator) for name in STATES}
        self.snapshot = HostSnapshot(self.live)
        root.mkdir(parents=True, exist_ok=True)
        connection = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.writer = CheckpointWriter(
            root / "ours", connection, rank, ranks, self.snapshot, self._entries, self._manifest,
            nonce="bench", timeout_s=600,
        )  # fmt: skip
        self.saves = 0
        self.future: Future[Any] | None = None
        self.a, self.b = torch.randn(COMPUTE_SIZE, COMPUTE_SIZE), torch.randn(COMPUTE_SIZE, COMPUTE_SIZE)

    @property
    def bytes(self) -> int:
        """Bytes of one checkpoint, over all ranks."""
        return self.ranks * len(STATES) * self.settings.elements * 4

    # ------------------------------------------------------------- contenders

    def gather(self) -> None:
        whole = {}
        for name, mine in self.live.items():
            parts = [torch.empty_like(mine) for _ in range(self.ranks)] if self.rank == 0 else None
            dist.gather(mine, parts)
            if parts is not None:
                whole[name] = torch.cat(parts)
        if self.rank == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            with (self.root / "gathered.pt").open("wb") as file:
                torch.save(whole, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def dcp(self) -> None:
        dcp.save(self._keyed(), checkpoint_id=self._fresh("dcp"))

    def dcp_async(self) -> None:
        if self.future is not None:
            self.future.result()
        answer = dcp.async_save(self._keyed(), checkpoint_id=self._fresh("dcp"), process_group=self.background)
        assert isinstance(answer, Future)
        self.future = answer

    def ours(self) -> None:
        self.writer.finish()
        self.saves += 1
        self.writer.request(SaveRequest(self.saves, 0, {}, {}, []))

    def settle(self) -> None:
        """Wait for the save in the background, and remove what was saved."""
        if self.future is not None:
            self.future.result()
            self.future = None
        self.writer.finish()
        failed = [reached.reason for reached in self.writer.poll() if reached.state is SaveState.FAILED]
        assert not failed, failed
        dist.barrier()
        if self.rank == 0:
            for path in self.root.iterdir():  # the directory itself stays: a run that loses it saves no more
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()

    # ----------------------------------------------------------- measurements

    def compute(self) -> None:
        """Simulate a forward and backward pass."""
        for _ in range(self.settings.products):
            torch.mm(self.a, self.b)

    def stall(self, save: Callable[[], None]) -> float:
        """Seconds that one save keeps the loop from continuing, a forward and backward pass after it included."""
        dist.barrier()
        started = time.perf_counter()
        save()
        blocked = time.perf_counter() - started
        self.compute()
        return self._slowest(blocked + self.writer.wait_for_snapshot())

    def loop(self, save: Callable[[], None] | None) -> tuple[float, float]:
        """Wall seconds of the loop, and how many of them it was blocked by saves.

        As in a training run, a save that is due while another one is under way on any rank waits for a later step.
        """
        blocked, due = 0.0, 0
        dist.barrier()
        began = time.perf_counter()
        for step in range(self.settings.steps):
            self.compute()
            blocked += self.writer.wait_for_snapshot()  # before the update
            busy = torch.tensor(float(self.writer.busy))
            dist.all_reduce(busy)
            due += step in self.settings.save_at
            if save is not None and due and not busy:
                due -= 1
                started = time.perf_counter()
                save()
                blocked += time.perf_counter() - started
        assert save is None or not due, "a save was put off to the end"
        dist.barrier()
        return time.perf_counter() - began, self._slowest(blocked)

    def whole_save(self) -> float:
        """Seconds from the request to the commit, nothing else going on."""
        dist.barrier()
        started = time.perf_counter()
        self.ours()
        self.writer.wait_for_snapshot()
        self.writer.finish()
        return self._slowest(time.perf_counter() - started)

    def load_ours(self, path: Path, local: Path | None = None) -> float:
        """Seconds until every rank has read its own state."""
        dist.barrier()
        started = time.perf_counter()
        with Checkpoint.open(path, check_files=self.rank == 0, local=local) as checkpoint:
            for name in STATES:
                first = self.rank * self.settings.elements
                array = self.live[name].numpy()
                checkpoint.read("flat", name, first, first + array.size, array)
        return self._slowest(time.perf_counter() - started)

    def load_dcp(self, path: Path) -> float:
        """The same with dcp.load."""
        dist.barrier()
        started = time.perf_counter()
        dcp.load(self._keyed(), checkpoint_id=path)
        return self._slowest(time.perf_counter() - started)

    def _slowest(self, seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def _keyed(self) -> dict[str, torch.Tensor]:
        return {f"{self.rank}.{name}": tensor for name, tensor in self.live.items()}

    def _fresh(self, name: str) -> Path:
        self.saves += 1
        return self.root / f"{name}-{self.saves}"

    def _entries(self) -> list[Entry]:
        first = self.rank * self.settings.elements
        return [
            Entry("flat", name, first, first + array.size, array) for name, array in self.snapshot.arrays.items()
        ]

    def _manifest(self, request: SaveRequest, reports: list[ShardReport]) -> Manifest:
        table = [Tensor("flat", (self.ranks * self.settings.elements,), dict.fromkeys(STATES, "F32"))]
        return assemble(reports, step=request.step, tokens=0, model={}, cursor={}, state={}, tensors=table)


def measure(rank: int, ranks: int, port: int, root: Path, settings: Settings, answer: Any) -> None:
    """Everything that four ranks measure in one directory; rank 0 puts the figures into `answer`."""
    bench = Bench(rank, ranks, port, root, settings)
    saves = {"gather": bench.gather, "dcp": bench.dcp, "dcp_async": bench.dcp_async, "ours": bench.ours}
    stalls: dict[str, list[float]] = {name: [] for name in saves}
    wholes: list[float] = []
    for turn in range(settings.runs + 1):
        for name, save in saves.items():
            seconds = bench.stall(save)
            bench.settle()
            if turn:
                stalls[name].append(seconds)
        seconds = bench.whole_save()
        bench.settle()
        if turn:
            wholes.append(seconds)
    loops: dict[str, list[tuple[float, float]]] = {"nothing": [], "ours": [], "dcp_async": []}
    for _ in range(settings.runs):
        for name in loops:
            loops[name].append(bench.loop(saves.get(name)))
            bench.settle()
    loads = _loads(bench)
    bench.writer.close()
    if rank == 0:
        saved = bench.bytes * len(settings.save_at) / 1e9
        plain = statistics.median(wall for wall, _ in loops["nothing"])
        answer.put(
            {
                "bytes": bench.bytes,
                "stall_s": {name: round(statistics.median(times), 4) for name, times in stalls.items()},
                "whole_save_s": round(statistics.median(wholes), 3),
                "loop": {
                    name: {
                        "wall_s": round(statistics.median(wall for wall, _ in times), 2),
                        "blocked_s": round(statistics.median(blocked for _, blocked in times), 3),
                        "wall_lost_s_per_gb": round(
                            (statistics.median(wall for wall, _ in times) - plain) / saved, 3
                        ),
                        "blocked_s_per_gb": round(statistics.median(b for _, b in times) / saved, 3),
                    }
                    for name, times in loops.items()
                },
                "load_s": loads,
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def _loads(bench: Bench) -> dict[str, float]:
    times: dict[str, list[float]] = {"ours": [], "dcp": []}
    bench.ours()
    bench.writer.wait_for_snapshot()
    bench.writer.finish()
    dcp_path = bench.root / "dcp-load"
    dcp.save(bench._keyed(), checkpoint_id=dcp_path)
    path = bench.root / "ours" / f"step-{bench.saves:08d}"
    for turn in range(bench.settings.runs + 1):
        for name, seconds in (("ours", bench.load_ours(path)), ("dcp", bench.load_dcp(dcp_path))):
            if turn:
                times[name].append(seconds)
    bench.settle()
    return {name: round(statistics.median(seconds), 4) for name, seconds in times.items()}
