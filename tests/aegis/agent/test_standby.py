"""An agent whose supervisor is silent: it acts once, alone, and only where that is right.

What Slurm says is scripted here; tests/on_slurm/test_agent_link.py has a real one.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.slurm import recorded
from tests.submit.specs import run_spec
from zslurm.aegis.agent.standby import STAGGER_S, StandbySupervisor
from zslurm.aegis.agent.standby_requeue import StandbyResult
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.core.processes import ProcessRecord
from zslurm.run.run_dir import RunDir
from zslurm.run.supervisor_lease import LAPSED_S, take
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.inventory import Node
from zslurm.slurm.jobs import JobRecord, parse_queue
from zslurm.slurm.states import JobState
from zslurm.submit.submit import record_action
from zslurm.train.jsonl import read_jsonl

RECORD = replace(
    parse_queue(recorded.SQUEUE)["4"],
    job_id="12", state=JobState.RUNNING, restarts=0, n_nodes=3, partition="main",
)  # fmt: skip
AWAY = SlurmUnavailable("the Slurm controller does not answer (4 tries): squeue: error: Unable to contact")


def no_command(program: str) -> SlurmUnavailable:
    return SlurmUnavailable(f"{program}: not found on PATH; run this on a machine of the Slurm cluster")


NEVER = 10**6


class ScriptedClient(SlurmClient):
    """A Slurm with one job, three nodes of it and some others; errors in `fails` are raised once each, by name."""

    def __init__(self, others: int = 2) -> None:
        super().__init__({"PATH": "/nowhere"})
        self.record: JobRecord | None = RECORD
        self.others = others
        self.done: list[tuple[str, ...]] = []
        self.fails: dict[str, list[Exception]] = {}
        self.handlers: list[object] = []
        self.notices_after = 0
        """So often Slurm is asked before it calls the dead batch node down."""

    def _do(self, name: str, *words: str) -> None:
        if self.fails.get(name):
            raise self.fails[name].pop(0)
        self.done.append((name, *words))
        self.handlers.append(signal.getsignal(signal.SIGTERM))

    def _becomes(self, state: JobState) -> None:
        assert self.record is not None
        self.record = replace(self.record, state=state)

    def queue(self, job_ids: object = None, user: str | None = None) -> dict[str, JobRecord]:
        if self.fails.get("queue"):
            raise self.fails["queue"].pop(0)
        return {} if self.record is None else {self.record.job_id: self.record}

    def excluded_nodes(self, job_id: str) -> str:
        return "node8"

    def nodes(self) -> list[Node]:
        names = [*(f"node{number}" for number in range(3 + self.others)), "node8"]
        states = {"node0": "allocated" if self.notices_after else "down"}
        self.notices_after = max(0, self.notices_after - 1)
        return [Node(name, states.get(name, "idle"), frozenset(), 8, None, 96, 1, ("main",), "") for name in names]

    def scontrol_config(self) -> dict[str, str]:
        return {"SlurmdTimeout": "300 sec"}

    def requeue(self, job_id: str) -> None:
        self._do("requeue", job_id)
        self._becomes(JobState.PENDING)

    def requeue_hold(self, job_id: str) -> None:
        self._do("requeue_hold", job_id)
        self._becomes(JobState.PENDING)

    def update(self, job_id: str, **settings: str) -> None:
        self._do("update", job_id, *(f"{name}={value}" for name, value in settings.items()))

    def release(self, job_id: str) -> None:
        self._do("release", job_id)

    def cancel(self, job_id: str) -> None:
        self._do("cancel", job_id)


class Job:
    """A run whose job 12 runs on node0 to node2, its supervisor on node0."""

    def __init__(self, directory: Path) -> None:
        spec = run_spec(directory, cluster={"name": "lab", "launcher": "slurm"})
        self.run = RunDir(directory / "runs" / "tiny")
        self.run.create(group_readable=False)
        self.run.config.write_text(spec.model_dump_json())
        self.spec = spec
        record_action(self.run, "submit", "12", spec)
        ProcessRecord.of(os.getpid()).write(self.run.supervisor)
        self.client = ScriptedClient()
        self.now, self.unheard_s, self._renewals = 100.0, 0.0, 0
        self.slept: list[float] = []
        self.while_asleep: Callable[[], None] = lambda: None

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.while_asleep()

    def standby(self, node: str = "node1", *, generation: str = "", **environ: str) -> StandbySupervisor:
        own = {
            "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[0-2]", "SLURMD_NODENAME": node,
            "ZSLURM_BATCH_NODE": "node0",
        }  # fmt: skip
        return StandbySupervisor(
            self.run, own | environ, 20.0,
            generation=generation, client=self.client, sleep=self._sleep, clock=lambda: self.now,
        )  # fmt: skip

    def unheard_for(
        self, standby: StandbySupervisor, seconds: int, *, hung_up: bool = False, renewed: bool = False
    ) -> bool:
        """An agent's questions in seconds without a word of the supervisor; returns whether the agent ends."""
        for _ in range(seconds):
            self.now += 1.0
            self.unheard_s += 1.0
            if renewed:
                self.renew()
            if standby.on_missed_heartbeats(self.unheard_s, hung_up):
                return True
        return False

    def renew(self) -> None:
        """As the supervisor does."""
        self._renewals += 1
        os.utime(self.run.supervisor, ns=(self._renewals, self._renewals))

    def events(self) -> list[dict[str, object]]:
        return list(read_jsonl(self.run.events))

    def leases(self) -> list[str]:
        return sorted(path.name for path in self.run.path.glob("deputy-*"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_the_job_is_requeued_without_its_batch_node(job: Job) -> None:
    job.client.notices_after = NEVER
    assert job.standby().act() is StandbyResult.REQUEUED
    assert job.client.done == [
        ("requeue_hold", "12"),
        ("update", "12", "ExcNodeList=node[0,8]"),
        ("release", "12"),
    ]
    (event,) = job.events()
    assert (event["event"], event["job_id"], event["node"], event["batch_node"]) == (
        "deputy_acted", "12", "node1", "node0",
    )  # fmt: skip
    assert event["reason"] == "the supervisor sends no heartbeats; the job is requeued"


def test_sigterm_is_ignored_meanwhile_and_not_for_ever(job: Job) -> None:
    before = signal.getsignal(signal.SIGTERM)
    job.standby().act()
    assert set(job.client.handlers) == {signal.SIG_IGN}
    assert signal.getsignal(signal.SIGTERM) is before


def test_on_a_full_partition_the_batch_node_is_not_excluded(job: Job) -> None:
    """Slurm starts nothing on a dead node anyway; but with it excluded the job would wait for ever."""
    job.client.others = 0
    assert job.standby().act() is StandbyResult.REQUEUED
    assert job.client.done == [("requeue", "12")]


@pytest.mark.parametrize("environ", [{"ZSLURM_BATCH_NODE": ""}, {"ZSLURM_BATCH_NODE": "node1"}])
def test_an_unknown_batch_node_and_its_own_are_not_excluded(job: Job, environ: dict[str, str]) -> None:
    assert job.standby(**environ).act() is StandbyResult.REQUEUED
    assert job.client.done == [("requeue", "12")]


def test_the_lowest_acts_first(job: Job) -> None:
    assert [job.standby(node).due(20.0) for node in ("node0", "node1", "node2")] == [True, False, False]
    assert job.standby("node2").due(20.0 + 2 * STAGGER_S)
    assert not job.standby("node0").due(19.9)


def test_without_slurm_there_is_nothing_to_do(job: Job) -> None:
    standby = StandbySupervisor(job.run, {}, 20.0, client=job.client)
    assert not standby.due(1e6)
    assert standby.on_missed_heartbeats(1e6), "the agent leaves"
    assert job.client.done == []


# --- when not to act --------------------------------------------------------------------------------------------


def _ended(job: Job) -> None:
    job.run.job_exit("12").write_text("0\n")


def _cancelled(job: Job) -> None:
    record_action(job.run, "cancel", "12", job.spec)


def _submitted_again(job: Job) -> None:
    record_action(job.run, "submit", "13", job.spec)


def _requeued(job: Job) -> None:
    job.client.record = replace(RECORD, restarts=1)


def _waits(job: Job) -> None:
    job.client.record = replace(RECORD, state=JobState.PENDING)


def _forgotten(job: Job) -> None:
    job.client.record = None


@pytest.mark.parametrize("happened", [_ended, _cancelled, _submitted_again, _requeued, _waits, _forgotten])
def test_a_job_that_is_over_is_left_alone(job: Job, happened: Callable[[Job], None]) -> None:
    standby = job.standby()
    happened(job)
    assert standby.act() is StandbyResult.NOT_NEEDED
    assert (job.client.done, job.events(), job.leases()) == ([], [], [])


def test_a_successor_of_the_last_job_is_acted_for_too(job: Job) -> None:
    record_action(job.run, "successor", "12", job.spec, successor="14")
    job.client.record = replace(RECORD, job_id="14")
    assert job.standby(SLURM_JOB_ID="14").act() is StandbyResult.REQUEUED


def test_a_new_supervisor_gets_its_own_time(job: Job) -> None:
    standby = job.standby()
    assert standby.due(25.0)
    _new_supervisor(job)
    assert standby.act() is StandbyResult.POSTPONED
    assert not standby.due(26.0)
    assert not standby.due(47.0)
    assert standby.due(48.1), "it sends no heartbeats either"
    assert standby.act() is StandbyResult.REQUEUED


def test_the_job_is_requeued_once_slurm_calls_the_batch_node_down(job: Job) -> None:
    """Before that, it would start again without its GPUs."""
    job.client.notices_after = 5
    job.while_asleep = lambda: check(job.client.done == [], "nothing is done before")
    assert job.standby().act() is StandbyResult.REQUEUED
    assert job.slept == [2.0] * 5
    assert [deed[0] for deed in job.client.done] == ["requeue"], "Slurm starts nothing on a node that is down"


def test_a_node_that_slurm_never_calls_down_does_not_keep_the_standby_for_ever(job: Job) -> None:
    job.client.notices_after = NEVER
    assert job.standby().act() is StandbyResult.REQUEUED
    assert sum(job.slept) == 360.0, "SlurmdTimeout and a minute"


def _new_supervisor(job: Job) -> None:
    job.run.supervisor.write_text(json.dumps({"pid": 1, "created": 2.0, "host": "node0"}))


@pytest.mark.parametrize("node", ["node0", "node1"])
def test_a_supervisor_that_takes_its_time_to_come_back_is_waited_for(job: Job, node: str) -> None:
    """Its batch node is well, so the batch script starts it again: also for the standby on that very node."""
    job.client.notices_after = NEVER
    standby = job.standby(node)
    assert standby.due(25.0)
    job.while_asleep = lambda: _new_supervisor(job) if sum(job.slept) >= 300 else None
    assert standby.act() is StandbyResult.POSTPONED
    assert (job.client.done, job.events(), job.leases()) == ([], [], [])
    assert not standby.due(325.0), "its agents are about to come"
    assert not standby.due(344.0)
    assert standby.due(347.1), "it sends no heartbeats either"


def test_a_supervisor_that_does_not_come_back_is_replaced_by_the_standby_on_its_own_node(job: Job) -> None:
    job.client.notices_after = NEVER
    assert job.standby("node0").act() is StandbyResult.REQUEUED
    assert sum(job.slept) == 360.0, "SlurmdTimeout and a minute"


def test_an_agent_is_needed_further_where_the_supervisor_is_heard_again(job: Job) -> None:
    job.client.notices_after = NEVER
    standby = job.standby()
    standby.heard = lambda: sum(job.slept) >= 10
    assert not job.unheard_for(standby, 40)
    assert sum(job.slept) >= 10, "it was about to act"
    assert job.client.done == []


# --- the supervisor's lease ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hung_up", [False, True])
def test_an_agent_of_another_generation_ends_and_never_acts(job: Job, *, hung_up: bool) -> None:
    take(job.run, "g1")
    standby = job.standby(generation="g1")
    take(job.run, "g2")
    assert standby.act() is StandbyResult.NOT_NEEDED
    assert job.unheard_for(standby, 1, hung_up=hung_up)
    assert (job.client.done, job.events(), job.leases()) == ([], [], [])


def test_an_agent_whose_srun_is_gone_ends_where_its_supervisor_lives(job: Job) -> None:
    """The controller was away, and srun gave up; the supervisor starts other agents when Slurm answers."""
    take(job.run, "g1")
    standby = job.standby(generation="g1")
    assert not job.unheard_for(standby, 1, hung_up=True), "not known yet"
    assert job.unheard_for(standby, 2, hung_up=True, renewed=True)
    assert (job.client.done, job.leases()) == ([], [])


def test_an_agent_whose_pipe_is_stuck_goes_on_and_does_not_act(job: Job) -> None:
    take(job.run, "g1")
    standby = job.standby(generation="g1")
    assert not job.unheard_for(standby, 1000, renewed=True)
    assert (job.client.done, job.slept) == ([], [])
    assert job.unheard_for(standby, 100), "until the lease lapses"
    assert [deed[0] for deed in job.client.done] == ["requeue"]


def test_an_agent_whose_srun_is_gone_with_its_supervisor_acts(job: Job) -> None:
    """As where the batch node died: nobody else would bring the run back."""
    take(job.run, "g1")
    standby = job.standby(generation="g1")
    assert not job.unheard_for(standby, 15, hung_up=True)
    assert job.client.done == []
    assert job.unheard_for(standby, 20, hung_up=True)
    assert [deed[0] for deed in job.client.done] == ["requeue"]


def test_a_lease_that_is_renewed_again_stops_the_standby_at_work(job: Job) -> None:
    take(job.run, "g1")
    job.client.notices_after = NEVER
    standby = job.standby(generation="g1")
    job.while_asleep = lambda: job.renew() if sum(job.slept) > 10 else None
    assert not job.unheard_for(standby, 60)
    assert (job.client.done, job.events(), job.leases()) == ([], [], [])


def test_the_agent_of_the_batch_node_renews_the_lease_while_the_supervisors_process_runs(job: Job) -> None:
    """It hangs with its file system, say; the agents of other nodes cannot see it."""
    take(job.run, "g1")
    here, elsewhere = job.standby("node0", generation="g1"), job.standby("node1", generation="g1")
    for _ in range(100):
        job.now, job.unheard_s = job.now + 1.0, job.unheard_s + 1.0
        assert not here.on_missed_heartbeats(job.unheard_s)
        assert not elsewhere.on_missed_heartbeats(job.unheard_s)
    assert job.client.done == []


def test_a_supervisor_whose_process_is_gone_is_not_vouched_for(job: Job) -> None:
    take(job.run, "g1")
    body = json.loads(job.run.supervisor.read_text())
    job.run.supervisor.write_text(json.dumps(body | {"created": 1.0, "started": 1}))
    assert job.unheard_for(job.standby("node0", generation="g1"), 40)
    assert [deed[0] for deed in job.client.done] == ["requeue"]


_EVENTS = st.sampled_from(["time", "time", "time", "renewal", "new", "away"])


@given(st.lists(st.tuples(_EVENTS, st.sampled_from([0, 1]), st.booleans(), st.floats(1.0, 9.0)), max_size=30))
@settings(max_examples=25, deadline=None)
def test_nothing_is_done_while_a_supervisor_lives(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[str, int, bool, float]]
) -> None:
    """Two agents, one whose pipe may be closed; the supervisor renews, is replaced, or its directory is away."""
    job = Job(tmp_path_factory.mktemp("drawn"))
    take(job.run, "g1")
    agents = {number: job.standby(f"node{number + 1}", generation="g1") for number in (0, 1)}
    alive_at, replaced = job.now, False
    for what, number, hung_up, pause in story:
        job.now, job.unheard_s = job.now + pause, job.unheard_s + pause
        if what == "renewal":
            job.renew()
            alive_at = job.now
        elif what == "new":
            take(job.run, "g2")
            alive_at, replaced = job.now, True
        before = len(job.client.done)
        if number in agents and what != "away" and agents[number].on_missed_heartbeats(job.unheard_s, hung_up):
            del agents[number]
        if replaced or job.now - alive_at < LAPSED_S:
            assert len(job.client.done) == before
    assert [deed[0] for deed in job.client.done] in ([], ["requeue"])


def check(holds: bool, what: str) -> None:
    assert holds, what


def test_a_supervisor_that_is_heard_again_stops_the_standby(job: Job) -> None:
    standby = job.standby()
    job.client.fails["queue"] = [AWAY, AWAY, AWAY]
    standby.heard = lambda: len(job.slept) >= 2
    assert standby.act() is StandbyResult.POSTPONED
    assert (job.client.done, job.events(), job.leases()) == ([], [], [])


# --- the lease --------------------------------------------------------------------------------------------------


def test_who_comes_second_leaves_it_to_the_first(job: Job) -> None:
    (job.run.path / "deputy-12-0-1.json").write_text("{}")
    lease = job.run.path / "deputy-12-0-1.json"
    times = iter(range(1, 100))
    job.while_asleep = lambda: os.utime(lease, (0, next(times)))
    assert job.standby().act() is StandbyResult.LEFT_TO_ANOTHER
    assert job.client.done == []
    assert not job.unheard_for(job.standby(), 40), "it asks again"


def test_a_lease_that_nobody_renews_is_followed_by_the_next(job: Job) -> None:
    (job.run.path / "deputy-12-0-1.json").write_text("{}")
    assert job.standby().act() is StandbyResult.REQUEUED
    assert sum(job.slept) >= 60.0
    body = json.loads((job.run.path / "deputy-12-0-2.json").read_text())
    assert (body["job_id"], body["restart"], body["node"]) == ("12", 0, "node1")


def test_leases_of_earlier_starts_mean_nothing(job: Job) -> None:
    (job.run.path / "deputy-12-0-1.json").write_text("{}")
    job.client.record = replace(RECORD, restarts=1)
    assert job.standby(SLURM_RESTART_COUNT="1").act() is StandbyResult.REQUEUED
    assert job.slept == []


def test_two_that_act_together_requeue_once(job: Job) -> None:
    """The second comes while the first talks to Slurm."""
    job.client.notices_after = NEVER
    second = job.standby("node2")
    outcomes = []
    job.client.fails["queue"] = [AWAY]
    lease = job.run.path / "deputy-12-0-1.json"

    def meanwhile() -> None:
        job.while_asleep = lambda: os.utime(lease, (0, 0))
        outcomes.append(second.act())
        job.while_asleep = lambda: None

    job.while_asleep = meanwhile
    assert job.standby("node1").act() is StandbyResult.REQUEUED
    assert outcomes == [StandbyResult.LEFT_TO_ANOTHER]
    assert [name for name, *_ in job.client.done].count("requeue_hold") == 1


def test_a_run_directory_that_is_away_is_asked_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    standby = job.standby()
    monkeypatch.setattr(os, "open", stalled)
    assert standby.act() is StandbyResult.LEFT_TO_ANOTHER


# --- a Slurm that does not answer, or refuses -------------------------------------------------------------------


def test_it_tries_until_the_controller_answers(job: Job) -> None:
    job.client.fails = {"queue": [AWAY] * 50, "requeue_hold": [AWAY]}
    assert job.standby().act() is StandbyResult.REQUEUED
    assert len(job.events()) == 1, "said once"


def test_a_job_is_not_left_held(job: Job) -> None:
    """The controller goes away in the middle: it is held, and was not released."""
    job.client.notices_after = NEVER
    job.client.fails = {"update": [AWAY], "release": [AWAY]}
    assert job.standby().act() in (StandbyResult.REQUEUED, StandbyResult.NOT_NEEDED)
    assert job.client.done[-1] == ("release", "12")


def test_a_refused_exclusion_is_no_reason_to_end_a_job_that_was_requeued(job: Job) -> None:
    job.client.notices_after = NEVER
    job.client.fails = {"update": [SlurmRefused("scontrol update: slurm_update error: Invalid node name")]}
    assert job.standby().act() is StandbyResult.REQUEUED
    assert [name for name, *_ in job.client.done] == ["requeue_hold", "release"]


@pytest.mark.parametrize(
    "error",
    [SlurmRefused("scontrol requeue: error: Requested operation is presently disabled"), no_command("scontrol")],
)
def test_a_job_that_cannot_be_requeued_is_ended_for_its_successor(job: Job, error: Exception) -> None:
    job.client.notices_after = NEVER
    job.client.fails = {"requeue_hold": [error]}
    assert job.standby().act() is StandbyResult.ENDED
    assert job.client.done == [("cancel", "12")]
    assert str(job.events()[-1]["reason"]).startswith("the job cannot be requeued, so it is ended")


def test_nodes_without_squeue_still_have_scancel(job: Job) -> None:
    job.client.fails = {"queue": [no_command("squeue")]}
    assert job.standby().act() is StandbyResult.ENDED
    assert job.client.done == [("cancel", "12")]


def test_where_nothing_can_be_done_it_says_so_once_for_all_agents(job: Job) -> None:
    for node in ("node1", "node2"):
        job.client.fails = {"queue": [no_command("squeue")], "cancel": [no_command("scancel")]}
        outcome = job.standby(node).act()
        assert outcome is (StandbyResult.IMPOSSIBLE if node == "node1" else StandbyResult.LEFT_TO_ANOTHER)
    assert len(job.events()) == 2
    assert "nothing can be done from here: scancel: not found" in str(job.events()[-1]["reason"])
