"""The ranks' records, as an agent reads them: also half-made ones, and directories that come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_for
from zslurm.aegis.agent.sensors.progress import ranks_in
from zslurm.aegis.protocol import RankProgress
from zslurm.core.pauses import Pauses
from zslurm.train.progress import RECORD, Phase, ProgressWriter, record_path


def write(directory: Path, rank: int, step: int) -> None:
    writer = ProgressWriter(rank, 3, str(directory))
    writer.update(phase=Phase.STEP, step=step, committed_step=step - 1)
    writer.close()


def test_ranks_are_told_with_their_age(tmp_path: Path) -> None:
    before = time.monotonic()
    for rank in (9, 8):
        write(tmp_path, rank, 40 + rank)
    written = time.monotonic()
    first, second = ranks_in(tmp_path, round((written + 5) * 1e9))
    assert (first.rank, first.phase, first.step, first.committed_step) == (8, Phase.STEP, 48, 47)
    assert second.rank == 9
    assert 5.0 <= first.age_s <= 5.0 + written - before


def test_a_time_in_which_the_job_was_suspended_is_nobodys_age(tmp_path: Path) -> None:
    """A record from before the pause ages only by the time that the rank could run."""
    before = time.monotonic()
    write(tmp_path, 0, step=3)
    written = time.monotonic()
    pauses = Pauses(clock=iter([written - 1, written + 1, written + 601, written + 602]).__next__)
    assert [pauses.tick(), pauses.tick(), pauses.tick()] == pytest.approx([0.0, 600.0, 0.0])
    (rank,) = ranks_in(tmp_path, round((written + 602) * 1e9), pauses.since)
    assert 2.0 <= rank.age_s <= 2.0 + written - before
    assert pauses.since(written + 301) == 300
    assert pauses.since(written + 601) == 0


def test_no_age_is_negative(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    assert [rank.age_s for rank in ranks_in(tmp_path, 0)] == [0.0]


def test_no_directory_is_no_ranks(tmp_path: Path) -> None:
    assert ranks_in(tmp_path / "none") == ()


@pytest.mark.parametrize("broken", [b"", b"ZPRG", b"\xff" * RECORD.size, b"\x00" * 4096])
def test_a_broken_record_is_left_out(tmp_path: Path, broken: bytes) -> None:
    write(tmp_path, 0, 1)
    write(tmp_path, 1, 1)
    record_path(tmp_path, 0).write_bytes(broken)
    assert [rank.rank for rank in ranks_in(tmp_path)] == [1]


def test_a_record_under_another_name_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    record_path(tmp_path, 0).rename(record_path(tmp_path, 5))
    (tmp_path / "rank-x").touch()
    (tmp_path / "rank-00001.tmp").touch()
    assert ranks_in(tmp_path) == ()


def test_what_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        ranks_in(tmp_path / "file")


def test_the_record_gives_what_the_rank_said(tmp_path: Path) -> None:
    write(tmp_path, 2, 7)
    (rank,) = ranks_in(tmp_path)
    assert rank == RankProgress(2, os.getpid(), Phase.STEP, 7, 6, rank.age_s)


def test_a_rank_whose_process_is_stopped_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            monkeypatch.setattr(os, "getpid", lambda: process.pid)
            write(tmp_path, 2, 7)
            assert not ranks_in(tmp_path)[0].halted
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda: psutil.Process(process.pid).status() == "stopped", "the process to be stopped")
            assert ranks_in(tmp_path)[0].halted
        finally:
            process.kill()
