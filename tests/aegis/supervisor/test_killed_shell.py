"""The supervisor is killed before and after everything that it does; another one continues from what is on disk.

Real are the supervisor's shell, the core, the files of the run and the processes that stand for srun; Slurm and
the agents are made up.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.slurm.recordings import recorded
from tests.submit.specs import run_spec
from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.following import FollowEvent, FollowState
from zslurm.aegis.core.messages import CoreEvent
from zslurm.aegis.notify.recorder import Recorder
from zslurm.aegis.supervisor import (
    attempt_starter,
    fault_collector,
    job,
    node_pool,
    recovery,
    requeue,
    supervisor,
    teardown,
)
from zslurm.core.errors import Exit, SlurmUnavailable
from zslurm.job import step as step_module
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.inventory import Node
from zslurm.slurm.jobs import JobRecord, parse_queue
from zslurm.slurm.states import JobState
from zslurm.train.jsonl import read_jsonl

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


class Killed(BaseException):
    """The supervisor is killed."""


class Moments:
    """The moments before and after everything that the supervisor does; in one of them it is killed."""

    def __init__(self) -> None:
        self.passed = 0
        self.fatal: int | None = None
        self.names: list[str] = []

    def pass_one(self, name: str) -> None:
        self.names.append(name)
        self.passed += 1
        if self.passed == self.fatal:
            raise Killed(name)

    def around(self, actions: Iterable[Any]) -> Iterator[Any]:
        for action in actions:
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
        self.record = replace(self.record, state=JobState.COMPLETING, restarts=1)

    def update(self, job_id: str, **settings: str) -> None:
        self.excluded = settings.get("ExcNodeList", self.excluded)

    def kill_step(self, job_id: str, name: str) -> None:
        raise SlurmUnavailable("scancel: not found")


class SilentAgents:
    """In place of Agents: none ever reports."""

    over = False
    attempt = 0

    def __init__(self, *_: Any) -> None:
        self.liveness = SimpleNamespace(
            any_responding=lambda: False, forget=lambda _: None, never_heard=lambda _: []
        )

    def start(self, *_: Any) -> None: ...

    def stop(self) -> None: ...

    def news(self) -> list[CoreEvent]:
        return []

    def ask(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


class Site:
    """A run in job 7, whose second rank breaks its GPU in each attempt."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory.mkdir(exist_ok=True)
        self.moments, self.slurm = Moments(), FakeSlurm()
        self.run = RunDir(directory / "runs" / "tiny")
        self.run.create(group_readable=False)
        spec = run_spec(
            directory,
            slurm={"nodes": 2, "spares": 1, "ranks_per_node": 1},
            cluster={"name": "lab", "launcher": "slurm", "gpus_per_node": 1},
            aegis={"exclude_for_s": 3600, "settle_s": 0.05, "poll_s": 0.01, "teardown_s": 0.5, "comment": False},
        )
        self.run.config.write_text(spec.model_dump_json())
        self.calls = directory / "calls"
        tools = directory / "tools"
        tools.mkdir()
        (tools / "srun").write_text(SRUN)
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
        monkeypatch.setattr(fault_collector, "_RECORDS_S", 0.0)
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

    def supervise(self, fatal: int | None = None) -> int | None:
        """Supervise the job, and again where the supervisor is killed; return the exit code."""
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


def test_whenever_the_supervisor_is_killed_nothing_is_lost_and_nothing_done_twice(
    tmp_path: Path,
) -> None:
    """GPUs break on two nodes, one after the other: a spare is used, then the job is requeued without both."""
    with pytest.MonkeyPatch.context() as patched:
        whole = Site(tmp_path / "whole", patched)
        assert whole.supervise() == Exit.INTERRUPTED
    names = whole.moments.names
    assert whole.counts["nodes_excluded"] == 2 and whole.counts["requeued"] == 1
    for number, name in enumerate(names[:-1], 1):
        with pytest.MonkeyPatch.context() as patched:
            site = Site(tmp_path / str(number), patched)
            assert site.supervise(number) == Exit.INTERRUPTED, name
        changed = {kind for kind in whole.counts | site.counts if whole.counts[kind] != site.counts[kind]}
        assert changed <= REPEATED, f"killed {name}"
        assert site.excluded == whole.excluded, f"killed {name}"
        assert site.calls.read_text().split() == ["attempt-1", "attempt-2"], f"killed {name}"
        assert (site.slurm.done, site.slurm.excluded) == (["requeue"], "node[1-2]"), f"killed {name}"


def test_damaged_events_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, monkeypatch)
    before = {"time": 1.0, "event": "nodes_excluded", "job_id": "6", "nodes": "node0", "expires": 2.0}
    site.run.events.write_text(f'{json.dumps(before)}\n{{"time": 3.0, "event": 7}}\n\n{{"time": 4.0, "ev')
    assert site.supervise() == Exit.INTERRUPTED
    named = f"{site.run.events}: 2 damaged lines are left out: what they record is missing (line 2, 4)"
    assert named in caplog.messages
    assert site.counts["requeued"] == 1
