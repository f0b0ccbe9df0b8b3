"""Spare nodes read the newest checkpoint into their page cache, and stop when they are used."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.aegis.agent_process import AgentProcess, make_run
from tests.aegis.contexts import context
from tests.fake_sysfs import FakeNode
from tests.waiting import wait_for
from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.agent.spare_warmer import Pace, SpareWarmer, Warmed, read_through
from zslurm.aegis.protocol import AgentReport, Command
from zslurm.config.aegis import AegisSection
from zslurm.hardware.page_cache import drop, resident
from zslurm.run.run_dir import RunDir
from zslurm.train.progress import ProgressWriter

MIB = 1 << 20
SHARDS = 3


def spare(tmp_path: Path, *, launcher: str = "slurm", available_mib: int = 1 << 10) -> NodeContext:
    """node0, of a job whose attempts use node1 alone."""
    node = FakeNode(tmp_path / "root")
    node.write("proc/meminfo", f"MemTotal: {1 << 30} kB\nMemAvailable: {available_mib << 10} kB")
    at = context(node.root, cluster={"launcher": launcher}, period_s=0.02)
    for number in (1, 2):
        describe(at.run, number, "node1")
    return at


def describe(run: RunDir, number: int, nodes: str) -> None:
    run.attempt(number).path.mkdir(parents=True)
    run.attempt(number).description.write_text(json.dumps({"nodes": nodes}))


def checkpoint(run: RunDir, name: str, *, mib: int = 1) -> list[Path]:
    """A checkpoint of three shards that no memory holds; returns them."""
    directory = run.checkpoints / name
    directory.mkdir()
    (directory / "manifest.json").write_text("{}")
    shards = [directory / f"shard-{rank:05d}-of-{SHARDS:05d}.safetensors" for rank in range(SHARDS)]
    for shard in shards:
        shard.write_bytes(os.urandom(mib * MIB))
        drop(shard)
    if any(map(resident, shards)):
        pytest.skip("the temporary directory is in memory: its files cannot be put out of the page cache")
    return shards


class Waits(threading.Event):
    """Notes the last wait, and is not waited for unless `real`."""

    last, real = 0.0, False

    def wait(self, timeout: float | None = None) -> bool:
        self.last = timeout or 0.0
        return super().wait(timeout if self.real else 0)


def warmer(at: NodeContext, attempt: Callable[[], int] = lambda: 1, **options: Any) -> SpareWarmer:
    return SpareWarmer(at, attempt, options.get("stop", threading.Event()), options.get("done", lambda done: None))


def test_a_spare_reads_the_whole_checkpoint_once(tmp_path: Path) -> None:
    at = spare(tmp_path)
    shards = checkpoint(at.run, "step-00000400")
    reader = warmer(at)
    done = reader.look()
    assert done is not None
    assert (done.step, done.bytes, done.of) == (400, 3 * MIB + 2, 3 * MIB + 2)
    assert [resident(shard) for shard in shards] == [MIB] * SHARDS
    assert reader.look() is None


def test_it_turns_to_a_newer_checkpoint_and_to_a_step_that_was_saved_again(tmp_path: Path) -> None:
    at = spare(tmp_path)
    old = checkpoint(at.run, "step-00000400")
    reader = warmer(at)
    assert reader.look() is not None
    for shard in old:
        drop(shard)
    new = checkpoint(at.run, "step-00000800")
    done = reader.look()
    assert done is not None and done.step == 800
    assert all(map(resident, new)) and not any(map(resident, old))
    os.utime(new[0].with_name("manifest.json"), (5, 5))
    again = reader.look()
    assert again is not None and again.step == 800


def test_only_spares_of_a_slurm_job_read(tmp_path: Path) -> None:
    at = spare(tmp_path)
    shards = checkpoint(at.run, "step-00000400")
    describe(at.run, 3, "node[0-1]")
    for attempt in (0, 3, 4):  # none yet, one with ranks here, one whose description is not there
        assert warmer(at, lambda attempt=attempt: attempt).look() is None
    assert warmer(spare(tmp_path / "local", launcher="local")).look() is None
    assert not any(map(resident, shards))


def test_it_stops_in_the_middle_of_a_file_when_an_attempt_uses_the_node(tmp_path: Path) -> None:
    at = spare(tmp_path)
    describe(at.run, 3, "node0")
    shards = checkpoint(at.run, "step-00000400", mib=8)  # two blocks each
    looks = iter([1] * 4)  # before the look, both reads of the manifest, and the first block
    assert warmer(at, lambda: next(looks, 3)).look() is None
    assert not any(map(resident, shards[1:]))


def test_it_stops_when_the_node_is_checked_until_another_attempt_begins(tmp_path: Path) -> None:
    at = spare(tmp_path)
    checkpoint(at.run, "step-00000400")
    attempt = [1]
    reader = warmer(at, lambda: attempt[0])
    reader.halt()
    assert reader.look() is None
    attempt[0] = 2
    assert reader.look() is not None


def test_it_does_not_read_beside_a_rank_that_came_in_mid_attempt(tmp_path: Path) -> None:
    at = spare(tmp_path)
    checkpoint(at.run, "step-00000400")
    records = at.run.attempt(1).progress(at.environ)
    records.mkdir()
    writer = ProgressWriter(1, 1, str(records))
    try:
        assert warmer(at).look() is None
    finally:
        writer.close()
        shutil.rmtree(records)
    assert warmer(at).look() is not None


def test_shards_that_do_not_fit_are_left(tmp_path: Path) -> None:
    at = spare(tmp_path, available_mib=5)  # of which half may be used
    shards = checkpoint(at.run, "step-00000400")
    done = warmer(at).look()
    assert done is not None and (done.bytes, done.of) == (2 * MIB + 2, 3 * MIB + 2)
    assert [bool(resident(shard)) for shard in shards] == [True, True, False]


def test_a_checkpoint_that_is_pruned_meanwhile_is_given_up(tmp_path: Path) -> None:
    at = spare(tmp_path)
    shards = checkpoint(at.run, "step-00000400")
    shards[0].with_name("manifest.json").unlink()
    assert warmer(at).look() is None
    shards[0].unlink()
    with pytest.raises(FileNotFoundError):
        read_through(shards[0], lambda: True, Pace(1e12, threading.Event()))


def test_all_spares_of_a_job_share_the_rate(tmp_path: Path) -> None:
    """Waits are counted, not timed: at 1 kB/s, what the reading itself takes does not matter."""
    node = spare(tmp_path)
    checkpoint(node.run, "step-00000400")
    waits = []
    for nodes in ("node[0-1]", "node[0-4]"):  # one spare, and four
        stop = Waits()
        aegis = {"sensors": {"period_s": 0.02}, "warm_spares_gb_s": 1e-6}
        at = replace(node, environ={"SLURM_JOB_NODELIST": nodes}, aegis=AegisSection.model_validate(aegis))
        assert warmer(at, stop=stop).look() is not None
        waits.append(stop.last)
    assert waits == [pytest.approx(3 * MIB / 1e3, rel=0.05), pytest.approx(4 * 3 * MIB / 1e3, rel=0.05)]


def test_a_wait_for_the_rate_ends_with_the_agent(tmp_path: Path) -> None:
    at = spare(tmp_path)
    aegis = {"sensors": {"period_s": 0.02}, "warm_spares_gb_s": 1e-12}
    at = replace(at, aegis=AegisSection.model_validate(aegis))
    checkpoint(at.run, "step-00000400")
    stop = Waits()
    stop.real = True
    warmer(at, stop=stop).start()
    wait_for(lambda: stop.last > 100, "a long wait")
    stop.set()
    wait_for(lambda: "warm-spare" not in [thread.name for thread in threading.enumerate()], "the thread's end")


def test_an_agent_reads_on_its_spare_and_reports_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, cluster={"launcher": "slurm"})
    shards = checkpoint(run, "step-00000400")
    describe(run, 1, "node[1-2]")
    agent = AgentProcess.here(run)
    try:
        agent.beat(attempt=1)
        report = agent.wait_for(AgentReport, lambda report: report.event == "warmed")
        assert Warmed(**report.values).bytes == Warmed(**report.values).of
        assert all(map(resident, shards))
        agent.send(Command("check", id=1))
        agent.answer(1)
        new = checkpoint(run, "step-00000800")
        agent.beat(attempt=1)
        agent.send(Command("quit"))
        agent.wait()
        assert not any(map(resident, new))
    finally:
        agent.close()


def test_it_is_off_by_a_setting(tmp_path: Path) -> None:
    run = make_run(tmp_path, cluster={"launcher": "slurm"}, aegis={"warm_spares": False})
    checkpoint(run, "step-00000400")
    describe(run, 1, "node[1-2]")
    agent = AgentProcess.here(run)
    try:
        agent.beat(attempt=1)
        agent.fresh_progress(10)
        status = Path(f"/proc/{agent.process.pid}/task")
        assert "warm-spare" not in [(task / "comm").read_text().strip() for task in status.iterdir()]
        agent.send(Command("quit"))
        agent.wait()
        assert "warmed" not in agent.events()
    finally:
        agent.close()


def test_its_thread_ends_with_the_agent(tmp_path: Path) -> None:
    at, stop, done = spare(tmp_path), threading.Event(), list[Warmed]()
    checkpoint(at.run, "step-00000400")
    reader = warmer(at, stop=stop, done=done.append)
    reader.start()
    wait_for(lambda: done, "the checkpoint to be read")
    stop.set()
    wait_for(lambda: "warm-spare" not in [thread.name for thread in threading.enumerate()], "the thread's end")


def test_an_excluded_node_reads_nothing(tmp_path: Path) -> None:
    at = spare(tmp_path)
    checkpoint(at.run, "step-00000400")
    row = {"time": time.time(), "event": "nodes_excluded", "job_id": "7", "nodes": "node0", "reason": "its NIC"}
    at.run.events.write_text(json.dumps(row) + "\n")
    assert warmer(at).look() is None


def test_a_node_that_is_excluded_in_mid_attempt_reads_nothing_any_more(tmp_path: Path) -> None:
    at = spare(tmp_path)
    checkpoint(at.run, "step-00000400")
    reader = warmer(at)
    assert reader.look() is not None
    row = {"time": time.time(), "event": "nodes_excluded", "job_id": "7", "nodes": "node0", "reason": "its NIC"}
    at.run.events.write_text(json.dumps(row) + "\n")
    checkpoint(at.run, "step-00000500")
    assert reader.look() is None
