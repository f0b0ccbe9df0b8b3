"""A job that a node cannot start is held; the next command that shows its run releases it without that node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, at_work

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm_possible")]


@contextmanager
def user_of(*, accounting: bool) -> Iterator[User]:
    with SlurmCluster(nodes=3, accounting=accounting) as cluster, at_work(cluster, "held") as user:
        yield user


def break_spool(user: User, node: str) -> None:
    """Let slurmd of a node fail to write a batch script, as with a full or lost disk: Slurm does not drain it."""
    spool = user.cluster.instance.directory / "spool" / node
    spool.rename(spool.with_name(f"{node}-away"))
    spool.write_text("no directory")


def first_node(user: User) -> str:
    """The node on which the next job's script starts: Slurm takes the first of equal ones."""
    return user.cluster.node_names[0]


def test_status_releases_a_job_that_a_node_could_not_start_without_that_node() -> None:
    with user_of(accounting=True) as user:
        broken = first_node(user)
        break_spool(user, broken)
        user.zslurm("submit", user.write_run("run", nodes=2))
        user.wait_for_state("run", "held")
        done = user.cluster.zslurm("status", "run", cwd=user.directory)
        assert f"could not be started on {broken} and was held; it avoids {broken} from now on" in done.stderr
        assert user.state("run")["state"] == "requeued"
        (excluded,) = [event for event in user.events_of_people("run") if event["action"] == "nodes_excluded"]
        assert excluded["nodes"] == broken
        listed = user.zslurm("cluster", "exclude", "ls", "run")
        assert broken in listed and "Slurm could not start the job there" in listed
        user.zslurm("requeue", "run", "--now")
        state = user.wait_for_state("run", "completed", "failed", "held")
        assert state["state"] == "completed", user.zslurm("logs", "run", "--supervisor")
        assert broken not in user.nodes_of("run")
        shown = user.zslurm("logs", "--events", "run")
        assert f"the run does not use {broken} any more" in shown and "it could not be started" in shown


def test_without_accounting_a_job_is_released_once_and_then_waits_for_a_person() -> None:
    with user_of(accounting=False) as user:
        break_spool(user, first_node(user))
        user.zslurm("submit", user.write_run("run", nodes=2))
        user.wait_for_state("run", "held")
        first = user.cluster.zslurm("status", "run", cwd=user.directory).stderr
        assert "it is released, but the node on which it could not be started is not known" in first
        user.zslurm("requeue", "run", "--now")
        user.wait_for_state("run", "held")
        second = user.cluster.zslurm("status", "run", cwd=user.directory).stderr
        assert "stays held: it failed on a node that is not known" in second
        assert user.cluster.zslurm("status", "run", cwd=user.directory).stderr == second
        assert user.state("run")["state"] == "held"
        user.zslurm("requeue", "run", "--exclude", first_node(user))
        user.zslurm("requeue", "run", "--now")
        assert user.wait_for_state("run", "completed", "held", "failed")["state"] == "completed"
