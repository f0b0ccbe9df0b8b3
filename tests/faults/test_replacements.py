"""Faults that happen while an agent or the supervisor is replaced, or while slurmctld is away.

The rows are like those of matrix.py; `make faults` and `make soak` run them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.harness import FaultRun
from tests.faults.matrix import SPARE, VICTIM, Injected, Row, break_gpu, kill_nodes, pull_cable
from tests.faults.nodes import FaultNodes
from tests.faults.test_faults import _check, _inject
from tests.on_slurm.test_runs import User
from zslurm.run.run_dir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.timeout(900)]

_AWAY_S = 45.0


Inject = Callable[[FaultRun], Injected]


def without_controller(inject: Inject) -> Inject:
    """slurmctld is away from before the fault until 45 s after it."""

    def happens(run: FaultRun) -> Injected:
        run.wait_for_step()
        run.cluster.stop_controller()
        try:
            injected = inject(run)
            time.sleep(_AWAY_S)
        finally:
            run.cluster.start_controller()
        return injected

    return happens


def without_supervisor(inject: Inject) -> Inject:
    """The supervisor is killed, and the fault happens before its successor's agents look."""

    def happens(run: FaultRun) -> Injected:
        run.wait_for_step()
        run.kill_supervisor()
        return inject(run)

    return happens


def without_agent(inject: Inject) -> Inject:
    """The agent of the victim's node is killed, and the fault happens before the next one looks."""

    def happens(run: FaultRun) -> Injected:
        run.wait_for_step()
        run.agent(run.node_of(VICTIM)).kill()
        return inject(run)

    return happens


def without_controller_and_agents(run: FaultRun) -> Injected:
    """The agents' srun gives up while slurmctld is away: nothing can end them, and none can be started."""
    run.wait_for_step()
    now = time.time()
    run.cluster.stop_controller()
    try:
        run.agents_srun().kill()
        time.sleep(_AWAY_S)
    finally:
        run.cluster.start_controller()
    return Injected(now)


ROWS = (
    Row(
        31,
        "node dies while slurmctld is away",
        without_controller(kill_nodes(VICTIM)),
        ("node_dead", "slurm_node_fail"),
        ("swap",),
        slurm=SPARE,
        pace_s=2.0,
    ),
    Row(
        32,
        "ECC error while the supervisor is replaced",
        without_supervisor(break_gpu),
        ("gpu_ras_uncorrectable",),
        ("swap",),
        slurm=SPARE,
        pace_s=1.0,
    ),
    Row(
        33,
        "NIC down while the supervisor is replaced",
        without_supervisor(pull_cable),
        ("nic_link_down",),
        ("swap",),
        slurm=SPARE,
        pace_s=1.0,
        aegis={"tolerate_s": 10},
    ),
    Row(
        34,
        "ECC error while the agent is replaced",
        without_agent(break_gpu),
        ("gpu_ras_uncorrectable",),
        ("swap",),
        slurm=SPARE,
        pace_s=1.0,
    ),
    Row(
        35,
        "NIC down while the agent is replaced",
        without_agent(pull_cable),
        ("nic_link_down",),
        ("swap",),
        slurm=SPARE,
        pace_s=1.0,
        aegis={"tolerate_s": 10},
    ),
    Row(
        36,
        "srun of the agents gives up while slurmctld is away",
        without_controller_and_agents,
        ("agent_lost",),
        (),
        pace_s=3.0,
    ),
)


def memory_left(run: FaultRun, injected: Injected) -> list[Path]:
    """Files in which agents remembered an attempt, on nodes that have not died."""
    sample = RunDir(run.path).node_memory({"SLURMD_NODENAME": "NODE"}, 0)
    owner = sample.name.split("-")[2]
    found = sample.parent.glob(f"zslurm-*-{owner}-agents-*")
    return [path for path in found if not any(f"-agents-{node}-" in path.name for node in injected.guilty)]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ROWS])
def test_the_run_survives(row: Row, site: tuple[User, FaultNodes]) -> None:
    user, nodes = site
    run = FaultRun(user, nodes, f"fault-{row.number:02d}")
    try:
        injected = _inject(row, run)
        end = run.wait_until_over()
        _check(row, run, injected, end["outcome"])
        assert not memory_left(run, injected), "what agents remember of an attempt is removed with the run"
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{error}\n{run.story()}") from error
    finally:
        run.cleanup()
