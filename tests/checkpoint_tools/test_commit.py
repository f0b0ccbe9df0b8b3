"""A checkpoint appears whole, by one rename, durable, and at no kill point is there none."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_tools.saves import TENSORS, assert_holds, manifest_of, save, write_all_ranks
from tests.waiting import DEADLINE_S
from zslurm.checkpoint_tools import (
    Mismatch,
    WriteFailed,
    begin,
    commit,
    discard,
    list_checkpoints,
    listing,
    prune,
    write,
    write_shard,
)
from zslurm.checkpoint_tools.commit import BEGIN_POINTS, COMMIT_POINTS

SAVE_POINTS = (*BEGIN_POINTS, *write.POINTS, *COMMIT_POINTS)
OLD_ONE_ASIDE = "commit: old one aside"


def kill_at(point: str, work: Callable[[Callable[[str], None]], object]) -> None:
    """Run `work` in a child process that kills itself (SIGKILL) when `work` comes to `point`."""

    def at(passed: str) -> None:
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=work, args=(at,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL, f"the save never came to {point!r}"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("point", [point for point in SAVE_POINTS if point != OLD_ONE_ASIDE])
def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path, point: str) -> None:
    earlier = save(tmp_path, 100)
    kill_at(point, lambda at: save(tmp_path, 200, nonce="killed", at=at))

    visible = COMMIT_POINTS.index("commit: visible")
    committed = point in COMMIT_POINTS[visible:]
    listed = list_checkpoints(tmp_path)
    assert [(found.step, found.complete) for found in listed] == [(200, True)] * committed + [(100, True)]
    assert_holds(earlier, 100)
    if committed:
        assert_holds(listed[0].path, 200)

    assert_holds(save(tmp_path, 200, nonce="again", content=201), 201)
    assert names(tmp_path) == ["step-00000100", "step-00000200"]


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a_killed_save_of_the_same_step_leaves_the_old_one_or_the_new_one(tmp_path: Path, point: str) -> None:
    save(tmp_path, 100)
    kill_at(point, lambda at: save(tmp_path, 100, nonce="killed", content=101, at=at))

    committed = point in COMMIT_POINTS[COMMIT_POINTS.index("commit: visible") :]
    (listed,) = list_checkpoints(tmp_path)
    assert (listed.step, listed.complete) == (100, True)
    assert_holds(listed.path, 101 if committed else 100)

    discard(begin(tmp_path, 200, "after"))
    assert names(tmp_path) == ["step-00000100"]
    assert_holds(tmp_path / "step-00000100", 101 if committed else 100)


@pytest.mark.parametrize("point", listing.PRUNE_POINTS)
def test_a_killed_deletion_leaves_whole_checkpoints_only(tmp_path: Path, point: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    kill_at(point, lambda at: prune(tmp_path, 1, at=at))

    listed = list_checkpoints(tmp_path)
    assert [(found.step, found.complete) for found in listed] == [(3, True), (2, True)]
    for found in listed:
        assert_holds(found.path, found.step)
    discard(begin(tmp_path, 4, "after"))
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def kill_at_second_unlink(work: Callable[[], object]) -> None:
    """Run `work` in a child process that kills itself when it is about to delete its second file."""
    unlink, calls = os.unlink, []

    def deadly(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        unlink(*args, **options)

    def child(_: object) -> None:
        os.unlink = deadly
        work()

    kill_at("second unlink", child)


def test_a_half_deleted_checkpoint_is_not_listed(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    kill_at_second_unlink(lambda: prune(tmp_path, 1))
    assert [(found.step, found.complete) for found in list_checkpoints(tmp_path)] == [(2, True)]


def test_a_half_deleted_old_checkpoint_of_a_step_is_not_listed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    kill_at_second_unlink(lambda: save(tmp_path, 1, nonce="second", content=2))
    (listed,) = list_checkpoints(tmp_path)
    assert_holds(listed.path, 2)


def test_everything_is_on_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of syncs and renames, seen from the system calls; a loss of power cannot be made here."""
    log: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def logged_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        assert path.stat().st_size > 0, f"{path} was synced before it was written"
        log.append(("sync", path.name))
        fsync(descriptor)

    def logged_rename(source: Path, target: Path) -> Path:
        log.append(("rename", target.name))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    root = tmp_path / "checkpoints"
    save(root, 7, world_size=2, nonce="n")
    assert log == [
        ("sync", tmp_path.name),
        ("sync", "shard-00000-of-00002.safetensors"),
        ("sync", "shard-00001-of-00002.safetensors"),
        ("sync", "manifest.json.tmp"),
        ("rename", "manifest.json"),
        ("sync", ".step-00000007.n.tmp"),
        ("rename", "step-00000007"),
        ("sync", "checkpoints"),
    ]


def test_a_save_is_invisible_until_it_is_committed(tmp_path: Path) -> None:
    directory = begin(tmp_path, 5, "n")
    reports = write_all_ranks(directory, TENSORS, 2, 5)
    assert list_checkpoints(tmp_path) == []
    path = commit(tmp_path, directory, manifest_of(reports, TENSORS, 5))
    assert path == tmp_path / "step-00000005"
    assert [found.path for found in list_checkpoints(tmp_path)] == [path]


def test_a_given_up_save_leaves_nothing(tmp_path: Path) -> None:
    directory = begin(tmp_path, 5, "n")
    write_all_ranks(directory, TENSORS, 2)
    discard(directory)
    discard(directory)
    assert names(tmp_path) == []


def test_a_writer_that_was_given_up_cannot_disturb_the_next_save(tmp_path: Path) -> None:
    abandoned = begin(tmp_path, 5, "first")
    reports = write_all_ranks(abandoned, TENSORS, 2, 4)
    path = save(tmp_path, 5, nonce="second")
    with pytest.raises(WriteFailed):
        write_shard(abandoned, 1, 2, [])
    with pytest.raises(WriteFailed):
        commit(tmp_path, abandoned, manifest_of(reports, TENSORS, 5))
    assert_holds(path, 5)


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    for name in [".step-notes", "best", ".step-00000001.tmp", "step-1"]:
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    discard(begin(tmp_path, 1, "n"))
    assert names(tmp_path) == before


def test_a_nonce_serves_once_and_is_a_name(tmp_path: Path) -> None:
    begin(tmp_path, 1, "n")
    with pytest.raises(Mismatch, match="used before"):
        begin(tmp_path, 1, "n")
    for nonce in ["", "a/b", "a.b", ".."]:
        with pytest.raises(Mismatch, match="nonce"):
            begin(tmp_path, 1, nonce)


def test_only_what_was_begun_for_the_step_is_committed(tmp_path: Path) -> None:
    directory = begin(tmp_path, 5, "n")
    manifest = manifest_of(write_all_ranks(directory, TENSORS, 1), TENSORS, 6)
    with pytest.raises(Mismatch, match=r"was not begun in .* for step 6"):
        commit(tmp_path, directory, manifest)
    with pytest.raises(Mismatch, match="was not begun"):
        commit(tmp_path / "elsewhere", directory, manifest)


def save_for_ever(root: Path, started: Any) -> None:
    """Saves, one after the other, each with the deletion of an old one; until it is killed."""
    for step in range(2, 10**6):
        save(root, step, nonce=f"n{step}", world_size=3)
        prune(root, 2)
        started.set()


def assert_survives_kills(root: Path, count: int) -> None:
    """Kill a writer `count` times at random moments: what it had committed is whole, nothing else is listed."""
    context = multiprocessing.get_context("fork")
    delays = random.Random(20261121)
    for _ in range(count):
        started = context.Event()
        writer = context.Process(target=save_for_ever, args=(root, started))
        writer.start()
        assert started.wait(DEADLINE_S)
        time.sleep(delays.uniform(0, 0.03))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        listed = list_checkpoints(root)
        assert listed
        assert all(found.complete for found in listed)
        for found in listed:
            assert_holds(found.path, found.step)
        for found in listed:
            shutil.rmtree(found.path)
        save(root, 1, nonce="again")
        assert names(root) == ["step-00000001"], "leftovers are cleaned at the next save"


def test_a_writer_killed_at_any_moment_leaves_whole_checkpoints(tmp_path: Path) -> None:
    assert_survives_kills(tmp_path, 5)


@pytest.mark.soak
def test_a_writer_killed_a_hundred_times_leaves_whole_checkpoints(tmp_path: Path) -> None:
    assert_survives_kills(tmp_path, 100)
