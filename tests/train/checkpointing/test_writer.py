"""Saving in the background: states in order, no waiting for a disk, and every rank hears of a failure."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from tests.waiting import wait_for
from zslurm.checkpoint_tools import (
    BufferEntry,
    Checkpoint,
    Entry,
    Manifest,
    NoSpace,
    ShardReport,
    Tensor,
    assemble,
    list_checkpoints,
    write_shard,
)
from zslurm.train.checkpointing import writer as writer_module
from zslurm.train.checkpointing.snapshot import HostSnapshot, snapshot_bytes
from zslurm.train.checkpointing.writer import CheckpointWriter, Hooks, Reached, SaveRequest, SaveState
from zslurm.train.niceness import BACKGROUND

TABLE = [Tensor("w", (6,), {"master": "F32"})]
IN_ORDER = [SaveState.REQUESTED, SaveState.STAGED, SaveState.WRITTEN, SaveState.COMMITTED]


class Remembered(Hooks):
    """What was called, and for which step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def written(self, request: SaveRequest, report: ShardReport) -> None:
        self.calls.append(("written", request.step))

    def retain(self, request: SaveRequest) -> None:
        self.calls.append(("retain", request.step))

    def committed(self, request: SaveRequest) -> None:
        self.calls.append(("committed", request.step))


class Rank:
    """A rank without a trainer: three of the six elements of `w`."""

    def __init__(
        self,
        root: Path,
        store: dist.Store,
        rank: int,
        ranks: int = 2,
        timeout_s: float = 30.0,
        rescue: Path | None = None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        share = 6 // ranks
        self.start = rank * share
        self.live = torch.arange(self.start, self.start + share, dtype=torch.float32)
        self.snapshot = HostSnapshot({"master": self.live})
        self.hooks = Remembered()
        self.writer = CheckpointWriter(
            root,
            store,
            rank,
            ranks,
            self.snapshot,
            self.entries,
            self.manifest,
            nonce="attempt1",
            timeout_s=timeout_s,
            hooks=self.hooks,
            rescue=rescue,
        )

    def entries(self) -> list[Entry]:
        array = self.snapshot.arrays["master"]
        return [Entry("w", "master", self.start, self.start + array.size, array)]

    def manifest(self, request: SaveRequest, reports: list[ShardReport]) -> Manifest:
        names = [f"rng/{rank}" for rank in range(self.ranks)]
        return assemble(
            reports, step=request.step, tokens=0, model={}, cursor={}, state={}, tensors=TABLE, buffers=names
        )

    def request(self, step: int) -> None:
        buffers = [BufferEntry(f"rng/{self.rank}", np.zeros(2, np.uint8))]
        self.writer.request(SaveRequest(step, 0, {}, {}, buffers))

    def result(self) -> Reached:
        self.writer.finish()
        return self.writer.poll()[-1]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., list[Rank]]]:
    made: list[Rank] = []

    def make_them(ranks: int = 2, **options: Any) -> list[Rank]:
        store = dist.HashStore()
        made.extend(Rank(tmp_path / "checkpoints", store, rank, ranks, **options) for rank in range(ranks))
        return made

    yield make_them
    for rank in made:
        rank.writer.close()


def content(path: Path) -> list[float]:
    out = np.empty(6, np.float32)
    with Checkpoint.open(path) as checkpoint:
        checkpoint.read("w", "master", 0, 6, out)
    return list(out)


def test_a_save_goes_through_its_states_on_every_rank(make: Callable[..., list[Rank]]) -> None:
    ranks = make()
    for rank in ranks:
        rank.request(10)
    for rank in ranks:
        rank.writer.finish()
        seen = rank.writer.poll()
        assert [reached.state for reached in seen] == IN_ORDER
        assert [reached.seconds for reached in seen] == sorted(reached.seconds for reached in seen)
        assert seen[1].bytes == 12
        assert seen[3].path is not None
        assert content(seen[3].path) == [0, 1, 2, 3, 4, 5]
        assert seen[3].bytes == sum(file.stat().st_size for file in seen[3].path.glob("shard-*"))
        assert rank.writer.poll() == []
    assert ranks[0].hooks.calls == [("written", 10), ("retain", 10), ("committed", 10)]
    assert ranks[1].hooks.calls == [("written", 10), ("committed", 10)]


def test_what_is_saved_is_what_was_there_at_the_request(make: Callable[..., list[Rank]]) -> None:
    (rank,) = make(1)
    for step in (1, 2, 3):
        rank.live.fill_(step)
        rank.request(step)
        rank.writer.wait_for_snapshot()
        rank.live.fill_(99)
        path = rank.result().path
        assert path is not None
        assert content(path) == [step] * 6


def test_a_slow_disk_holds_up_neither_the_request_nor_the_update(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    real = os.fsync
    (rank,) = make(1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (disk.wait(), real(descriptor))[1])
    rank.request(1)
    rank.writer.wait_for_snapshot()
    rank.live.fill_(7)
    assert rank.writer.busy
    assert rank.writer.busy_s > 0
    states = [reached.state for reached in rank.writer.poll()]
    assert SaveState.WRITTEN not in states
    disk.set()
    assert rank.result().state is SaveState.COMMITTED
    assert not rank.writer.busy
    assert rank.writer.busy_s == 0


def test_the_thread_writes_at_low_priority_and_the_trainer_does_not(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    real = write_shard

    def watched(*arguments: Any) -> ShardReport:
        thread = threading.get_native_id()
        found.append((os.getpriority(os.PRIO_PROCESS, thread), psutil.Process(thread).ionice()))
        return real(*arguments)

    monkeypatch.setattr(writer_module, "write_shard", watched)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    (rank,) = make(1)
    rank.request(1)
    assert rank.result().state is SaveState.COMMITTED
    ((niceness, io),) = found
    assert niceness == BACKGROUND
    assert (io.ioclass, io.value) == (psutil.IOPRIO_CLASS_BE, 7)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_rank_that_cannot_write_is_heard_by_all_and_the_next_save_works(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = make()
    for rank in ranks:
        rank.request(1)
    assert [rank.result().state for rank in ranks] == [SaveState.COMMITTED] * 2
    real = write_shard

    def full(directory: Path, rank: int, *rest: Any) -> ShardReport:
        if rank == 1:
            raise NoSpace("the disk is full")
        return real(directory, rank, *rest)

    monkeypatch.setattr(writer_module, "write_shard", full)
    for rank in ranks:
        rank.request(2)
    for rank in ranks:
        result = rank.result()
        assert result.state is SaveState.FAILED
        assert result.reason == "the disk is full; a checkpoint needs about 24 B"
    assert [found.step for found in list_checkpoints(tmp_path / "checkpoints")] == [1]
    monkeypatch.undo()
    for rank in ranks:
        rank.request(2)
    assert [rank.result().state for rank in ranks] == [SaveState.COMMITTED] * 2
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]


def test_an_unforeseen_error_is_a_failed_save_too(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> ShardReport:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(writer_module, "write_shard", broken)
    ranks = make()
    for rank in ranks:
        rank.request(1)
    (reason,) = {rank.result().reason for rank in ranks}
    assert reason.startswith("internal error (ZeroDivisionError: a bug at checkpointing/test_writer.py:")


def test_a_refusal_of_the_operating_system_is_its_own_message(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> ShardReport:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/scratch/shard")

    monkeypatch.setattr(writer_module, "write_shard", refused)
    ranks = make()
    for rank in ranks:
        rank.request(1)
    assert {rank.result().reason for rank in ranks} == {f"/scratch/shard: {os.strerror(errno.ESTALE)}"}


def test_a_directory_that_cannot_be_made_fails_the_save(make: Callable[..., list[Rank]], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    ranks = make()
    for rank in ranks:
        rank.request(1)
    for rank in ranks:
        result = rank.result()
        assert result.state is SaveState.FAILED
        assert str(tmp_path / "checkpoints") in result.reason


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("rescued", [True, False])
def test_a_run_that_was_moved_saves_nothing_at_its_old_place(
    tmp_path: Path, replaced: bool, rescued: bool
) -> None:
    """Another run may have the directory meanwhile: its checkpoints are neither added to nor removed."""
    run, rescue = tmp_path / "run", tmp_path / "rescue"
    run.mkdir()
    store = dist.HashStore()
    ranks = [Rank(run / "checkpoints", store, rank, rescue=rescue if rescued else None) for rank in range(2)]
    run.rename(tmp_path / "moved")
    if replaced:
        (run / "checkpoints" / ".step-00000009.other.tmp").mkdir(parents=True)
    for rank in ranks:
        rank.request(1)
    results = [rank.result() for rank in ranks]
    if rescued:
        assert {result.path for result in results} == {rescue / "step-00000001"}
        assert not any(call == ("retain", 1) for rank in ranks for call in rank.hooks.calls)
    else:
        what = "is another directory now" if replaced else "is gone"
        assert {result.reason for result in results} == {f"{run} {what}: the run was moved or removed"}
    found = [path.name for path in run.rglob("*")] if replaced else list(tmp_path.glob("run"))
    assert found == (["checkpoints", ".step-00000009.other.tmp"] if replaced else [])
    for rank in ranks:
        rank.writer.close()


def test_a_peer_that_does_not_answer_is_given_up_and_nothing_is_left(
    make: Callable[..., list[Rank]], tmp_path: Path
) -> None:
    ranks = make(timeout_s=0.3)
    ranks[0].request(1)
    result = ranks[0].result()
    assert (result.state, "rank 1 did not report" in result.reason) == (SaveState.FAILED, True)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_closing_waits_for_the_save_in_progress(tmp_path: Path) -> None:
    rank = Rank(tmp_path, dist.HashStore(), 0, 1)
    rank.request(1)
    rank.writer.close()
    assert rank.writer.poll()[-1].state is SaveState.COMMITTED


def pages(array: np.ndarray) -> range:
    """The numbers of the whole pages below an array's memory."""
    size = mmap.PAGESIZE
    return range(-(-array.ctypes.data // size), (array.ctypes.data + array.nbytes) // size)


def present_pages(array: np.ndarray) -> int:
    """How many of them the kernel has backed with memory: bit 63 of the entries of /proc/self/pagemap."""
    whole = pages(array)
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * whole.start)
        entries = np.frombuffer(pagemap.read(8 * len(whole)), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63)))


def test_staging_is_touched_once_and_reused(tmp_path: Path) -> None:
    # So large that malloc takes fresh, untouched pages for it.
    live = {"a": torch.ones(1 << 24), "b": torch.ones(3, dtype=torch.float64)}
    snapshot = HostSnapshot(live)
    assert present_pages(snapshot.arrays["a"]) == len(pages(snapshot.arrays["a"]))
    untouched = np.empty(1 << 24, np.float32)
    assert present_pages(untouched) < len(pages(untouched))
    assert snapshot.nbytes == snapshot_bytes(live) == (64 << 20) + 24
    places = {name: array.ctypes.data for name, array in snapshot.arrays.items()}
    for value in (2.0, 3.0):
        for tensor in live.values():
            tensor.fill_(value)
        snapshot.begin()
        snapshot.wait()
        snapshot.copied()
        assert all((array == value).all() for array in snapshot.arrays.values())
    assert {name: array.ctypes.data for name, array in snapshot.arrays.items()} == places


def test_a_copy_that_fails_raises_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = HostSnapshot({"a": torch.ones(8)})

    def broken(*_: Any) -> None:
        raise OSError("memory failure")

    monkeypatch.setattr(np, "copyto", broken)
    snapshot.begin()
    with pytest.raises(OSError, match="memory failure"):
        snapshot.wait()
    with pytest.raises(OSError, match="memory failure"):
        snapshot.copied()


def test_a_late_rank_is_waited_for(make: Callable[..., list[Rank]]) -> None:
    first, second = make()
    first.request(1)
    wait_for(lambda: SaveState.WRITTEN in {reached.state for reached in first.writer.poll()}, "its shard")
    assert first.writer.busy
    second.request(1)
    assert first.result().state is SaveState.COMMITTED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the copy runs on a second stream")
def test_on_a_gpu_the_compute_stream_waits_and_not_the_host() -> None:
    live = {"a": torch.ones(1 << 24, device="cuda")}
    snapshot = HostSnapshot(live)
    for value in (2.0, 3.0):
        live["a"].fill_(value)
        snapshot.begin()
        snapshot.wait()
        live["a"].fill_(99)
        snapshot.copied()
        assert (snapshot.arrays["a"] == value).all()


def test_a_save_that_is_asked_for_after_it_was_given_up_fails_instead_of_staying_busy(
    make: Callable[..., list[Rank]],
) -> None:
    """Ranks are lost while the trainer's thread is about to save."""
    (rank,) = make(1)
    rank.writer.cancel()
    rank.request(10)
    assert not rank.writer.busy
    assert rank.writer.gave_up
    assert rank.result().state is SaveState.FAILED
