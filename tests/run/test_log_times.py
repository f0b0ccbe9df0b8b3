"""Every line of a rank's log has a time, whoever wrote it and however the rank ended."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from tests.waiting import wait_for
from zslurm.run.log_times import LogTimes

# Writes as NCCL would, past Python, when it is told to, and dies by a signal.
_RANK = """
import os, sys
from pathlib import Path
from zslurm.run.log_times import keep_times
log, times = Path(sys.argv[1]), Path(sys.argv[2])
keep_times(log, times, every_s=0.02)
for line in sys.stdin:
    with log.open("ab", buffering=0) as file:
        file.write(line.encode())
"""


def test_a_rank_notes_when_its_log_grew_and_its_last_words_have_a_time_too(tmp_path: Path) -> None:
    log, times = tmp_path / "rank.log", tmp_path / "rank.times"
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(log), str(times)],
        stdin=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert rank.stdin is not None
    ends, before = [], [time.time()]
    for count, line in enumerate(("one\n", "two\n", "three\n"), start=1):
        rank.stdin.write(line)
        rank.stdin.flush()
        wait_for(lambda count=count: times.exists() and times.stat().st_size >= 16 * count, "the note")  # type: ignore[misc]
        ends.append(log.stat().st_size)
        before.append(time.time())
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    with log.open("ab") as file:
        file.write(b"last words\n")
    found = LogTimes(log, times)
    for index, end in enumerate(ends):
        assert before[index] <= found.of(end) <= before[index + 1]
        assert found.of(end - 2) == found.of(end), "the middle of a line has its line's time"
    assert found.of(log.stat().st_size) == log.stat().st_mtime


def test_without_notes_a_log_has_the_time_of_its_last_change(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text("one\ntwo\n")
    os.utime(log, (5000.0, 5000.0))
    found = LogTimes(log, tmp_path / "rank.times")
    assert (found.of(4), found.of(8)) == (5000.0, 5000.0)


def test_a_torn_note_and_a_file_servers_clock_do_no_harm(tmp_path: Path) -> None:
    log, times = tmp_path / "rank.log", tmp_path / "rank.times"
    log.write_text("one\ntwo\n")
    os.utime(log, (900.0, 900.0))
    times.write_bytes(struct.pack("<Qd", 4, 1000.0) + b"\x08\x00\x00")
    found = LogTimes(log, times)
    assert (found.of(4), found.of(8)) == (1000.0, 1000.0), "never before the line above it"


def test_a_disk_that_is_full_ends_the_notes_and_not_the_rank(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.touch()
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(log), str(tmp_path / "no" / "such" / "directory")],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    _, complaints = rank.communicate("one\n")
    assert (rank.returncode, complaints) == (0, "")
