"""What follows if a rank's process is gone by its agent, and srun has not reported it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, cast

import pytest

from tests.submit.specs import run_spec
from zslurm.aegis.core.attempt import GONE
from zslurm.aegis.core.detection.attempt_progress import GONE_S
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.messages import AskAbout, Recovered
from zslurm.aegis.protocol import ProgressReport, RankProgress, Stamp
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.attempt_starter import RunningAttempt
from zslurm.aegis.supervisor.fault_collector import FaultCollector
from zslurm.aegis.supervisor.job import Job
from zslurm.core.processes import DetachedProcess
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.train.progress import Phase

NODES = ("node0", "node1")


class Quiet:
    """In place of Agents: they report nothing more."""

    def news(self) -> list[Any]:
        return []

    def ask_about(self, question: AskAbout) -> None:
        """Ask nobody."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "tiny")
    made.create(group_readable=False)
    made.attempt(1).logs.mkdir(parents=True)
    made.attempt(1).ranks.mkdir()
    return made


def _collector(tmp_path: Path, run: RunDir, events: list[dict[str, Any]]) -> FaultCollector:
    """The faults of an attempt in which rank 1 is gone since a second before srun's time is up."""
    spec = run_spec(tmp_path, slurm={"nodes": 2, "ranks_per_node": 1})

    def record(event: Event) -> None:
        events.append(event.row)

    job = Job(run, spec, {}, "local-1", 0, record)
    now, detector = time.monotonic(), Detector(spec.aegis)
    detector.begin(1, NODES, now - 60)
    for ago in range(round(GONE_S) + 1, -1, -1):
        for rank, node in enumerate(NODES):
            age = 1.0 + (round(GONE_S) + 1 - ago) * (rank == 1)  # it writes nothing any more
            row = RankProgress(rank, 100 + rank, Phase.STEP, 7, -1, age, gone=rank == 1)
            stamp = Stamp(node, 20 - ago, time.time() - ago, now - ago)
            detector.feed(ProgressReport(stamp, 1, (row,)), now - ago)
    process = DetachedProcess.adopt(run.attempt(1).path / "step.json", run.attempt(1).path / "step.exit")
    running = RunningAttempt(run.attempt(1), cast(DetachedProcess, process), NODES)
    return FaultCollector(job, running, cast(Agents, Quiet()), detector)


def test_a_rank_that_is_gone_was_killed_even_if_srun_is_silent(tmp_path: Path, run: RunDir) -> None:
    events: list[dict[str, Any]] = []
    collected = _collector(tmp_path, run, events)
    for _ in range(2):
        collected.look("")
    (fault,) = collected.state.faults
    assert (fault.kind, fault.role, fault.rank, fault.node) == ("rank_killed", "root", 1, "node1")
    assert time.time() - fault.time == pytest.approx(GONE_S + 1, abs=5), (
        "when it ended, not when srun's time was up"
    )
    assert (collected.state.lost, collected.state.failed_at is not None) == ({1}, True)
    (ended,) = [event for event in events if event["event"] == "ranks_ended"]
    assert (ended["ranks"], ended["what"], ended["by_agent"]) == ([1], GONE, True)


def test_the_last_lines_of_its_log_say_why(tmp_path: Path, run: RunDir) -> None:
    run.attempt(1).rank_log(1).write_text("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB\n")
    collected = _collector(tmp_path, run, [])
    collected.look("")
    assert [(fault.kind, fault.rank) for fault in collected.state.faults] == [("gpu_oom", 1)]


def test_a_rank_that_recorded_an_end_in_order_was_not_killed(tmp_path: Path, run: RunDir) -> None:
    run.attempt(1).rank_end(1).write_text(json.dumps({"rank": 1, "node": "node1", "exit_code": 0, "time": 1.0}))
    collected = _collector(tmp_path, run, [])
    collected.look("")
    assert (collected.state.faults, collected.state.lost, collected.state.failed_at) == ([], set(), None)


def test_what_srun_reports_first_is_all(tmp_path: Path, run: RunDir) -> None:
    run.attempt(1).step_log.write_text("srun: error: node1: task 1: Segmentation fault\n")
    collected = _collector(tmp_path, run, [])
    collected.look("")
    assert [fault.line for fault in collected.state.faults] == ["Segmentation fault"]


def test_what_srun_reports_later_replaces_the_word_of_the_agent(tmp_path: Path, run: RunDir) -> None:
    collected = _collector(tmp_path, run, [])
    collected.look("")
    run.attempt(1).step_log.write_text("srun: error: node1: task 1: Segmentation fault\n")
    collected.look("")
    assert [failure.what for failure in collected.state.failures] == ["Segmentation fault"]
    assert collected.state.lost == {1}


def test_the_next_supervisor_knows_it_and_reports_it_once(tmp_path: Path, run: RunDir) -> None:
    events: list[dict[str, Any]] = []
    _collector(tmp_path, run, events).look("")
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    again: list[dict[str, Any]] = []
    collected = _collector(tmp_path, run, again)
    collected.resume()
    collected.look("")
    assert again == []
    assert (collected.state.lost, [failure.what for failure in collected.state.failures]) == ({1}, [GONE])
    assert collected.state.failed_at is not None


def test_a_supervisor_that_died_before_it_recorded_the_fault_leaves_it_to_the_next(
    tmp_path: Path, run: RunDir
) -> None:
    events: list[dict[str, Any]] = []
    _collector(tmp_path, run, events).look("")
    kept = [event | {"time": time.time()} for event in events if event["event"] == "ranks_ended"]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in kept))
    again: list[dict[str, Any]] = []
    collected = _collector(tmp_path, run, again)
    collected.resume()
    collected.look("")
    assert [(event["event"], event["rank"]) for event in again] == [("fault_detected", 1)]
    (fault,) = collected.state.faults
    assert (fault.kind, fault.source, fault.line) == ("rank_killed", "agent", GONE)
    assert time.time() - fault.time == pytest.approx(GONE_S, abs=5)


def test_a_rank_that_ended_in_order_did_so_under_its_new_number_too(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is left out, and rank 1 is rank 0 from then on; its record was of the former number."""
    record = run.attempt(1).rank_end(1)
    record.write_text(json.dumps({"rank": 1, "node": "node1", "exit_code": 0, "time": 1.0}))
    collected = _collector(tmp_path, run, [])
    collected.look("")
    collected.tell(Recovered(frozenset({0}), frozenset({"node0"}), left_out=True))
    record.unlink()
    monkeypatch.setattr(collected.state.detector, "gone", lambda now: {0: 12.0})
    collected.look("")
    assert (collected.state.faults, collected.state.lost) == ([], set())
