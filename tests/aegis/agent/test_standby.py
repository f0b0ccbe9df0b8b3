"""An agent whose supervisor is silent: it acts once, alone, and only if that is right.

Slurm is scripted here; tests/on_slurm/test_agent_link.py has a real one.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.aegis.standby_job import AWAY, NEVER, RECORD, Job, check, no_command
from zslurm.aegis.agent.standby import STAGGER_S, StandbySupervisor
from zslurm.aegis.agent.standby_requeue import StandbyResult
from zslurm.core.errors import SlurmRefused
from zslurm.run.events import Cancelled, Submitted, SuccessorSubmitted
from zslurm.slurm.inventory import Node
from zslurm.slurm.states import JobState
from zslurm.submit.submit import record_action


def test_the_job_is_requeued_without_its_batch_node(job: Job) -> None:
    job.client.notices_after = NEVER
    assert job.standby().act() is StandbyResult.REQUEUED
    assert job.client.done == [("requeue", "12"), ("update", "12", "ExcNodeList=node[0,8]")]
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
    """Slurm starts nothing on a dead node anyway; but with it excluded the job would wait forever."""
    job.client.others = 0
    assert job.standby().act() is StandbyResult.REQUEUED
    assert job.client.done == [("requeue", "12")]


def test_where_the_site_hides_its_nodes_the_job_is_requeued_and_not_ended(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden() -> list[Node]:
        raise SlurmRefused("sinfo: slurm_load_node: Access/permission denied")

    monkeypatch.setattr(job.client, "nodes", hidden)
    assert job.standby().act() is StandbyResult.REQUEUED
    assert job.client.done == [("requeue", "12"), ("update", "12", "ExcNodeList=node[0,8]")]


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
    record_action(job.run, Cancelled(job_id="12"), job.spec)


def _submitted_again(job: Job) -> None:
    record_action(job.run, Submitted(job_id="13"), job.spec)


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
    record_action(job.run, SuccessorSubmitted(job_id="12", successor="14"), job.spec)
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


# --- a Slurm that does not answer, or refuses -------------------------------------------------------------------


def test_it_tries_until_the_controller_answers(job: Job) -> None:
    job.client.fails = {"queue": [AWAY] * 50, "requeue": [AWAY]}
    assert job.standby().act() is StandbyResult.REQUEUED
    assert len(job.events()) == 1, "said once"


def test_a_requeue_that_slurm_did_not_answer_is_tried_again_without_another_wait(job: Job) -> None:
    job.client.notices_after = NEVER
    job.client.fails = {"requeue": [AWAY, AWAY]}
    assert job.standby().act() is StandbyResult.REQUEUED
    assert [seconds for seconds in job.slept if seconds == 2.0] == [2.0] * 180, "SlurmdTimeout and a minute, once"


def test_a_controller_that_goes_after_the_requeue_leaves_a_job_that_starts(job: Job) -> None:
    job.client.notices_after = NEVER
    job.client.fails = {"update": [AWAY] * 1000}
    assert job.standby().act() is StandbyResult.REQUEUED
    assert job.client.done == [("requeue", "12")]
    assert "may start on node0 again" in str(job.events()[-1]["reason"])


def test_a_refused_exclusion_is_no_reason_to_end_a_job_that_was_requeued(job: Job) -> None:
    job.client.notices_after = NEVER
    job.client.fails = {"update": [SlurmRefused("scontrol update: slurm_update error: Invalid node name")] * 1000}
    assert job.standby().act() is StandbyResult.REQUEUED
    assert [name for name, *_ in job.client.done] == ["requeue"]


@pytest.mark.parametrize(
    "error",
    [SlurmRefused("scontrol requeue: error: Requested operation is presently disabled"), no_command("scontrol")],
)
def test_a_job_that_cannot_be_requeued_is_ended_for_its_successor(job: Job, error: Exception) -> None:
    job.client.notices_after = NEVER
    job.client.fails = {"requeue": [error]}
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
