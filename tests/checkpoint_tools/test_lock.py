"""One writer per directory: who holds it, who is dead, and who takes over."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.checkpoint_tools.saves import save
from tests.waiting import DEADLINE_S
from zslurm.checkpoint_tools import Holder, InUse, acquire, holder_of, list_checkpoints

ELSEWHERE = Holder("another-host", 1, 1, "", 0.0, "n")
_RACES = 8


def plant(root: Path, holder: Holder) -> None:
    root.mkdir(exist_ok=True)
    (root / ".lock").write_text(json.dumps(asdict(holder)))


def test_a_lock_keeps_others_out_until_it_is_released(tmp_path: Path) -> None:
    root = tmp_path / "new" / "checkpoints"
    lock = acquire(root, job="17")
    assert holder_of(root) == lock.holder
    with pytest.raises(
        InUse, match=rf"process {os.getpid()} on .* of job 17, since .*remove {re.escape(str(root))}"
    ):
        acquire(root)
    lock.release()
    assert holder_of(root) is None
    assert list(root.iterdir()) == []
    acquire(root).release()


def test_it_does_not_disturb_saves_and_listings(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert [found.step for found in list_checkpoints(tmp_path)] == [2, 1]
    assert holder_of(tmp_path) == lock.holder


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from zslurm.checkpoint_tools import acquire
acquire(Path({str(tmp_path)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    theirs = holder_of(tmp_path)
    assert theirs is not None
    lock = acquire(tmp_path)
    assert lock.holder != theirs
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_another_process_with_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    plant(tmp_path, replace(lock.holder, started=lock.holder.started - 1, nonce="older"))
    assert acquire(tmp_path).holder.nonce != "older"


def test_an_earlier_attempt_of_the_same_job_is_over(tmp_path: Path) -> None:
    plant(tmp_path, replace(ELSEWHERE, job="17"))
    with pytest.raises(InUse, match="another-host"):
        acquire(tmp_path, job="18")
    with pytest.raises(InUse):
        acquire(tmp_path)
    acquire(tmp_path, job="17")


def test_a_holder_elsewhere_is_checked_by_the_caller(tmp_path: Path) -> None:
    plant(tmp_path, ELSEWHERE)
    asked: list[Holder] = []

    def unknown(holder: Holder) -> bool:
        asked.append(holder)
        return False

    with pytest.raises(InUse):
        acquire(tmp_path, is_gone=unknown)
    assert asked == [ELSEWHERE]
    acquire(tmp_path, is_gone=lambda holder: holder.host == "another-host")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "x"}'])
def test_a_file_that_is_no_lock_holds_nobody_out(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    acquire(tmp_path)


def test_releasing_leaves_a_successor_s_lock_alone(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    plant(tmp_path, ELSEWHERE)
    lock.release()
    assert holder_of(tmp_path) == ELSEWHERE


def _race(root: Path, ready: multiprocessing.synchronize.Barrier, won: multiprocessing.queues.Queue[bool]) -> None:
    for _ in range(_RACES):
        ready.wait()
        try:
            acquire(root)
        except InUse:
            won.put(False)
        else:
            won.put(True)
        ready.wait()  # a holder that has ended counts as dead: none ends before all have tried


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_at_once_one_gets_it(tmp_path: Path, stale: bool) -> None:
    context = multiprocessing.get_context("fork")
    ready, won = context.Barrier(7, timeout=DEADLINE_S), context.Queue()
    racers = [context.Process(target=_race, args=(tmp_path, ready, won), daemon=True) for _ in range(6)]
    for racer in racers:
        racer.start()
    for _ in range(_RACES):
        if stale:
            plant(tmp_path, replace(ELSEWHERE, host=os.uname().nodename, pid=2**22 + 1))
        ready.wait()
        results = [won.get(timeout=DEADLINE_S) for _ in racers]
        ready.wait()
        assert sum(results) == 1
        (tmp_path / ".lock").unlink()
        assert list(tmp_path.iterdir()) == []
    for racer in racers:
        racer.join()
