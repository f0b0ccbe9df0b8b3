"""What follows if torch cannot resolve a name before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.submit.specs import run_spec
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.logs.name_lookups import failed_lookups
from zslurm.aegis.protocol import ProgressReport, RankProgress, Stamp
from zslurm.aegis.supervisor import fault_collector
from zslurm.aegis.supervisor.attempt_starter import RunningAttempt
from zslurm.aegis.supervisor.fault_collector import FaultCollector
from zslurm.aegis.supervisor.job import Job
from zslurm.core.processes import DetachedProcess
from zslurm.run.run_dir import RunDir
from zslurm.train.progress import Phase

WARNING = "The IPv6 network addresses of ({name}, 29511) cannot be retrieved (gai error: {reason})."
UNKNOWN = "-2 - Name or service not known"
TIMED_OUT = "The client socket has timed out after 40000ms while trying to connect to (node9, 29511)."


def torch_line(ago: float, text: str, level: str = "W", source: str = "socket.cpp:764") -> str:
    """A line as torch 2.13 writes it, in a rank's log."""
    written = time.strftime("%m%d %H:%M:%S", time.localtime(time.time() - ago))
    return f"[rank3]:[{level}{written}.460675212 {source}] [c10d] {text}\n"


def tries(*ago: float, name: str = "node9", reason: str = UNKNOWN) -> str:
    return "".join(torch_line(each, WARNING.format(name=name, reason=reason)) for each in ago)


def in_vain(log: str) -> tuple[str, str, int] | None:
    failed = failed_lookups(log.encode().splitlines())
    return failed and (failed.name, failed.reason, round(failed.last - failed.first))


@pytest.mark.parametrize("name", ["node9", "node9.cluster.example"])
def test_the_tries_at_the_end_of_a_log_count_from_the_first(name: str) -> None:
    log = "starting\n" + tries(71, 70, 40, 5, name=name)
    assert in_vain(log) == (name, f"gai error: {UNKNOWN}", 66)


def test_a_series_that_timed_out_and_the_next_are_one() -> None:
    """As torch 2.13 goes on after `timeout`."""
    log = (
        tries(100, 80)
        + torch_line(80, TIMED_OUT, "E", "socket.cpp:1028")
        + torch_line(
            80,
            f"TCP client failed to connect to node9:29511 - retrying (try=0): {TIMED_OUT}",
            source="TCPStore.cpp:340",
        )
        + "Exception raised from throwTimeoutError at /pytorch/socket.cpp:1030 (most recent call first):\n"
        + "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f7a in libc10.so)\n\n"
        + tries(36, reason="-3 - Temporary failure in name resolution")
    )
    assert in_vain(log) == ("node9", "gai error: -3 - Temporary failure in name resolution", 64)


@pytest.mark.parametrize(
    "after",
    [
        "loading the data\n",
        "torch.distributed.DistNetworkError: The client socket has timed out\n",
        "[W socket.cpp:426] [c10d] The IPv6 network addresses of (n, 1) cannot be retrieved (gai error: -2 - N)\n",
    ],
)  # fmt: skip
def test_none_is_in_vain_if_the_log_went_on_or_has_no_times(after: str) -> None:
    assert in_vain(("" if "gai" in after else tries(90, 10)) + after) is None


def test_a_name_that_only_has_no_ipv6_address_is_resolved() -> None:
    """Its host does not listen yet."""
    refused = "The client socket has failed to connect to [10.0.0.7]:29511 (errno: 111 - Connection refused)."
    log = "".join(tries(ago) + torch_line(ago, refused, source="socket.cpp:752") for ago in (90, 50, 10))
    assert in_vain(log) is None
    assert in_vain(log + tries(5)) == ("node9", f"gai error: {UNKNOWN}", 0), "not from the first on"


def test_tries_for_another_name_are_another_fault() -> None:
    assert in_vain(tries(90, 60, name="node8") + tries(50, 40)) == ("node9", f"gai error: {UNKNOWN}", 10)


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FaultCollector]:
    monkeypatch.setattr(fault_collector, "_LOOKUPS_EVERY_S", 0.0)
    run = RunDir(tmp_path / "runs" / "tiny")
    run.create(group_readable=False)
    run.attempt(1).logs.mkdir(parents=True)
    run.attempt(1).ranks.mkdir()

    def make(nodes: int = 2) -> FaultCollector:
        spec = run_spec(tmp_path, slurm={"nodes": nodes, "ranks_per_node": 2})
        job = Job(run, spec, {}, "local-1", 0, lambda event: None)
        detector, names = Detector(spec.aegis), tuple(f"node{number}" for number in range(nodes))
        detector.begin(1, [name for name in names for _ in range(2)], time.monotonic())
        process = DetachedProcess.adopt(run.attempt(1).path / "step.json", run.attempt(1).path / "step.exit")
        running = RunningAttempt(run.attempt(1), cast(DetachedProcess, process), names)
        return FaultCollector(job, running, None, detector)

    return make


def collect(collected: FaultCollector, times: int = 1) -> list[Any]:
    for _ in range(times):
        collected.look("")
    return [(fault.kind, fault.role, fault.scope, fault.node, fault.rank) for fault in collected.state.faults]


def test_it_is_a_fault_of_the_network_once_on_each_node(collector: Callable[..., FaultCollector]) -> None:
    collected = collector()
    collected.attempt.rank_log(2).write_text(tries(70, 65, 30, 2))
    assert collect(collected, 2) == [("net_config", "root", "node", "node1", None)]
    (fault,) = collected.state.faults
    assert fault.line == f"torch has tried for 68 s to resolve the name node9: gai error: {UNKNOWN}"
    assert time.time() - fault.time == pytest.approx(70, abs=5)


def test_not_before_aegis_tolerate_s(collector: Callable[..., FaultCollector]) -> None:
    collected = collector()
    collected.attempt.rank_log(2).write_text(tries(50, 45, 30, 2))
    assert collect(collected) == []


def test_not_after_the_first_step(collector: Callable[..., FaultCollector]) -> None:
    collected, now = collector(), time.monotonic()
    row = RankProgress(0, 100, Phase.STEP, 0, -1, 0.1)
    collected.state.detector.feed(ProgressReport(Stamp("node0", 1, time.time(), now), 1, (row,)), now)
    collected.attempt.rank_log(2).write_text(tries(70, 65, 30, 2))
    assert collect(collected) == []


def test_of_many_nodes_all_are_looked_at_one_after_the_other(collector: Callable[..., FaultCollector]) -> None:
    collected = collector(nodes=130)
    collected.attempt.rank_log(2 * 129).write_text(tries(70, 65, 30, 2))
    assert [each[3] for each in collect(collected, 3)] == ["node129"]
