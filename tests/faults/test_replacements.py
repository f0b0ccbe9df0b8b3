"""Faults that happen while those who would notice them are being replaced, or Slurm is away."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.cluster.test_runs import User
from tests.faults.harness import FaultRun
from tests.faults.matrix import SPARE, VICTIM, Injected, Row, break_gpu, kill_nodes, pull_cable
from tests.faults.nodes import FaultNodes
from tests.faults.test_faults import _check, _inject

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.timeout(900)]

_AWAY_S = 45.0


def without_controller(inject: Callable[[FaultRun], Injected]) -> Callable[[FaultRun], Injected]:
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


def without_supervisor(inject: Callable[[FaultRun], Injected]) -> Callable[[FaultRun], Injected]:
    def happens(run: FaultRun) -> Injected:
        run.wait_for_step()
        run.kill_supervisor()
        return inject(run)

    return happens


def without_agent(inject: Callable[[FaultRun], Injected]) -> Callable[[FaultRun], Injected]:
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


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ROWS])
def test_the_run_survives(row: Row, site: tuple[User, FaultNodes]) -> None:
    user, nodes = site
    run = FaultRun(user, nodes, f"fault-{row.number:02d}")
    try:
        injected = _inject(row, run)
        end = run.wait_until_over()
        _check(row, run, injected, end["outcome"])
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{error}\n{run.story()}") from error
    finally:
        import shutil

        shutil.copy(run.path / "events.jsonl", f"/tmp/outage/events-{row.number}-{int(time.time())}.jsonl")
        print(run.story())
        run.cleanup()
