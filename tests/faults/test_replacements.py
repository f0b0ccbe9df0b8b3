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
from tests.faults.test_faults import check, inject, run_of
from tests.on_slurm.cluster.user import User
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


def kill_supervisor(run: FaultRun) -> None:
    """So that the fault happens before its successor's agents look."""
    run.kill_supervisor()


def kill_agent(run: FaultRun) -> None:
    """That of the victim's node: the fault happens before the next one looks."""
    run.agent(run.node_of(VICTIM)).kill()


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


_NOTICED_AS = {break_gpu: "gpu_ras_uncorrectable", pull_cable: "nic_link_down"}


def _while_replaced(
    number: int, fault: str, replaced: str, inject: Inject, kill: Callable[[FaultRun], None]
) -> Row:
    """A fault right after the process that would have noticed it was killed."""

    def happens(run: FaultRun) -> Injected:
        run.wait_for_step()
        kill(run)
        return inject(run)

    return Row(
        number,
        f"{fault} while {replaced} is replaced",
        happens,
        (_NOTICED_AS[inject],),
        ("swap",),
        slurm=SPARE,
        pace_s=1.0,
        aegis={"tolerate_s": 10} if inject is pull_cable else {},
    )


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
    _while_replaced(32, "ECC error", "the supervisor", break_gpu, kill_supervisor),
    _while_replaced(33, "NIC down", "the supervisor", pull_cable, kill_supervisor),
    _while_replaced(34, "ECC error", "the agent", break_gpu, kill_agent),
    _while_replaced(35, "NIC down", "the agent", pull_cable, kill_agent),
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
    with run_of(row, site) as run:
        injected = inject(row, run)
        end = run.wait_until_over()
        check(row, run, injected, end["outcome"])
        assert not memory_left(run, injected), "what agents remember of an attempt is removed with the run"
