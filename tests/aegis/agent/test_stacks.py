"""Stacks of the ranks: each writes its own, and nobody who does not expect the signal gets it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.aegis.contexts import context
from tests.aegis.orphans import Orphans, environ_of, orphans, runs
from tests.waiting import wait_for
from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.agent.stacks import dump_stacks
from zslurm.run.run_dir import AttemptDir

RANK = """
import os, sys
from zslurm.train.progress import ProgressWriter, dump_stacks_on_signal
writer = ProgressWriter({rank}, {attempt}, {directory!r})
{listen}
def in_a_collective():
    import time
    print("ready", flush=True)
    time.sleep(3600)
os.dup2(os.open({log!r}, os.O_WRONLY | os.O_CREAT, 0o600), 2)
in_a_collective()
"""


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


def start_rank(
    left: Orphans, here: NodeContext, rank: int, *, listens: bool = True, environ: dict[str, str]
) -> int:
    attempt = here.run.attempt(3)
    program = RANK.format(
        rank=rank,
        attempt=3,
        directory=str(attempt.progress(here.environ)),
        listen="dump_stacks_on_signal()" if listens else "",
        log=str(here.root.parent / f"rank-{rank}.log"),
    )
    return left.start(environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, program)


def test_each_rank_writes_its_stacks_and_goes_on(left: Orphans, here: NodeContext) -> None:
    attempt = here.run.attempt(3)
    pids = [start_rank(left, here, rank, environ=environ_of(attempt)) for rank in range(2)]
    done = dump_stacks(here, attempt)
    assert (done.ranks, done.missed) == ((0, 1), {})
    for rank in range(2):
        log = here.root.parent / f"rank-{rank}.log"
        wait_for(partial(_has_stacks, log), f"the stacks of rank {rank}")
    assert all(runs(pid) for pid in pids)


def _has_stacks(log: Path) -> bool:
    return "in in_a_collective" in log.read_text()


def test_a_rank_that_does_not_listen_yet_is_spared(left: Orphans, here: NodeContext) -> None:
    attempt = here.run.attempt(3)
    pid = start_rank(left, here, 0, listens=False, environ=environ_of(attempt))
    done = dump_stacks(here, attempt)
    assert (done.ranks, done.missed) == ((), {0: f"process {pid} does not listen yet"})
    assert runs(pid)


@pytest.mark.parametrize("who", ["another node's", "another attempt's", "nobody's"])
def test_a_process_that_is_not_the_rank_is_spared(left: Orphans, here: NodeContext, who: str) -> None:
    attempt = here.run.attempt(3)
    environ = {
        "another node's": environ_of(attempt, node="node1"),
        "another attempt's": environ_of(AttemptDir(attempt.path.with_name("000004"))),
        "nobody's": {"PATH": os.environ["PATH"]},
    }[who]
    pid = start_rank(left, here, 0, environ=environ)
    assert dump_stacks(here, attempt).missed == {0: f"process {pid} is gone"}
    assert (here.root.parent / "rank-0.log").read_text() == ""


def test_a_rank_that_ended(left: Orphans, here: NodeContext) -> None:
    attempt = here.run.attempt(3)
    pid = start_rank(left, here, 0, environ=environ_of(attempt))
    left.end()
    assert dump_stacks(here, attempt).missed == {0: f"process {pid} is gone"}


def test_no_ranks_are_no_error(here: NodeContext) -> None:
    done = dump_stacks(here, here.run.attempt(9))
    assert (done.ranks, done.missed) == ((), {})
