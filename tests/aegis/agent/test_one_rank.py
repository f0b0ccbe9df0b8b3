"""One rank is killed, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.aegis.agent.test_stacks import start_rank
from tests.aegis.contexts import context
from tests.aegis.orphans import Orphans, environ_of, orphans, runs
from zslurm.aegis.agent import one_rank
from zslurm.aegis.agent.command_handlers import handle
from zslurm.aegis.agent.one_rank import end_rank
from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.protocol import Command, decode_command, encode_command


@pytest.fixture
def left() -> Iterator[Orphans]:
    with orphans() as started:
        yield started


@pytest.fixture
def here(tmp_path: Path) -> Iterator[NodeContext]:
    at = context(tmp_path / "root")
    progress = at.run.attempt(3).progress(at.environ)
    progress.mkdir()
    yield at
    subprocess.run(["rm", "-r", str(progress)], check=True)


def test_the_rank_that_is_named_is_killed_even_where_it_is_stopped(left: Orphans, here: NodeContext) -> None:
    mine = environ_of(here.run.attempt(3))
    pids = [start_rank(left, here, rank, environ=mine) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGSTOP)
    command = decode_command(encode_command(Command("end_rank", 4, attempt=3, rank=1)))
    assert isinstance(command, Command)
    assert handle(here, command) == (True, "", {"pid": pids[1]})
    assert (runs(pids[0]), runs(pids[1])) == (True, False)
    assert handle(here, command)[1] == f"process {pids[1]} of rank 1 is gone"


def test_what_is_no_rank_of_the_attempt_is_left_alone(left: Orphans, here: NodeContext) -> None:
    pid = start_rank(left, here, 0, environ=environ_of(here.run.attempt(9)))
    assert end_rank(here, here.run.attempt(3), 0).why == f"process {pid} of rank 0 is gone"
    assert end_rank(here, here.run.attempt(3), 5).why == f"rank 5 has no record on {here.node}"
    assert runs(pid)


def test_a_process_that_nothing_can_interrupt_is_reported(
    left: Orphans, here: NodeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's call cannot be had here: the kernel's word for it is made up, and so is a process that stays."""
    pid = start_rank(left, here, 0, environ=environ_of(here.run.attempt(3)))
    monkeypatch.setattr(one_rank, "_state", lambda pid: psutil.STATUS_DISK_SLEEP)
    assert "inside a call that nothing can interrupt" in end_rank(here, here.run.attempt(3), 0).why
    assert runs(pid), "it is not even tried"
    monkeypatch.setattr(one_rank, "_state", lambda pid: psutil.STATUS_RUNNING)
    monkeypatch.setattr(one_rank, "_DIES_S", 0.0)
    assert "did not die within 0 s: it is inside a device call" in end_rank(here, here.run.attempt(3), 0).why
