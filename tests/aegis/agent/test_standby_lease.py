"""The leases of a run: the supervisor's, which agents watch, and the one under which a single standby acts."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aegis.standby_job import AWAY, NEVER, RECORD, Job
from zslurm.aegis.agent.standby_requeue import StandbyResult
from zslurm.run.supervisor_lease import LAPSED_S, take

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
    """As when the batch node died: nothing else would requeue the run."""
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
    assert [name for name, *_ in job.client.done].count("requeue") == 1


def test_a_run_directory_that_is_away_is_asked_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    standby = job.standby()
    monkeypatch.setattr(os, "open", stalled)
    assert standby.act() is StandbyResult.LEFT_TO_ANOTHER
