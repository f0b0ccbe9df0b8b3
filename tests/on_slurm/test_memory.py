"""Recovery in memory on a real Slurm, with the real trainer: a rank is killed, a node dies, nothing is restarted.

The seconds from each fault to the first new step are printed (pytest -s), not asserted.
"""

from __future__ import annotations

import sys
import time

import pytest

from tests.faults.conftest import site as site  # a fixture
from tests.faults.harness import FaultRun
from tests.faults.nodes import FaultNodes
from tests.on_slurm.test_runs import User
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.soak]

PATIENT = {"recovery": "memory", "recovery_s": 60, "hang": {"setup_s": 300, "step_s": 60}}


def test_a_killed_rank_and_a_dead_node_are_replaced_in_memory(site: tuple[User, FaultNodes]) -> None:
    user, nodes = site
    run = FaultRun(user, nodes, "memory", trainer="real", steps=100_000)
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
