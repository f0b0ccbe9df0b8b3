"""What an attempt left is ended: its processes and theirs, on this node alone, and nobody else's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.aegis.contexts import context
from tests.aegis.orphans import READY, SLEEP, Orphans, environ_of, orphans, runs
from tests.fake_sysfs import mi300x_pollara
from tests.submit.local_runs import LocalUser
from tests.waiting import wait_for
from zslurm.aegis.agent import orphans as module
from zslurm.aegis.agent.orphans import clean_up, members, read_member
from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.agent.stacks import dump_stacks
from zslurm.hardware.facts import read_facts
from zslurm.run.run_dir import AttemptDir
from zslurm.train.progress import ProgressWriter

NO_PID = 1 << 23
"""More than any process has."""


@pytest.fixture
def left() -> Iterator[Orphans]:
    with orphans() as started:
        yield started


@pytest.fixture
def here(tmp_path: Path) -> NodeContext:
    return context(tmp_path / "root")


@pytest.fixture
def attempt(here: NodeContext) -> AttemptDir:
    return here.run.attempt(3)


CHILD_WITHOUT_ENVIRONMENT = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {SLEEP!r}], env={{}}, start_new_session=True)
{READY}
{SLEEP}
"""
GRANDCHILD_OF_NOBODY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
    time.sleep(3600)
time.sleep(3600)
"""


def test_ranks_and_what_they_started_are_ended(left: Orphans, here: NodeContext, attempt: AttemptDir) -> None:
    ranks = [left.start(environ_of(attempt)) for _ in range(2)]
    parent = left.start(environ_of(attempt), CHILD_WITHOUT_ENVIRONMENT)
    family = [*ranks, parent, *left.children(parent)]
    assert len(family) == 4
    assert sorted(member.pid for member in members(here, attempt)) == sorted(family)
    cleaned = clean_up(here, attempt, kill=True)
    assert sorted(member.pid for member in cleaned.killed) == sorted(family)
    assert cleaned.left == () and cleaned.clean
    assert not any(runs(pid) for pid in family)


def test_a_process_whose_parents_are_gone_is_found_by_its_environment(
    left: Orphans, here: NodeContext, attempt: AttemptDir
) -> None:
    parent = left.start(environ_of(attempt), GRANDCHILD_OF_NOBODY)
    os.kill(parent, signal.SIGKILL)
    cleaned = clean_up(here, attempt, kill=True)
    assert len([member for member in cleaned.killed if member.pid != parent]) == 1
    assert members(here, attempt) == []


def test_stopped_processes_are_ended_too(left: Orphans, here: NodeContext, attempt: AttemptDir) -> None:
    pid = left.start(environ_of(attempt))
    os.kill(pid, signal.SIGSTOP)
    assert clean_up(here, attempt, kill=True).clean
    assert not runs(pid)


def test_others_are_left_alone(left: Orphans, here: NodeContext, attempt: AttemptDir, tmp_path: Path) -> None:
    others = [
        left.start(environ_of(here.run.attempt(4))),
        left.start(environ_of(context(tmp_path / "elsewhere" / "root").run.attempt(3))),
        left.start(environ_of(attempt, node="node1")),
        left.start({"PATH": os.environ["PATH"], "SLURMD_NODENAME": "node0", "SLURM_JOB_ID": "17"}),
    ]
    cleaned = clean_up(here, attempt, kill=True)
    assert (cleaned.killed, cleaned.left, cleaned.clean) == ((), (), True)
    assert all(runs(pid) for pid in others)


def test_without_slurm_the_mark_alone_tells(left: Orphans, here: NodeContext, attempt: AttemptDir) -> None:
    pid = left.start(environ_of(attempt, node=None))
    cleaned = clean_up(replace(here, environ={}), attempt, kill=True)
    assert [member.pid for member in cleaned.killed] == [pid]


def test_looking_kills_nothing(left: Orphans, here: NodeContext, attempt: AttemptDir) -> None:
    pid = left.start(environ_of(attempt))
    progress = attempt.progress(here.environ)
    progress.mkdir()
    cleaned = clean_up(here, attempt, kill=False)
    assert [member.pid for member in cleaned.left] == [pid]
    assert (cleaned.killed, cleaned.clean, cleaned.progress_removed) == ((), False, False)
    assert runs(pid)
    progress.rmdir()


def test_the_ranks_records_are_removed(here: NodeContext, attempt: AttemptDir) -> None:
    progress = attempt.progress(here.environ)
    progress.mkdir()
    ProgressWriter(0, 3, str(progress)).close()
    assert clean_up(here, attempt, kill=True).progress_removed
    assert not progress.exists()


def test_the_cleaner_is_never_cleaned_up(
    here: NodeContext, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "carries_mark", lambda pid, attempt, environ: pid in (os.getpid(), os.getppid()))
    assert os.getpid() not in {member.pid for member in members(here, attempt)}
    assert os.getppid() not in {member.pid for member in members(here, attempt)}


# --- what cannot be killed --------------------------------------------------------------------------------------


def fake_process(proc: Path, pid: int, *, state: str, threads: int, mark: bytes = b"", started: int = 50) -> None:
    """A process as /proc shows it (Documentation/filesystems/proc.rst)."""
    place_ = proc / str(pid)
    place_.mkdir(parents=True, exist_ok=True)
    rest = ["1", "1", "1", "0", "-1", *["0"] * 11, "20", "0"]
    fields = [state, *rest[:1], *["0"] * 15, str(threads), "0", str(started)]
    (place_ / "stat").write_text(f"{pid} (rank) 3) {' '.join(fields)} 0 0\n")
    (place_ / "environ").write_bytes(mark)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc of this test."""
    monkeypatch.setattr(module, "PROC", tmp_path / "proc")
    (tmp_path / "proc").mkdir()
    return tmp_path / "proc"


def mark_of(attempt: AttemptDir) -> bytes:
    return b"\0".join(f"{name}={value}".encode() for name, value in environ_of(attempt).items()) + b"\0"


def test_a_process_that_waits_in_a_driver_is_left_and_told(
    here: NodeContext, attempt: AttemptDir, proc: Path
) -> None:
    fake_process(proc, NO_PID, state="D", threads=1, mark=mark_of(attempt))
    cleaned = clean_up(here, attempt, kill=True, limit_s=0.0)
    (member,) = cleaned.left
    assert (member.pid, member.state, member.name) == (NO_PID, "D", "rank) 3")
    assert not cleaned.clean and cleaned.killed == ()


def test_a_zombie_of_which_a_thread_still_lives_is_left(
    here: NodeContext, attempt: AttemptDir, proc: Path
) -> None:
    """Killed by Slurm before the cleanup: it has no environment any more, but the rank's record names it."""
    fake_process(proc, NO_PID, state="Z", threads=2)
    progress = attempt.progress(here.environ)
    progress.mkdir()
    writer = ProgressWriter(0, 3, str(progress))
    record = (
        (progress / "rank-00000")
        .read_bytes()
        .replace(os.getpid().to_bytes(4, "little"), NO_PID.to_bytes(4, "little"))
    )
    (progress / "rank-00000").write_bytes(record)
    writer.close()
    for _ in range(2):  # and names it the next time as well
        assert [member.state for member in clean_up(here, attempt, kill=True, limit_s=0.0).left] == ["Z"]


def test_a_zombie_and_another_process_of_the_same_number_are_gone(
    here: NodeContext, attempt: AttemptDir, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_process(proc, NO_PID, state="Z", threads=1, mark=mark_of(attempt))
    fake_process(proc, NO_PID + 1, state="R", threads=1, mark=mark_of(attempt))

    def reuse(pid: int, _signum: int) -> None:
        fake_process(proc, pid, state="R", threads=1, started=99)

    monkeypatch.setattr(os, "kill", reuse)
    cleaned = clean_up(here, attempt, kill=True)
    assert [member.pid for member in cleaned.killed] == [NO_PID + 1]
    assert cleaned.left == ()


@pytest.mark.parametrize("text", ["", "17", "17 (x) R 1", "garbage"])
def test_what_is_no_process(proc: Path, text: str) -> None:
    (proc / "17").mkdir()
    (proc / "17" / "stat").write_text(text)
    assert read_member(17) is None


def test_this_process(here: NodeContext) -> None:
    me = read_member(os.getpid())
    assert me is not None and (me.pid, me.parent, me.is_gone) == (os.getpid(), os.getppid(), False)


# --- memory of GPUs ---------------------------------------------------------------------------------------------


def vram(here: NodeContext, gpu: int, used: int) -> None:
    pci = read_facts(here.root).gpus[gpu].pci
    (here.root / f"sys/bus/pci/devices/{pci}/mem_info_vram_used").write_text(f"{used}\n")


@pytest.fixture
def with_gpus(here: NodeContext) -> NodeContext:
    """An idle MI300X uses 283 MB (ROCm/legacy-rocm-build#4750)."""
    mi300x_pollara(here.root)
    for gpu in range(8):
        vram(here, gpu, 297_771_008)
    return here


def test_released_memory(with_gpus: NodeContext, attempt: AttemptDir) -> None:
    cleaned = clean_up(with_gpus, attempt, kill=True)
    assert (cleaned.gpu_released, cleaned.gpu_used, cleaned.clean) == (True, (297_771_008,) * 8, True)


def test_memory_that_nobody_releases_is_told(with_gpus: NodeContext, attempt: AttemptDir) -> None:
    vram(with_gpus, 5, 150 << 30)
    cleaned = clean_up(with_gpus, attempt, kill=True, limit_s=0.0)
    assert (cleaned.gpu_released, cleaned.gpu_used[5], cleaned.clean) == (False, 150 << 30, False)


def test_memory_that_takes_its_time_is_waited_for(with_gpus: NodeContext, attempt: AttemptDir) -> None:
    vram(with_gpus, 5, 150 << 30)
    looked = threading.Event()
    real = module.gpu_memory

    def gpu_memory(root: Path) -> dict[str, int]:
        used = real(root)
        if looked.is_set():
            vram(with_gpus, 5, 0)
        looked.set()
        return used

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "gpu_memory", gpu_memory)
        assert clean_up(with_gpus, attempt, kill=True).gpu_released is True


def test_gpus_that_do_not_tell(here: NodeContext, attempt: AttemptDir) -> None:
    mi300x_pollara(here.root)
    cleaned = clean_up(here, attempt, kill=True)
    assert (cleaned.gpu_released, cleaned.gpu_used, cleaned.clean) == (None, (), True)


# --- the real thing ---------------------------------------------------------------------------------------------


def test_real_ranks_write_their_stacks_and_are_ended_and_their_keepers_are_spared(tmp_path: Path) -> None:
    user = LocalUser(tmp_path)
    try:
        user.zslurm("submit", user.write_run("orphans", ranks=2, forks=False, aegis={"mode": "off"}))
        user.wait_for_step("orphans", 2)
        at = NodeContext(node="localhost", run=user.run_dir("orphans"))
        attempt = at.run.attempt(1)
        ranks = {user.rank(0).pid, user.rank(1).pid}
        assert {member.pid for member in members(at, attempt)} >= ranks
        assert dump_stacks(at, attempt).ranks == (0, 1)
        for rank in range(2):
            log = attempt.rank_log(rank)
            wait_for(partial(_has_stack_of_training, log), f"the stacks of rank {rank}")
        cleaned = clean_up(at, attempt, kill=True)
        assert cleaned.clean and {member.pid for member in cleaned.killed} >= ranks
        assert user.wait_for_end("orphans")["exit_code"] == 137, "who held the ranks lived to tell"
        assert members(at, attempt) == []
    finally:
        user.close()


def _has_stack_of_training(log: Path) -> bool:
    return " in train\n" in log.read_text()  # somewhere inside a step, between two, or at a save
