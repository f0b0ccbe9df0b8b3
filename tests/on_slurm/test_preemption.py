"""Preemption, suspension, requeues and signals on a real Slurm: the run saves, and comes back if it should."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.fixtures import running
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.submitit_user import failure_of, result_of, starts_again, submitted
from tests.on_slurm.cluster.user import ENDLESS, User, at_work
from tests.submit.local_runs import TAKES_SIGNALS
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

_LOW = "Nodes=node[0-1] PriorityTier=1 OverSubscribe=NO DefaultTime=00:10:00"
PARTITIONS = f"""
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
PartitionName=grace30 {_LOW} PreemptMode=REQUEUE GraceTime=30
PartitionName=grace60 {_LOW} PreemptMode=REQUEUE GraceTime=60
PartitionName=atonce {_LOW} PreemptMode=REQUEUE
PartitionName=cancel {_LOW} PreemptMode=CANCEL GraceTime=30
PartitionName=cancelatonce {_LOW} PreemptMode=CANCEL
PartitionName=gang {_LOW} PreemptMode=SUSPEND
PartitionName=urgent Nodes=node[0-1] PriorityTier=10 PreemptMode=OFF OverSubscribe=FORCE:1 DefaultTime=00:10:00
"""


@pytest.fixture(scope="module")
def cluster(slurm_possible: None) -> Iterator[SlurmCluster]:
    yield from running(nodes=2, settings=PARTITIONS)


@pytest.fixture
def user(cluster: SlurmCluster) -> Iterator[User]:
    with at_work(cluster, "preemption-test") as person:
        yield person


def start(user: User, name: str, partition: str, *, step: int = 2, **sections: Any) -> str:
    """A run under way on both nodes; returns its job id."""
    slurm = {"partition": partition} | sections.pop("slurm", {})
    run_file = user.write_run(name, steps=ENDLESS, forked_ranks=False, slurm=slurm, **sections)
    job_id = user.zslurm("submit", "-q", run_file)
    user.wait_for_step(name, step)
    return job_id


def urgent_job(user: User) -> str:
    """A job of higher priority that needs both nodes, for a moment."""
    return user.cluster.sbatch("sleep 1", "-N2", "--exclusive", "--partition=urgent", "--output=/dev/null")


def comes_back(user: User, name: str, job_id: str) -> None:
    """The job waits in the queue, says why, starts again, and has lost no step."""
    state = user.wait_for_state(name, "requeued", "failed", "preempted", "interrupted", "cancelled")
    assert (state["state"], state["job_id"]) == ("requeued", job_id), state
    stopped_at = user.stopped_at(name)
    assert state["checkpoint_step"] == stopped_at
    wait_for(lambda: _starts_now(user, job_id), "the job to be let start", every_s=COMMAND_EVERY_S)
    user.wait_for_step(name, stopped_at + 2)
    second = [row["step"] for row in user.steps(name) if row["attempt"] == 2]
    assert second[0] == stopped_at + 1
    assert user.state(name)["job_id"] == job_id


def _starts_now(user: User, job_id: str) -> bool:
    """Lift the two minutes for which Slurm holds a requeued job back; earlier than this Slurm sets it again."""
    shown = user.cluster.run(["squeue", "--noheader", "-j", job_id, "-o", "%T"]).stdout.strip()
    if shown == "PENDING":
        user.cluster.run_as_root(["scontrol", "update", f"JobId={job_id}", "StartTime=now+3"])
    return shown == "PENDING"


def events(user: User, name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in user.events(name) if event["event"] == kind]


def ends_preempted(user: User, name: str, job_id: str) -> None:
    """The job is gone for good; the run says so, and how to continue."""
    state = user.wait_for_state(name, "preempted", "requeued", "failed", "interrupted", "cancelled")
    assert (state["state"], state["active"], state["job_id"]) == ("preempted", False, job_id), state
    assert state["checkpoint_step"] == user.stopped_at(name)

    def line() -> str:
        return user.zslurm("status", name).splitlines()[1]

    # Slurm calls the job preempted while its supervisor still ends.
    wait_for(lambda: "preempted at" in line(), "the preemption to be recorded", every_s=COMMAND_EVERY_S)
    assert "submit again to continue" in line()


@pytest.mark.soak
@pytest.mark.parametrize("partition", ["cancel", "cancelatonce"])
def test_a_run_whose_job_preemption_cancels_continues_when_submitted_again(user: User, partition: str) -> None:
    job_id = start(user, "gone", partition)
    urgent_job(user)
    ends_preempted(user, "gone", job_id)
    stopped_at = user.stopped_at("gone")
    user.zslurm("submit", user.directory / "gone.yaml")
    user.wait_for_step("gone", stopped_at + 2)
    assert next(row["step"] for row in user.steps("gone") if row["attempt"] == 2) == stopped_at + 1


@pytest.mark.soak
def test_a_successor_continues_where_preemption_cancels_the_job(user: User) -> None:
    job_id = start(user, "next", "cancel", slurm={"successor": "on"})
    successor = user.state("next")["successor"]
    urgent_job(user)
    wait_for(lambda: user.state("next")["job_id"] == successor, "the successor to start", every_s=COMMAND_EVERY_S)
    user.wait_for_step("next", user.stopped_at("next") + 2)
    assert user.state("next")["job_id"] == successor != job_id


def test_a_suspended_run_goes_on_as_if_nothing_had_been(user: User) -> None:
    """No heartbeat, hang limit or clock takes the pause for a fault, though it is longer than all of them."""
    limits = {"hang": {"step_s": 12, "step_factor": 1.5}, "heartbeat_timeout_s": 12, "standby_s": 14}
    job_id = start(user, "paused", "batch", step=4, aegis={"grace_s": 3, **limits})
    user.cluster.run_as_root(["scontrol", "suspend", job_id])
    assert user.wait_for_state("paused", "suspended")
    until = time.monotonic() + 20
    wait_for(lambda: time.monotonic() > until, "a pause that is longer than every limit")
    before = user.steps("paused")[-1]["step"]
    user.cluster.run_as_root(["scontrol", "resume", job_id])
    user.wait_for_step("paused", before + 20)
    serious = [event for event in events(user, "paused", "fault_detected") if event["role"] == "root"]
    assert not serious
    assert {row["attempt"] for row in user.steps("paused")} == {1}
    assert not events(user, "paused", "deputy_acted") + events(user, "paused", "step_killed")
    user.zslurm("cancel", "paused", "--wait")
    assert user.state("paused")["checkpoint_step"] == user.stopped_at("paused")


def plugged(user: User) -> dict[str, Any]:
    """A cluster section whose ranks have a stand-in for a network plugin that takes SIGUSR1 and SIGUSR2."""
    plugin = user.directory / "plugin"
    if not plugin.exists():
        shutil.copytree(TAKES_SIGNALS, plugin, ignore=shutil.ignore_patterns("__pycache__"))
        (user.directory / "moments").mkdir(mode=0o777)
        (user.directory / "moments").chmod(0o777)
    env = {"PYTHONPATH": str(plugin), "ZSLURM_TEST_MOMENTS": str(user.directory / "moments")}
    return {"cluster": {"env": env}}


@pytest.mark.parametrize(
    "partition", ["grace30", *(pytest.param(name, marks=pytest.mark.soak) for name in ("grace60", "atonce"))]
)
def test_a_run_that_is_preempted_saves_and_comes_back(user: User, partition: str) -> None:
    """In the long tests with a plugin in the trainer's ranks that takes the user's signals for itself."""
    real: dict[str, Any] = {} if partition == "grace30" else {"trainer": "real", **plugged(user)}
    job_id = start(user, "low", partition, **real)
    assert partition == "grace30" or (user.directory / "moments" / "python").exists()
    urgent = urgent_job(user)
    wait_for(lambda: events(user, "low", "preempted"), "the supervisor to know of the preemption")
    user.wait_for_state("low", "requeued", "failed")
    shown = user.zslurm("status", "low")
    assert "preempted at" in shown
    assert "starts again by itself" in shown
    comes_back(user, "low", job_id)
    assert [event["mode"] for event in events(user, "low", "preempted")] == ["requeue"]
    assert "preempted" not in user.zslurm("status", "low").splitlines()[1]
    left = user.cluster.run(["squeue", "--noheader", "--states=all", "-j", urgent, "-o", "%T"]).stdout.strip()
    assert left == "COMPLETED"


@pytest.mark.parametrize("partition", ["grace30", pytest.param("atonce", marks=pytest.mark.soak)])
def test_a_function_that_is_preempted_checkpoints_and_comes_back(user: User, partition: str) -> None:
    """submitit ignores SIGTERM, which is all that a preempted job gets unless the site sends its own signal."""
    marks = user.directory / "marks"
    job_id = submitted(
        user,
        f"""
        executor.update_parameters(slurm_partition={partition!r}, nodes=2, tasks_per_node=1)
        job = executor.submit(Counter({str(marks)!r}), 5)
        """,
    )
    wait_for(lambda: marks.exists() and marks.read_text() == "4", "the function to be under way")
    urgent_job(user)
    starts_again(user, job_id)
    assert result_of(user, job_id) == {"reached": 5, "starts": 2}


@pytest.mark.soak
def test_a_function_that_preemption_cancels_ends_with_a_line_that_says_so(user: User) -> None:
    marks = user.directory / "marks"
    job_id = submitted(
        user,
        f"""
        executor.update_parameters(slurm_partition="cancel", nodes=2, tasks_per_node=1)
        job = executor.submit(Counter({str(marks)!r}), 5)
        """,
    )
    wait_for(lambda: marks.exists() and marks.read_text() == "4", "the function to be under way")
    urgent_job(user)
    assert "PreemptMode=CANCEL" in failure_of(user, job_id)


# --- Slurm's own signals, and requests to an administrator -------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("name", ["USR1", "USR2"])
@pytest.mark.parametrize("to", ["steps", "batch"])
def test_a_users_signal_saves_and_requeues(user: User, name: str, to: str) -> None:
    """`scancel --signal` as users of other tools know it: save, and come back."""
    job_id = start(user, "sent", "batch")
    user.cluster.run(["scancel", f"--signal={name}", *(["--batch"] if to == "batch" else []), job_id])
    comes_back(user, "sent", job_id)
    assert [event["signal"] for event in events(user, "sent", "signal")] == [f"SIG{name}"]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["TERM", "INT"])
@pytest.mark.parametrize("to", ["steps", "batch"])
def test_a_signal_that_ends_programs_saves_and_stops(user: User, name: str, to: str) -> None:
    job_id = start(user, "ended", "batch")
    user.cluster.run(["scancel", f"--signal={name}", *(["--batch"] if to == "batch" else []), job_id])
    state = user.wait_for_state("ended", "interrupted", "requeued", "failed", "preempted", "cancelled")
    assert state["state"] == "interrupted"
    assert state["checkpoint_step"] == user.stopped_at("ended")
    assert "submit again to continue" in user.zslurm("status", "ended")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["HUP", "CONT"])
def test_a_signal_that_asks_for_nothing_does_nothing(user: User, name: str) -> None:
    job_id = start(user, "unmoved", "batch")
    user.cluster.run(["scancel", f"--signal={name}", "--full", job_id])
    before = user.steps("unmoved")[-1]["step"]
    user.wait_for_step("unmoved", before + 10)
    assert {row["attempt"] for row in user.steps("unmoved")} == {1}


def _restart_with(cluster: SlurmCluster, configuration: str) -> None:
    cluster.stop_controller()
    cluster.slurm_conf.write_text(configuration)
    cluster.start_controller()


@pytest.mark.soak
def test_where_slurm_warns_before_it_preempts(user: User) -> None:
    """SlurmctldParameters=preempt_send_user_signal: the batch script gets the signal of the time limit."""
    before = user.cluster.slurm_conf.read_text()
    try:
        _restart_with(user.cluster, before + "SlurmctldParameters=preempt_send_user_signal\n")
        job_id = start(user, "told", "grace30", aegis={"requeue_at_time_limit": False})
        urgent_job(user)
        comes_back(user, "told", job_id)
    finally:
        _restart_with(user.cluster, before)
    assert [event["signal"] for event in events(user, "told", "signal")] == ["SIGUSR2"]
    assert len(events(user, "told", "preempted")) == 1


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["observe", "off"])
def test_where_aegis_does_not_act_slurm_itself_requeues_at_the_end_of_the_grace_time(
    user: User, mode: str
) -> None:
    job_id = start(user, "watched", "grace30", aegis={"mode": mode})
    urgent_job(user)
    comes_back(user, "watched", job_id)


_DRAWN = random.Random(8)
_STARTS = ("python", "imports", "imports-trainer", "imports-data")
_WARNED_AT = [(_DRAWN.choice(_STARTS), 0) if n < 6 else ("step", _DRAWN.randint(1, 12)) for n in range(20)]


@pytest.mark.soak
@pytest.mark.parametrize(("moment", "step"), _WARNED_AT)
def test_slurms_warning_reaches_ranks_whose_plugin_takes_the_signals(user: User, moment: str, step: int) -> None:
    """As before the time limit: to the batch script alone; while rank 0 starts, or in the first steps."""
    run_file = user.write_run("warned", steps=ENDLESS, trainer="real", **plugged(user))
    job_id = user.zslurm("submit", "-q", run_file)
    if step:
        user.wait_for_step("warned", step)
    else:
        wait_for((user.directory / "moments" / moment).exists, f"rank 0 to come to: {moment}")
    user.cluster.run(["scancel", "--batch", "--signal=USR2", job_id])
    state = user.wait_for_state("warned", "requeued", "failed", "interrupted")
    assert state["state"] == "requeued", state
    assert [event["outcome"] for event in events(user, "warned", "attempt_ended")] == ["interrupted"]
    assert state["checkpoint_step"] == user.stopped_at("warned") >= 1


# --- preemption by QoS -------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_qos_that_may_be_preempted(slurm_possible: None) -> None:
    """The QoS decides what becomes of the job, not its partition, and not the cluster."""
    settings = "PreemptType=preempt/qos\nPreemptMode=REQUEUE\n"
    for cluster in running(nodes=2, accounting=True, settings=settings):
        manage = ["sacctmgr", "--immediate"]
        account = ["add", "account", "lab"]
        person = ["add", "user", cluster.user.pw_name, "account=lab"]
        low = ["add", "qos", "low", "GraceTime=30", "PreemptMode=requeue"]
        gone = ["add", "qos", "gone", "GraceTime=30", "PreemptMode=cancel"]
        high = ["add", "qos", "high", "Priority=1000", "Preempt=low,gone"]
        allowed = ["modify", "user", cluster.user.pw_name, "set", "qos=normal,low,gone,high"]
        for words in (account, person, low, gone, high, allowed):
            cluster.run_as_root([*manage, *words])
        with at_work(cluster, "qos-test") as user:
            for name, qos in (("kept", "low"), ("lost", "gone")):
                job_id = start(user, name, "batch", slurm={"qos": qos})
                cluster.sbatch("sleep 1", "-N2", "--exclusive", "--qos=high", "--output=/dev/null")
                if name == "kept":
                    comes_back(user, name, job_id)
                    user.zslurm("cancel", name, "--wait")
                else:
                    ends_preempted(user, name, job_id)
