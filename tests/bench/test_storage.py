"""`zslurm bench storage`: what it counts, what it leaves behind, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.waiting import DEADLINE_S, wait_for
from zslurm.bench import storage, storage_io, storage_space
from zslurm.bench.measurement import BENCHMARKS, Point
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine, read_result
from zslurm.bench.run.work_directory import WorkDirectory
from zslurm.bench.storage_io import ScratchFile, StorageRun
from zslurm.checkpoint_tools import list_checkpoints
from zslurm.core.errors import Exit, ZslurmError

MIB = 1 << 20
MACHINE = MeasuredMachine(
    cluster="local", nodes=["node0"], ranks_per_node=1, device="cpu", gpu=None, gpus_per_node=0, gpu_memory=1,
    cpu="a CPU", cores=2,
)  # fmt: skip


def options(path: Path, **more: Any) -> dict[str, Any]:
    base = {"path": str(path), "work": "work", "size": 8 * MIB, "checkpoint": 4 * MIB, "depths": [1, 4]}
    return base | {"files": 20, "seconds": 0.05, "saves": 2} | more


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> BenchRanks:
    """One rank, which needs no store."""
    monkeypatch.setattr(storage, "_WORK", {})
    storage._scratch.cache_clear()
    storage._filled.cache_clear()
    return BenchRanks(
        rank=0, local_rank=0, local_size=1, nodes=["node0"], device=torch.device("cpu"),
        store=None, timeout=timedelta(seconds=60),  # type: ignore[arg-type]
    )  # fmt: skip


def measured(path: Path, ranks: BenchRanks, **more: Any) -> list[dict[str, Any]]:
    """Rows of all points, and nothing left behind."""
    plan = storage.points(options(path, **more), MACHINE)
    try:
        return [row for point in plan.points for row in storage.run(point, ranks)]
    finally:
        for work in storage._WORK.values():
            work.remove()


def test_every_operation_has_a_row_of_the_same_columns(tmp_path: Path, alone: BenchRanks) -> None:
    rows = measured(tmp_path, alone)
    assert [(row["operation"], row["depth"]) for row in rows] == [
        ("sequential_write", 1), ("random_read", 1), ("random_read", 4), ("sequential_read", 1), ("create", 1),
        ("stat", 1), ("list", 1), ("unlink", 1), ("checkpoint", 1),
    ]  # fmt: skip
    assert len({tuple(row) for row in rows}) == 1
    assert {*BENCHMARKS["storage"].columns, *BENCHMARKS["storage"].keys, "seconds"} <= set(rows[0])
    assert all(row["per_s"] > 0 and row["seconds"] > 0 for row in rows)
    assert [row["pages_per_s"] for row in rows[1:3]] == [4 * row["per_s"] for row in rows[1:3]]
    assert list(tmp_path.iterdir()) == []


def test_every_random_read_that_is_counted_was_made(tmp_path: Path) -> None:
    """The kernel's counter of this process is the peer; it counts what goes past the cache."""
    file = ScratchFile(tmp_path, "scratch", 32 * MIB)
    file.write()
    if not file.is_direct or storage_io.read_bytes() is None:
        pytest.skip("the temporary directory has no O_DIRECT, or the kernel counts no reads")
    before = storage_io.read_bytes()
    found = file.read_randomly(8, 0.2, storage.BLOCK)
    after = storage_io.read_bytes()
    file.close()
    assert before is not None and after is not None
    if after == before:
        pytest.skip("the temporary directory is in memory")
    assert found.operations * storage.BLOCK == pytest.approx(after - before, rel=0.05)
    assert sum(found.windows) == found.operations


def test_without_direct_reads_the_page_cache_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_direct(descriptor: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0 if command == fcntl.F_SETFL else real(descriptor, command, value)

    real = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", no_direct)
    file = ScratchFile(tmp_path, "scratch", 4 * MIB)
    assert not file.is_direct
    file.write()
    assert file.read().operations == 1
    assert file.read_randomly(2, 0.05, storage.BLOCK).operations > 0
    file.close()


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, "scratch", 12 * MIB)
    assert list(tmp_path.iterdir()) == []  # it has no name from the start
    assert file.write().operations == 3
    pages = {bytes(page) for page in _pages(file)}
    assert len(pages) == 12 * MIB // 4096  # none comes twice: nothing to compress
    file.close()


def _pages(file: ScratchFile) -> list[bytes]:
    text = Path(f"/proc/self/fd/{file.descriptor}").read_bytes()
    return [text[at : at + 4096] for at in range(0, len(text), 4096)]


def test_a_full_disk_ends_it_with_a_line_and_nothing_left(
    tmp_path: Path, alone: BenchRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage_io.os, "fsync", full)
    with pytest.raises(ZslurmError, match=rf"^{tmp_path}: rank 0 on node0: No space left on device$"):
        measured(tmp_path, alone)
    assert list(tmp_path.iterdir()) == []


def test_saves_are_whole_checkpoints(tmp_path: Path, alone: BenchRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []

    def look(root: Path, **_options: object) -> None:
        kept.extend(listing.complete for listing in list_checkpoints(root))
        real(root)

    real = storage.shutil.rmtree
    monkeypatch.setattr(storage.shutil, "rmtree", look)
    monkeypatch.setattr(storage, "WorkDirectory", _NoRemover)
    (row,) = [row for row in measured(tmp_path, alone) if row["operation"] == "checkpoint"]
    assert kept == [True, True] and row["samples"] == 2
    assert row["mb_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e6)


class _NoRemover(WorkDirectory):
    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def remove(self) -> None:
        self.path.rmdir() if not list(self.path.iterdir()) else None


def test_rates_of_ranks_add_up_and_latencies_do_not(alone: BenchRanks) -> None:
    one = StorageRun(100, 2.0, 0.01, 0.05, [10.0, 10.0])
    found = [vars(each) | {"direct": True} for each in (one, replace(one, elapsed=1.0, median=0.03, p99=0.2))]
    values = {"operation": "random_read", "depth": 2, "bytes": 16384}
    (row,) = storage._rows(values, found, alone)
    assert (row["per_s"], row["seconds"], row["p99_us"], row["how"]) == (150.0, 0.02, 200_000.0, "direct")
    assert storage._rows(values, None, alone) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"path": "missing"}, "no such directory; name one that exists"),
        ({"path": "file"}, "not a directory"),
        ({"size": 1 << 60}, r"the benchmark takes 2.00 EiB|takes \d+ PiB and at most half of the free space"),
    ],
)
def test_a_directory_that_cannot_be_measured_is_refused(
    tmp_path: Path, changes: Mapping[str, Any], reason: str
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / str(changes.get("path", ""))
    found = options(path) | {name: value for name, value in changes.items() if name != "path"}
    with pytest.raises(ZslurmError, match=reason):
        storage.points(found, MACHINE)


def test_a_read_only_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    read_only = os.statvfs_result([*tuple(real)[:8], os.ST_RDONLY, *tuple(real)[9:]])
    monkeypatch.setattr(storage_space.os, "statvfs", lambda _path: read_only)
    reason = storage_space.refusal(tmp_path, size=1, checkpoint=1, ranks_per_node=1, nodes=1)
    assert reason == f"{tmp_path}: the file system is read-only; name a directory that you can write"


def test_points_that_are_left_out_do_not_break_the_others(tmp_path: Path, alone: BenchRanks) -> None:
    values = {"operation": "sequential_read", "depth": 1, "bytes": 4 * MIB, "size": 8 * MIB}
    point = Point(values | {"path": str(tmp_path), "work": "work"}, 1.0)
    (row,) = storage.run(point, alone)  # before anything was written
    assert row["per_s"] > 0
    storage._WORK["work"].remove()


# --- the command ------------------------------------------------------------------------------------------------


def words(path: Path, *more: str) -> list[str]:
    sizes = ("--size", "16MiB", "--checkpoint-size", "16MiB", "--files", "20", "--depth", "4")
    return ["bench", "storage", "--path", str(path), *sizes, *more]


def environment() -> dict[str, str]:
    """Of a command whose ranks have their imports behind them."""
    return forked.environment(forked.server(torch=True), [*forked.OTHERS, *forked.RANKS], os.environ)


def run(path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return forked.server(torch=True).run(words(path, *more), env=environment(), cwd=path, timeout=DEADLINE_S)


def test_it_runs_here_on_two_ranks_and_writes_a_result(tmp_path: Path) -> None:
    place, out = tmp_path / "place", tmp_path / "result.json"
    place.mkdir()
    done = run(place, "--quick", "--out", str(out))
    assert done.returncode == Exit.DONE, done.stderr
    result = read_result(out)
    assert result.complete and {row["ranks"] for row in result.rows} == {2}
    assert "random_read" in done.stdout and f"result: {out}" in done.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_where_it_is_interrupted(tmp_path: Path, signum: signal.Signals) -> None:
    place, out = tmp_path / "place", tmp_path / "result.json"
    place.mkdir()
    command = [sys.executable, "-m", "zslurm", *words(place, "--out", str(out))]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: list(place.iterdir()), "the benchmark's directory")
        partial = out.with_name(out.name + ".partial")
        wait_for(lambda: partial.exists() and '"operation": "seq' in partial.read_text(), "the first row")
        process.send_signal(signum)
        code = process.wait()
    assert code == (Exit.INTERRUPTED if signum == signal.SIGINT else -signal.SIGKILL)
    wait_for(lambda: not list(place.iterdir()), "the directory to be removed")
    assert [row["operation"] for row in read_result(out).rows][:1] == ["sequential_write"]
    assert not read_result(out).complete


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--path", "/no/such/place"), "--path /no/such/place: no such directory; name one that exists"),
        (("--size", "1MiB"), "--size 1MiB: at least 4MiB"),
        (("--checkpoint-size", "8191TB"), "give smaller --size and --checkpoint-size"),
        (("--size", "much"), "'much' is not a size"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, more: tuple[str, ...], line: str) -> None:
    done = run(tmp_path, *more)
    assert done.returncode == Exit.USAGE
    assert line in done.stderr and len(done.stderr.splitlines()) == 1
    assert json.dumps(list(map(str, tmp_path.iterdir()))) == "[]"
