"""The progress contract: what a watcher on the same node reads of a rank, also while the rank writes it."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for
from zslurm.train import progress
from zslurm.train.progress import (
    RECORD,
    STACK_SIGNAL,
    CheckpointState,
    Phase,
    Progress,
    ProgressWriter,
    read_progress,
    record_path,
)


def test_a_reader_sees_what_was_written_last(tmp_path: Path) -> None:
    writer = ProgressWriter(3, attempt=2, directory=str(tmp_path))
    first = read_progress(tmp_path, 3)
    assert first is not None
    assert first == Progress(2, 3, os.getpid(), Phase.SETUP, CheckpointState.NONE, -1, -1, first.monotonic_ns)

    writer.update(phase=Phase.STEP, step=41)
    writer.update(checkpoint=CheckpointState.COMMITTED, committed_step=40)
    last = read_progress(tmp_path, 3)
    assert last is not None
    assert last == Progress(2, 3, os.getpid(), Phase.STEP, CheckpointState.COMMITTED, 41, 40, last.monotonic_ns), (
        "what an update does not name stays as it was"
    )
    assert last.monotonic_ns > first.monotonic_ns

    writer.update(waiting=True)
    waits = read_progress(tmp_path, 3)
    assert waits is not None
    assert (waits.waiting, waits.step, waits.work_ns) == (True, 41, 0)
    writer.update(step=42, work_ns=7_000)
    works = read_progress(tmp_path, 3)
    assert works is not None
    assert (works.waiting, works.step, works.work_ns) == (False, 42, 7_000), "it works again"
    last = works
    writer.close()
    assert read_progress(tmp_path, 3) == last, "the record stays for readers"


def test_a_record_is_56_bytes_and_rewritten_in_place_by_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ProgressWriter(0, attempt=1, directory=str(tmp_path))
    writes: list[tuple[int, int]] = []
    real = os.pwrite

    def counted(fd: int, data: bytes, offset: int) -> int:
        writes.append((len(data), offset))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    for step in range(5):
        writer.update(step=step)
    assert writes == [(56, 0)] * 5
    assert RECORD.size == 56
    assert record_path(tmp_path, 0).stat().st_size == 56


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: b"",
        lambda raw: b"ZPRX" + raw[4:],
        lambda raw: raw[:4] + (1).to_bytes(4, "little") + raw[8:],
        lambda raw: raw[:20] + b"\xff" + raw[21:],
    ],
    ids=["short", "long", "empty", "magic", "version", "phase"],
)
def test_a_torn_record_or_one_of_another_version_is_none(tmp_path: Path, damage: object) -> None:
    ProgressWriter(0, attempt=1, directory=str(tmp_path)).close()
    path = record_path(tmp_path, 0)
    assert read_progress(tmp_path, 0) is not None
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert read_progress(tmp_path, 0) is None


def test_there_is_no_record_of_a_rank_that_never_was(tmp_path: Path) -> None:
    assert read_progress(tmp_path, 7) is None
    assert read_progress(tmp_path / "missing", 0) is None


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZSLURM_PROGRESS_DIR", raising=False)
    writer = ProgressWriter(0, attempt=1)
    writer.update(step=5)
    writer.close()
    assert list(tmp_path.iterdir()) == []
    assert progress.last_step() == 5, "the process itself knows how far it is"


def test_the_variable_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSLURM_PROGRESS_DIR", str(tmp_path))
    ProgressWriter(1, attempt=1).close()
    assert read_progress(tmp_path, 1) is not None


def test_a_live_process_dumps_the_stacks_of_all_threads_and_goes_on(tmp_path: Path) -> None:
    program = """
import sys, threading
from zslurm.train.progress import dump_stacks_on_signal
dump_stacks_on_signal()
def waits_in_a_thread(): threading.Event().wait()
def waits_for_a_word(): return sys.stdin.readline()
threading.Thread(target=waits_in_a_thread, daemon=True).start()
print("ready", flush=True)
print(waits_for_a_word())
"""
    stacks = tmp_path / "stderr"
    with stacks.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def both_are_seen() -> bool:
        process.send_signal(STACK_SIGNAL)  # again where it came before they waited
        return all(name in stacks.read_text() for name in ("waits_in_a_thread", "waits_for_a_word"))

    wait_for(both_are_seen, "the stacks")
    out, _ = process.communicate("still here\n")
    assert "still here" in out
    assert process.returncode == 0


def test_the_stack_signal_is_none_that_others_use() -> None:
    import signal

    used = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGRTMIN, signal.SIGRTMIN + 1}
    assert STACK_SIGNAL not in used, "glibc takes the first two real-time signals, NCCL SIGUSR1"
    assert not faulthandler.unregister(STACK_SIGNAL), "importing the module registers nothing"
