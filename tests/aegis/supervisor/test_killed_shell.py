"""The supervisor is killed before and after everything that it does; another one continues from what is on disk.

Real are the supervisor's shell, the core, the files of the run and the processes that stand for srun; Slurm and
the agents are made up.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.slurm.recordings import recorded
from tests.submit.specs import run_spec
from zslurm.aegis.core import ending
from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.following import FollowEvent, FollowState
from zslurm.aegis.core.messages import CoreEvent, Record, ReportReceived
from zslurm.aegis.notify.recorder import Recorder
from zslurm.aegis.protocol import Answer, ProgressReport, RankProgress, Stamp
from zslurm.aegis.supervisor import (
    attempt_monitor,
    attempt_starter,
    fault_collector,
    job,
    node_pool,
    recovery,
    requeue,
    supervisor,
    teardown,
)
from zslurm.aegis.supervisor.in_memory import memory_shell
from zslurm.core.errors import Exit, SlurmUnavailable
from zslurm.job import step as step_module
from zslurm.job.in_memory.warm_step import warm_name
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.inventory import Node
from zslurm.slurm.jobs import JobRecord, parse_queue
from zslurm.slurm.states import JobState
from zslurm.train.jsonl import read_jsonl
from zslurm.train.progress import Phase
from zslurm.train.recovery.generation import Generation, recovered

SETTINGS = {"exclude_for_s": 3600, "settle_s": 0.05, "poll_s": 0.01, "teardown_s": 0.5, "comment": False}
NODES = [f"node{number}" for number in range(5)]
SRUN = """#!/bin/sh
for word in "$@"; do
    case $word in
    --job-name=attempt-*) number=${word#--job-name=attempt-} ;;
    --output=*) logs=$(dirname "${word#--output=}") ;;
    esac
done
echo "attempt-$number" >> "$CALLS"
node=$(sed -n 2p "$SLURM_HOSTFILE")
echo "amdgpu: 1 uncorrectable hardware errors detected in gfx block" > "$logs/rank-00001.log"
echo "srun: error: $node: task 1: Killed"
exec sleep 600
"""


IN_MEMORY = """#!/bin/sh
for word in "$@"; do
    case $word in --output=*warm-*) warm=1 ;; esac
done
if [ -n "$warm" ]; then echo warm >> "$CALLS"; else echo ranks >> "$CALLS"; fi
until [ -e "$CALLS.done" ]; do
    if [ -z "$warm$told" ] && [ -e "$CALLS.kill" ]; then
        told=1
        echo "srun: error: node1: task 1: Killed"
    fi
    sleep 0.1
done
"""
"""The ranks, of which the second is killed once that is asked for; or warm processes."""


class Killed(BaseException):
    """The supervisor is killed."""


class Moments:
    """The moments before and after everything that the supervisor does; in one of them it is killed."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.fatal = ("", 0)

    def pass_one(self, name: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.passed[name] += 1
        if self.fatal == (name, self.passed[name]):
            raise Killed(name)

    @property
    def every(self) -> list[tuple[str, int]]:
        """Each moment so far, by its name and how often there was one of this name before it and with it."""
        return [(name, number) for name, count in self.passed.items() for number in range(1, count + 1)]

    def around(self, actions: Iterable[Any]) -> Iterator[Any]:
        for action in actions:
            if isinstance(action, Record):  # its event counts
                yield action
                continue
            self.pass_one(f"before {type(action).__name__}")
            yield action
            self.pass_one(f"after {type(action).__name__}")


class FakeSlurm(SlurmClient):
    """A Slurm with job 7 on three nodes of five."""

    def __init__(self) -> None:
        super().__init__({"PATH": "/nowhere"})
        running = parse_queue(recorded.SQUEUE)["4"]
        self.record = replace(
            running, job_id="7", state=JobState.RUNNING, restarts=0, end_time=None, nodes="node[0-2]"
        )
        self.excluded = ""
        self.done: list[str] = []

    def can_control(self) -> bool:
        return True

    def queue(self, job_ids: object = None, user: str | None = None) -> dict[str, JobRecord]:
        return {"7": self.record}

    def nodes(self) -> list[Node]:
        return [Node(name, "idle", frozenset(), 8, None, 96, 1, ("main",), "") for name in NODES]

    def excluded_nodes(self, job_id: str) -> str:
        return self.excluded

    def requeue(self, job_id: str) -> None:
        self.done.append("requeue")
        self.record = replace(self.record, state=JobState.COMPLETING, restarts=self.record.restarts + 1)

    def update(self, job_id: str, **settings: str) -> None:
        self.excluded = settings.get("ExcNodeList", self.excluded)

    def kill_step(self, job_id: str, name: str) -> None:
        raise SlurmUnavailable("scancel: not found")


class SilentAgents:
    """In place of Agents: none ever reports."""

    over = False
    attempt = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.liveness = SimpleNamespace(
            any_responding=lambda: False, forget=lambda _: None, never_heard=lambda _: []
        )

    def start(self, *_: Any) -> None: ...

    def stop(self) -> None: ...

    def news(self) -> list[CoreEvent]:
        return []

    def ask(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


class Server:
    """A store server that outlives supervisors: every generation comes about at once.

    It has the second rank killed once node0 was left, and the run complete once that rank was replaced.
    """

    def __init__(self, run: RunDir, calls: Path) -> None:
        self.run, self.calls = run, calls
        self.generations: list[Generation] = [Generation(0, ("node0/0", "node1/0"))]
        self.asked: list[str] = []
        self.warm: list[str] = []

    @property
    def outcome(self) -> dict[str, Any] | None:
        newest = self.generations[-1].number
        return recovered(newest, 7, 0, 0.5) if newest else None

    def look(self) -> list[dict[str, Any]]:
        """Let happen what is due; return the warm processes that are new."""
        attempt, known = self.run.attempt(1), list(self.warm)
        for described in sorted(attempt.path.glob("warm-*.step")):
            step = json.loads(described.read_text())
            names = [warm_name(node, step["first"], task) for task, node in enumerate(step["nodes"])]
            if described.with_suffix(".json").exists():
                self.warm += [name for name in names if name not in self.warm]
        kinds = {row["event"] for row in read_jsonl(self.run.events)}
        if "ranks_moved" in kinds:
            Path(f"{self.calls}.kill").touch()
        if "recovered_in_memory" in kinds and not Path(f"{self.calls}.done").exists():
            for rank in range(2):
                end = {"rank": rank, "node": NODES[rank], "exit_code": 0, "time": time.time()}
                attempt.rank_end(rank).write_text(json.dumps(end))
            Path(f"{self.calls}.done").touch()
        return [{"event": "warm", "member": name} for name in self.warm if name not in known]


class Client:
    """In place of StoreClient: a connection of one supervisor to the server."""

    has_ended = never_listened = False

    def __init__(self, server: Server) -> None:
        self._server, self._reports = server, list[dict[str, Any]]()

    def generation(self, generation: Generation, *, what: str = "generation") -> bool:
        self._server.asked.append(f"{what} {generation.number}")
        self._server.generations.append(generation)
        self._reports.append(recovered(generation.number, 7, 0, 0.5))
        return True

    def move(self, generation: Generation) -> bool:
        self._reports.append({"event": "boundary", "number": generation.number, "step": 7})
        return self.generation(generation, what="move")

    def poll(self) -> list[dict[str, Any]]:
        reports, self._reports = self._reports, []
        return [*self._server.look(), *reports]

    def taken_over(self, _timeout_s: float) -> dict[str, Any]:
        self._server.look()
        *_, before, newest = [None, None, *map(asdict, self._server.generations[1:])]
        if before is None and newest is not None:
            before = asdict(self._server.generations[0])
        about = {"newest": newest, "before": before, "move": None, "unmoved": 0}
        return {**about, "outcome": self._server.outcome, "warm": list(self._server.warm)}

    def stop(self) -> None: ...


class Reporters(SilentAgents):
    """In place of Agents: each node reports that its rank trains, and that it is well."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.liveness.any_responding = lambda: True
        self._number = 0

    def news(self) -> list[CoreEvent]:
        self._number += 1
        now = time.monotonic()
        rows = [(RankProgress(rank, 10 + rank, Phase.STEP, 7, -1, 0.0),) for rank in range(2)]
        reports = [
            ProgressReport(Stamp(node, self._number, time.time(), now), 1, row)
            for node, row in zip(NODES[:3], [*rows, ()], strict=True)
        ]
        return [ReportReceived(report, now, time.time()) for report in reports]

    def ask(self, do: str, nodes: Sequence[str] = (), **_: Any) -> dict[str, Any]:
        return {node: Answer(Stamp(node, 1, 1.0, 1.0), 1, True) for node in nodes} if do == "check" else {}

    def ask_about(self, _question: object) -> None: ...


class Site:
    """A run in job 7, whose second rank breaks its GPU in each attempt."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, srun: str = SRUN, **aegis: Any) -> None:
        directory.mkdir(exist_ok=True)
        self.moments, self.slurm = Moments(), FakeSlurm()
        self.run = RunDir(directory / "runs" / "tiny")
        self.run.create(group_readable=False)
        spec = run_spec(
            directory,
            slurm={"nodes": 2, "spares": 1, "ranks_per_node": 1},
            cluster={"name": "lab", "launcher": "slurm", "gpus_per_node": 1},
            aegis={**SETTINGS, **aegis},
        )
        self.run.config.write_text(spec.model_dump_json())
        self.calls = directory / "calls"
        tools = directory / "tools"
        tools.mkdir()
        (tools / "srun").write_text(srun)
        (tools / "srun").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        monkeypatch.setenv("CALLS", str(self.calls))
        self.environ = {
            **os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-2]", "SLURM_JOB_PARTITION": "main"
        }  # fmt: skip
        for module in (attempt_starter, job, node_pool, requeue, step_module):
            monkeypatch.setattr(module, "SlurmClient", lambda *_, **__: self.slurm)
        monkeypatch.setattr(attempt_starter, "prepare", lambda *about: Interpreter.own(self.environ))
        monkeypatch.setattr(supervisor, "Agents", SilentAgents)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(ending, "_RECORDS_S", 0.0)
        monkeypatch.setattr(teardown, "_FIRST_REPORT_S", 0.0)
        self._watch(monkeypatch)

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count the moments before and after each action of the core, and each record."""
        step, follow, record = fault_collector.step, recovery.follow, Recorder.record

        def watched_step(state: AttemptState, event: CoreEvent) -> tuple[AttemptState, Iterator[Any]]:
            _, actions = step(state, event)
            return state, self.moments.around(actions)

        def watched_follow(state: FollowState, event: FollowEvent) -> Iterator[Any]:
            return self.moments.around(follow(state, event))

        def watched_record(recorder: Recorder, event: Event) -> None:
            self.moments.pass_one(f"before {event.NAME}")
            record(recorder, event)
            self.moments.pass_one(f"after {event.NAME}")

        monkeypatch.setattr(fault_collector, "step", watched_step)
        monkeypatch.setattr(recovery, "follow", watched_follow)
        monkeypatch.setattr(Recorder, "record", watched_record)

    def supervise(self, fatal: tuple[str, int] = ("", 0)) -> int | None:
        """Supervise the job, and again if the supervisor is killed in the moment `fatal`; return the exit code."""
        self.moments.fatal = fatal
        try:
            return supervisor.Supervisor(self.run, self.environ).supervise()
        except Killed:
            return supervisor.Supervisor(self.run, self.environ).supervise()

    @property
    def counts(self) -> Counter[str]:
        """How often each kind of event was recorded."""
        return Counter(str(row["event"]) for row in read_jsonl(self.run.events))

    @property
    def excluded(self) -> list[tuple[str, int]]:
        """The nodes that were excluded, and the minutes for which."""
        rows = [row for row in read_jsonl(self.run.events) if row["event"] == "nodes_excluded"]
        return [(row["nodes"], round((row["expires"] - row["time"]) / 60)) for row in rows]


REPEATED = {"supervisor_started", "attempt_cleared"}
"""What another supervisor does again: it looks again whether every process is gone."""


def test_whenever_the_supervisor_is_killed_nothing_is_lost_and_nothing_repeated(tmp_path: Path) -> None:
    """GPUs break on two nodes, one after the other: a spare is used, then the job is requeued without both."""
    with pytest.MonkeyPatch.context() as patched:
        whole = Site(tmp_path / "whole", patched)
        assert whole.supervise() == Exit.INTERRUPTED
    assert whole.counts["nodes_excluded"] == 2 and whole.counts["requeued"] == 1
    for number, name in enumerate(whole.moments.every):
        if name == ("after run_ended", 1):  # its exit code is not there yet: the end is recorded again
            continue
        with pytest.MonkeyPatch.context() as patched:
            site = Site(tmp_path / str(number), patched)
            assert site.supervise(name) == Exit.INTERRUPTED, name
        changed = {kind for kind in whole.counts | site.counts if whole.counts[kind] != site.counts[kind]}
        assert changed <= REPEATED, f"killed {name}"
        assert site.excluded == whole.excluded, f"killed {name}"
        assert site.calls.read_text().split() == ["attempt-1", "attempt-2"], f"killed {name}"
        assert (site.slurm.done, site.slurm.excluded) == (["requeue"], "node[1-2]"), f"killed {name}"


def site_on_excluded_nodes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A job that was requeued without two nodes once, and that Slurm has started on them nevertheless."""
    site = Site(directory, monkeypatch)
    site.environ["SLURM_RESTART_COUNT"] = "1"
    site.slurm.record = replace(site.slurm.record, restarts=1)
    about = {"job_id": "7", "attempt": 1}
    excluded = {"event": "nodes_excluded", "nodes": "node[1-2]", "reason": "so", "expires": time.time() + 3600}
    requeued = {"event": "requeued", "excluded": "node[1-2]", "reason": "so", "restart": 0}
    rows = [{"time": time.time(), **about, **row} for row in (excluded, requeued)]
    site.run.events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return site


def test_whenever_the_supervisor_is_killed_a_job_on_excluded_nodes_is_requeued_once(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        whole = site_on_excluded_nodes(tmp_path / "whole", patched)
        assert whole.supervise() == Exit.INTERRUPTED
    assert (whole.counts["requeued"], whole.counts["attempt_started"]) == (2, 0)
    for number, name in enumerate(whole.moments.every):
        if name == ("after run_ended", 1):  # its exit code is not there yet: the end is recorded again
            continue
        with pytest.MonkeyPatch.context() as patched:
            site = site_on_excluded_nodes(tmp_path / str(number), patched)
            assert site.supervise(name) == Exit.INTERRUPTED, name
        changed = {kind for kind in whole.counts | site.counts if whole.counts[kind] != site.counts[kind]}
        assert changed <= REPEATED, f"killed {name}"
        assert (site.slurm.done, site.slurm.excluded) == (["requeue"], "node[1-2]"), f"killed {name}"
        assert not site.calls.exists(), f"killed {name}"


def site_in_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Site, Server]:
    """A run that a person asks to leave node0, and whose second rank is killed then."""
    site = Site(directory, monkeypatch, IN_MEMORY, recovery="memory", recovery_s=60)
    server = Server(site.run, site.calls)
    asked = {"time": time.time(), "event": "move", "job_id": "7", "user": "u", "off": "node0", "request": "r1"}
    site.run.submissions.write_text(json.dumps(asked) + "\n")
    made = SimpleNamespace(start=lambda *_, **__: Client(server), adopt=lambda _: Client(server))
    monkeypatch.setattr(attempt_starter, "StoreClient", made)
    monkeypatch.setattr(memory_shell, "StoreClient", made)
    monkeypatch.setattr(attempt_starter, "prepared", lambda *_: Interpreter.own(site.environ))
    monkeypatch.setattr(attempt_starter, "rendezvous_host", lambda _: "node0")
    monkeypatch.setattr(supervisor, "Agents", Reporters)
    monkeypatch.setattr(attempt_monitor, "_WATCHFUL_S", 0.01)
    return site, server


def test_whenever_the_supervisor_is_killed_ranks_are_replaced_and_moved_once(tmp_path: Path) -> None:
    """The ranks leave a node as planned, then a rank is killed and replaced in memory."""
    kinds = ("nodes_excluded", "ranks_moved", "ranks_ended", "fault_detected", "recovered_in_memory", "decision")
    with pytest.MonkeyPatch.context() as patched:
        whole, server = site_in_memory(tmp_path / "whole", patched)
        assert whole.supervise() == Exit.DONE
    assert (server.asked, whole.counts["ranks_moved"]) == (["move 1", "generation 2"], 1)
    for number, name in enumerate(whole.moments.every):
        if name[1] > 1:  # one moment of each kind is enough
            continue
        with pytest.MonkeyPatch.context() as patched:
            site, again = site_in_memory(tmp_path / str(number), patched)
            assert site.supervise(name) == Exit.DONE, name
        assert again.asked == server.asked, f"killed {name}"
        assert {kind: site.counts[kind] for kind in kinds} == {kind: whole.counts[kind] for kind in kinds}, name
        assert site.excluded == whole.excluded, f"killed {name}"
        assert site.calls.read_text().split().count("ranks") == 1, f"killed {name}"


def test_damaged_events_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, monkeypatch)
    before = {"time": 1.0, "event": "nodes_excluded", "job_id": "6", "nodes": "node0", "expires": 2.0}
    site.run.events.write_text(f'{json.dumps(before)}\n{{"time": 3.0, "event": 7}}\n\n{{"time": 4.0, "ev')
    assert site.supervise() == Exit.INTERRUPTED
    named = f"{site.run.events}: 2 damaged lines are left out: what they record is missing (lines 2, 4)"
    assert named in caplog.messages
    assert site.counts["requeued"] == 1
