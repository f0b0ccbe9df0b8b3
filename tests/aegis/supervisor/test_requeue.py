"""The requeue from inside the job: done once, whatever Slurm answers; never of a job that was cancelled.

What Slurm says is scripted here; tests/on_slurm has a real one.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.recordings import recorded
from tests.submit.specs import run_spec
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.requeue import requeue_job
from zslurm.aegis.types import Decision, Fault
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.run.events import Cancelled, Submitted
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.inventory import Node
from zslurm.slurm.jobs import JobRecord, parse_queue
from zslurm.slurm.states import JobState
from zslurm.submit.submit import record_action
from zslurm.train.jsonl import JsonLinesWriter

RECORD = replace(parse_queue(recorded.SQUEUE)["4"], job_id="12", state=JobState.RUNNING, restarts=0, end_time=None)
TIMED_OUT = SlurmUnavailable("scontrol requeue: Socket timed out on send/recv operation; it may have been done")
AWAY = SlurmUnavailable("the Slurm controller does not answer (2 tries): squeue: error: Unable to contact")
DECISION = Decision("requeue", "so")


class ScriptedSlurm(SlurmClient):
    """A Slurm with one job. Errors in `fails` are raised once each, by name; those of `unseen` after the deed."""

    def __init__(self) -> None:
        super().__init__({"PATH": "/nowhere"})
        self.record = RECORD
        self.down: set[str] = set()
        self.hides_nodes = False
        self.done: list[tuple[str, ...]] = []
        self.fails: dict[str, list[Exception]] = {}
        self.unseen: dict[str, list[Exception]] = {}
        self.handlers: list[object] = []
        self.excluded = "node8"

    def can_control(self) -> bool:
        return True

    def _fail(self, name: str, errors: dict[str, list[Exception]]) -> None:
        if errors.get(name):
            raise errors[name].pop(0)

    def _requeue(self, name: str, becomes: JobState) -> None:
        self._fail(name, self.fails)
        if self.record.state is not JobState.RUNNING:
            raise SlurmRefused(f"scontrol {name}: Job is pending execution for job 12")
        self.done.append((name, "12"))
        self.handlers.append(signal.getsignal(signal.SIGTERM))
        self.record = replace(self.record, state=becomes, restarts=self.record.restarts + 1)
        self._fail(name, self.unseen)

    def queue(self, job_ids: object = None, user: str | None = None) -> dict[str, JobRecord]:
        self._fail("queue", self.fails)
        return {"12": self.record}

    def excluded_nodes(self, job_id: str) -> str:
        return self.excluded

    def nodes(self) -> list[Node]:
        if self.hides_nodes:
            raise SlurmRefused("sinfo: slurm_load_node: Access/permission denied")
        return [
            Node(name, "down" if name in self.down else "idle", frozenset(), 8, None, 96, 1, ("main",), "")
            for name in ("node0", "node1", "node2")
        ]

    def scontrol_config(self) -> dict[str, str]:
        return {"SlurmdTimeout": "300 sec"}

    def requeue(self, job_id: str) -> None:
        self._requeue("requeue", JobState.COMPLETING)

    def update(self, job_id: str, **settings: str) -> None:
        self._fail("update", self.fails)
        self.done.append(("update", job_id, *(f"{name}={value}" for name, value in settings.items())))
        self.excluded = settings.get("ExcNodeList", self.excluded)


class Requeuer:
    """A supervisor's part of job 12 on node0 to node2, and its time."""

    def __init__(self, directory: Path) -> None:
        spec = run_spec(directory, cluster={"name": "lab", "launcher": "slurm", "gpus_per_node": 8})
        run = RunDir(directory / "runs" / "tiny")
        run.create(group_readable=False)
        record_action(run, Submitted(job_id="12"), spec)
        self.slurm = ScriptedSlurm()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.job = Job(run, spec, {}, "12", 0, lambda event: self.events.append((event.NAME, event.fields())))
        self.slept_s = 0.0
        self.while_asleep: Callable[[], None] = lambda: None

    def _sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.while_asleep()

    def requeue(self, **how: Any) -> str | None:
        """What the job excludes; None if it was not requeued."""
        done = requeue_job(self.job, DECISION, client=self.slurm, sleep=self._sleep, **how)
        return done if done is None else done.excluded

    def died(self, node: str, ago_s: float) -> None:
        """As the events tell of it."""
        fault = Fault("node_dead", "root", "node", time.time() - ago_s, "agents", "silent", node)
        fields = fault.fields()
        row = {"time": time.time(), "event": "fault_detected", "job_id": "12", "attempt": 1}
        with JsonLinesWriter(self.job.run.events) as events:
            events.append(row | {"fault_time": fields.pop("time"), **fields})

    def is_cancelled(self) -> None:
        """Slurm has sent SIGTERM."""
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def requeuer(tmp_path: Path) -> Iterator[Requeuer]:
    one = Requeuer(tmp_path)
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGCONT, signal.SIGUSR2)
    before = {signum: signal.getsignal(signum) for signum in signals}

    def asked(signum: int, _frame: object) -> None:
        one.job.stop.signum = signum

    signal.signal(signal.SIGTERM, asked)
    yield one
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_the_requeue_is_reported_before_the_list_is_changed(requeuer: Requeuer) -> None:
    """Slurm may kill this process while the change is refused."""
    done: list[list[tuple[str, ...]]] = []
    requeuer.slurm.fails = {"update": [SlurmRefused("Job/step already completing")]}
    requeuer.requeue(excluded=["node1"], on_requeued=lambda: done.append(list(requeuer.slurm.done)))
    assert done == [[("requeue", "12")]]
    assert requeuer.slurm.done == CHANGED


CHANGED = [("requeue", "12"), ("update", "12", "ExcNodeList=node[1,8]")]


def test_the_job_is_requeued_deaf_to_slurms_termination(requeuer: Requeuer) -> None:
    assert requeuer.requeue() == ""
    assert requeuer.slurm.done == [("requeue", "12")]
    assert requeuer.slurm.handlers == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "it stays so"


# --- a Slurm that does not answer -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["queue", "requeue"], ids=["the controller is away", "the controller takes no request"]
)
def test_it_tries_until_slurm_answers(requeuer: Requeuer, name: str) -> None:
    requeuer.slurm.fails = {name: [AWAY] * 50}
    assert requeuer.requeue(excluded=["node1"]) == "node[1,8]"
    assert requeuer.slurm.done == CHANGED
    (postponed,) = requeuer.events
    assert postponed[0] == "start_postponed"
    assert postponed[1]["reason"].startswith(
        "the job cannot be requeued yet: the Slurm controller does not answer"
    )


def test_a_requeue_that_was_done_unseen_is_not_done_again(requeuer: Requeuer) -> None:
    requeuer.slurm.unseen = {"requeue": [TIMED_OUT]}
    assert requeuer.requeue() == ""
    assert requeuer.slurm.done == [("requeue", "12")]


@pytest.mark.parametrize("looks_in_vain", [0, 3])
def test_a_job_that_was_requeued_unseen_is_changed(requeuer: Requeuer, looks_in_vain: int) -> None:
    slurm = requeuer.slurm
    slurm.unseen = {"requeue": [TIMED_OUT]}
    slurm.fails = {"update": [AWAY] * looks_in_vain}
    assert requeuer.requeue(excluded=["node1"]) == "node[1,8]"
    assert slurm.done == CHANGED


def test_a_requeued_job_is_changed_though_slurm_terminates_this_process_meanwhile(requeuer: Requeuer) -> None:
    requeuer.slurm.fails = {"update": [AWAY] * 2}
    requeuer.while_asleep = requeuer.is_cancelled
    assert requeuer.requeue(excluded=["node1"]) == "node[1,8]"
    assert requeuer.slurm.done == CHANGED


def test_a_job_that_takes_no_exclusion_is_requeued_all_the_same(requeuer: Requeuer) -> None:
    refused = SlurmRefused("scontrol update: Job/step already completing or completed")
    requeuer.slurm.fails = {"update": [refused] * 1000}
    done = requeue_job(
        requeuer.job, DECISION, excluded=["node1"], client=requeuer.slurm, sleep=lambda _seconds: None
    )
    assert done is not None
    assert "already completing" in done.problem
    assert requeuer.slurm.done == [("requeue", "12")], "nothing holds it"


def test_a_refused_requeue_is_an_error(requeuer: Requeuer) -> None:
    requeuer.slurm.fails = {"requeue": [SlurmRefused("scontrol requeue: Requested operation is disabled")]}
    with pytest.raises(SlurmRefused, match="disabled"):
        requeuer.requeue()


# --- a job that must not come back, or comes back by itself ------------------------------------------------------


def test_a_job_cancelled_while_a_dead_node_is_waited_for_does_not_come_back(requeuer: Requeuer) -> None:
    requeuer.while_asleep = requeuer.is_cancelled
    assert requeuer.requeue(dead={"node1"}) is None
    assert requeuer.slurm.done == []


def test_a_job_cancelled_while_slurm_does_not_answer_does_not_come_back(requeuer: Requeuer) -> None:
    requeuer.slurm.fails = {"requeue": [AWAY] * 50}
    requeuer.while_asleep = requeuer.is_cancelled
    assert requeuer.requeue() is None
    assert requeuer.slurm.done == []


def test_a_run_that_the_user_cancelled_does_not_come_back(requeuer: Requeuer) -> None:
    record_action(requeuer.job.run, Cancelled(job_id="12"), requeuer.job.spec)
    assert requeuer.requeue() is None
    assert requeuer.slurm.done == []


@pytest.mark.parametrize(
    "now", [{"state": JobState.COMPLETING}, {"state": JobState.CANCELLED}, {"restarts": 1}], ids=str
)
def test_a_job_that_no_longer_runs_here_is_not_requeued(requeuer: Requeuer, now: dict[str, Any]) -> None:
    requeuer.slurm.record = replace(RECORD, **now)
    assert requeuer.requeue() is None
    assert requeuer.slurm.done == []


def test_a_job_that_slurm_has_requeued_by_itself_gets_its_exclusions(requeuer: Requeuer) -> None:
    requeuer.slurm.record = replace(RECORD, state=JobState.COMPLETING, restarts=1)
    assert requeuer.requeue(excluded=["node1"]) == "node[1,8]"
    assert requeuer.slurm.done == CHANGED[1:]


def test_a_cancelled_job_that_still_completes_is_left_alone(requeuer: Requeuer) -> None:
    """Slurm would take its exclusions, and a requeue would bring it back."""
    requeuer.slurm.record = replace(RECORD, state=JobState.COMPLETING)
    recorded: list[bool] = []
    assert requeuer.requeue(excluded=["node1"], on_requeued=lambda: recorded.append(True)) is None
    assert (requeuer.slurm.done, recorded) == ([], [])


def test_a_job_cancelled_just_before_a_requeue_that_was_not_heard_is_not_recorded(requeuer: Requeuer) -> None:
    recorded: list[bool] = []

    def cancelled_unheard(job_id: str) -> None:
        requeuer.slurm.record = replace(RECORD, state=JobState.COMPLETING)
        raise TIMED_OUT

    requeuer.slurm.requeue = cancelled_unheard  # type: ignore[method-assign]
    assert requeuer.requeue(on_requeued=lambda: recorded.append(True)) is None
    assert recorded == []


# --- nodes that died --------------------------------------------------------------------------------------------


def test_a_node_that_has_just_died_is_waited_for(requeuer: Requeuer) -> None:
    requeuer.died("node1", ago_s=10.0)
    requeuer.while_asleep = lambda: requeuer.slurm.down.add("node1")
    assert requeuer.requeue(dead={"node1"}, excluded={"node1"}) == ""
    assert requeuer.slept_s > 0
    assert requeuer.slurm.done == [("requeue", "12")], "Slurm starts nothing on a node that is down"


def test_a_node_that_died_long_ago_is_not_waited_for(requeuer: Requeuer) -> None:
    """It came back, or was never dead."""
    requeuer.died("node1", ago_s=86400.0)
    assert requeuer.requeue(dead={"node1"}) == ""
    assert requeuer.slept_s == 0


def test_a_node_that_died_twice_counts_from_its_last_death(requeuer: Requeuer) -> None:
    requeuer.died("node1", ago_s=86400.0)
    requeuer.died("node1", ago_s=0.0)
    requeuer.while_asleep = lambda: requeuer.slurm.down.add("node1")
    requeuer.requeue(dead={"node1"})
    assert requeuer.slept_s > 0


@pytest.mark.parametrize(("left_s", "waits"), [(30, False), (3600, True)])
def test_dead_nodes_are_not_waited_for_beyond_the_time_limit(requeuer: Requeuer, left_s: int, waits: bool) -> None:
    requeuer.slurm.record = replace(RECORD, end_time=datetime.now(UTC) + timedelta(seconds=left_s))
    requeuer.died("node1", ago_s=0.0)
    assert requeuer.requeue(dead={"node1"}) == ""
    assert (requeuer.slept_s > 0) is waits
    assert requeuer.slurm.done == [("requeue", "12")]


def test_a_wait_for_nodes_that_the_site_hides_names_the_policy_once(requeuer: Requeuer) -> None:
    """A node that died is waited for once, by the time since then, and not before every requeue."""
    requeuer.slurm.hides_nodes = True
    requeuer.died("node1", ago_s=60.0)
    assert requeuer.requeue(dead={"node1"}) == ""
    assert 298 <= requeuer.slept_s <= 302, "SlurmdTimeout and a minute since it died"
    ((event, fields),) = requeuer.events
    assert event == "start_postponed"
    assert re.fullmatch(
        r"the job is requeued in (?:299|300) s: until then Slurm notices that node1 died, and the site "
        r"hides its nodes from users \(PrivateData=nodes\)",
        fields["reason"],
    )

    waited_s = requeuer.slept_s
    requeuer.died("node1", ago_s=400.0)
    rows = requeuer.job.run.events.read_text().splitlines()
    requeuer.job.run.events.write_text(rows[-1] + "\n")
    requeuer.slurm.record = RECORD
    assert requeuer.requeue(dead={"node1"}) == ""
    assert (requeuer.slept_s, len(requeuer.events)) == (waited_s, 1)


def test_what_is_down_already_is_known_without_waiting(requeuer: Requeuer) -> None:
    """Slurm refuses to change a job that has just lost a node."""
    requeuer.slurm.record = replace(RECORD, end_time=datetime.now(UTC))
    requeuer.slurm.down = {"node1"}
    assert requeuer.requeue(dead={"node1", "node2"}, excluded={"node1"}) == ""
    assert requeuer.slurm.done == [("requeue", "12")]
