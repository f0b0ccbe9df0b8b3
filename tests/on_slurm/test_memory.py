"""Recovery in memory on a real Slurm, with the real trainer: ranks and nodes are lost, or left, without a restart.

The seconds from each fault to the first new step are printed (pytest -s), not asserted.
"""

from __future__ import annotations

import sys
import time

import pytest

from tests.faults.conftest import samples as samples  # a fixture
from tests.faults.conftest import site as site  # a fixture
from tests.faults.harness import FaultRun
from tests.faults.nodes import FaultNodes
from tests.on_slurm.cluster.user import User
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.soak]

PATIENT = {"recovery": "memory", "recovery_s": 60, "hang": {"setup_s": 300, "step_s": 60}}


def test_a_killed_rank_and_a_dead_node_are_replaced_in_memory(site: tuple[User, FaultNodes]) -> None:
    user, nodes = site
    run = FaultRun(user, nodes, "memory", steps=100_000)
    run.submit(nodes=3, slurm={"spares": 1}, aegis=PATIENT)
    _lose(run, 1, what=lambda: run.signal_rank(1))
    dead = run.node_of(2)
    _lose(run, 2, what=lambda: user.cluster.kill_node(dead))

    assert [event["ranks"] for event in run.events("recovered_in_memory")] == [[1], [2]]
    assert all(event["rolled_back"] <= 1 for event in run.events("recovered_in_memory"))
    assert (len(run.events("attempt_started")), run.events("decision")) == (1, [])
    assert dead not in run.events("recovered_in_memory")[-1]["nodes"]
    user.zslurm("cancel", "memory")
    state = run.wait_until_idle()
    assert (state["attempt"], state["recovered_in_memory"]) == (1, 2)
    assert state["checkpoint_step"] >= run.events("recovered_in_memory")[-1]["step"], (
        "it saved when it was asked to"
    )


def test_ranks_move_off_a_node_as_asked_and_as_the_site_drains_one(site: tuple[User, FaultNodes]) -> None:
    """First by the command, then because an administrator drains a node; each takes a spare, no step is lost."""
    user, nodes = site
    run = FaultRun(user, nodes, "moves", steps=100_000)
    run.submit(nodes=2, slurm={"spares": 2}, aegis=PATIENT)
    run.wait_for_step(2)
    off = run.node_of(0)
    assert (
        f"no rank of moves is on none; ranks are on {run.events('attempt_started')[0]['nodes']}"
        in (user.fails("requeue", "moves", "--off", "none")[1])
    )
    said = user.zslurm("requeue", "moves", "--off", off)
    (moved,) = run.events("ranks_moved")
    assert (moved["off"], moved["rolled_back"], moved["ranks"]) == (off, 0, [0]), said
    run.wait_for_step(moved["step"] + 2)

    drained = run.node_of(1)
    user.cluster.run_as_root(["scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=fan"])
    try:
        wait_for(
            lambda: len(run.events("ranks_moved")) == 2,
            f"the move off {drained}; so far {run.events('move_refused', 'recovery_failed')}",
            deadline_s=300,
        )
    finally:
        user.cluster.run_as_root(["scontrol", "update", f"NodeName={drained}", "State=RESUME"])
    second = run.events("ranks_moved")[-1]
    assert (second["off"], second["rolled_back"], second["ranks"]) == (drained, 0, [1])
    run.wait_for_step(second["step"] + 2)

    assert (len(run.events("attempt_started")), run.events("decision", "recovered_in_memory")) == (1, [])
    steps = [row["step"] for row in run.metrics("step")]
    assert steps == list(range(1, len(steps) + 1)), "no step was lost, and none was made twice"
    user.zslurm("cancel", "moves")
    state = run.wait_until_idle()
    assert (state["attempt"], state["planned_moves"], state["checkpoint_step"]) == (1, 2, state["step"]), (
        f"{run.events()[-12:]}\n{run.story()}"
    )
    print(f"\npauses: {[event['seconds'] for event in run.events('ranks_moved')]} s", file=sys.stderr)


def _lose(run: FaultRun, count: int, what: object) -> None:
    """Cause the `count`-th fault once warm processes wait, and see the run train on."""
    assert callable(what)
    wait_for(
        lambda: len(run.events("recovery_ready")) == count,
        f"warm processes; so far {run.events('recovery_failed', 'recovery_unavailable')}",
        deadline_s=300,
    )
    began = time.time()
    what()
    wait_for(
        lambda: len(run.events("recovered_in_memory")) == count,
        f"recovery {count}; so far {run.events('recovery_failed', 'decision')}",
        deadline_s=300,
    )
    step = run.events("recovered_in_memory")[-1]["step"]
    first = wait_for(
        lambda: next((row for row in run.metrics("step") if row["step"] > step and row["time"] > began), None),
        "the first new step",
    )
    print(f"\nfault {count}: {first['time'] - began:.2f} s to the first new step", file=sys.stderr)
