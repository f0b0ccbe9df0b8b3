"""Faults for the pairs that are no rows of the matrix: of Slurm and of files, and halves of the matrix's rows.

A half does its harm at the moment at which it is called and is not undone by itself: `Pair.heal` does that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import cast

from tests.faults.harness import AT, FaultRun
from tests.faults.matrix import ROWS, VICTIM, Injected, Row, by_itself, kill_nodes, pull_cable
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster

OTHER = 2
"""The rank, or its node, to which the second fault happens where it is not `VICTIM`."""
PATIENT, URGENT = "patient", "urgent"
"""Partitions of the same nodes: jobs of the second take the nodes of jobs of the first."""
GRACE_S = 30
_SHARED = "Nodes=node[0-4] MaxTime=1-0 State=UP"


@contextlib.contextmanager
def preemption(cluster: SlurmCluster) -> Iterator[None]:
    """Have Slurm requeue the jobs of one partition for those of another, after a grace time."""
    before = cluster.slurm_conf.read_text()
    cluster.slurm_conf.write_text(
        f"{before}PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        f"PartitionName={PATIENT} {_SHARED} PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S}\n"
        f"PartitionName={URGENT} {_SHARED} PriorityTier=10 PreemptMode=OFF\n"
    )
    _restart_controller(cluster)
    try:
        yield
    finally:
        cluster.restore()
        cluster.slurm_conf.write_text(before)
        _restart_controller(cluster)


def _restart_controller(cluster: SlurmCluster) -> None:
    cluster.stop_controller()
    cluster.start_controller()


def preempt(run: FaultRun) -> Injected:
    """A short job of a higher tier wants three of the five nodes that both partitions share."""
    run.wait_for_step()
    now = time.time()
    run.cluster.sbatch("true", f"--partition={URGENT}", "--nodes=3", "--exclusive", "--output=/dev/null")
    return Injected(now)


def take_controller_away(run: FaultRun) -> Injected:
    """Until `bring_controller_back`."""
    run.wait_for_step()
    now = time.time()
    run.cluster.stop_controller()
    return Injected(now)


def bring_controller_back(run: FaultRun) -> None:
    run.cluster.start_controller()


def pull_cable_out(run: FaultRun) -> Injected:
    """Until `plug_cable_in`, which comes before it counts: the node is not to blame."""
    return Injected(pull_cable(run).time)


def plug_cable_in(rank: int = VICTIM) -> Callable[[FaultRun], None]:
    """On the node on which the rank ran when the cable was pulled."""

    def heal(run: FaultRun) -> None:
        first = next(mark["node"] for mark in run.marks("loaded") if mark["rank"] == rank)
        run.nodes.rails[first].bring_nic_up("ionic_0")

    return heal


def move_run_away(run: FaultRun) -> Injected:
    run.wait_for_step()
    now = time.time()
    run.move_away()
    return Injected(now)


def fill_disk(run: FaultRun) -> Injected:
    """Until `free_disk`."""
    run.wait_for_step(12)
    now = time.time()
    run.fill_disk()
    return Injected(now)


def free_disk(run: FaultRun) -> None:
    (run.path / "checkpoints" / "filler").unlink()


def damage_newest_checkpoint(run: FaultRun) -> Injected:
    """Only that: whether it is needed is another fault's doing."""
    run.wait_for_step()
    now = time.time()
    run.damage_newest_checkpoint()
    return Injected(now)


def on_rank(number: int, rank: int = OTHER) -> Row:
    """A row of the matrix that happens to another rank, or to its node."""
    row = ROWS[number - 1]
    if row.rank is not None:
        row = replace(row, rank=rank)
    if row.inject is by_itself:
        return replace(row, in_ranks=tuple(fault | {"rank": rank} for fault in row.in_ranks))
    if number in (4, 18):
        return replace(row, inject=kill_nodes(rank))
    return replace(row, inject=partial(cast(Callable[..., Injected], row.inject), rank=rank))


def later(row: Row, steps: int) -> Row:
    """A row whose ranks do harm to themselves so many steps later."""
    return replace(row, in_ranks=tuple(fault | {"step": fault["step"] + steps} for fault in row.in_ranks))


CONTROLLER_AWAY = replace(
    ROWS[16], fault="slurmctld away", inject=take_controller_away, kinds=(), actions=(), pace_s=0.1
)
CHECKPOINT_DAMAGED = replace(ROWS[12], inject=damage_newest_checkpoint, kinds=(), actions=(), pace_s=0.1)
DISK_FULL = replace(ROWS[13], inject=fill_disk)
CABLE_PULLED = replace(ROWS[8], inject=pull_cable_out, pace_s=0.3)
"""A link that comes back before it counts; `ROWS[7]` is one that does not."""

PREEMPTED = Row(
    26, "preempted with a grace time", preempt, (), ("requeue",), slurm={"partition": PATIENT}, pace_s=0.3
)
EXITS_0 = Row(
    27, "one rank exits 0 before the end", by_itself, ("rank_exit", "early_exit"), rank=VICTIM,
    in_ranks=({"what": "exit", "step": AT, "rank": VICTIM, "code": 0},),
)  # fmt: skip
SAME_NAN = Row(
    28, "NaN that comes back bit for bit", by_itself, ("nan_loss",), ("restart", "stop"), "stopped",
    in_ranks=({"what": "nan", "step": AT, "times": 1000},), cause="in a row",
)  # fmt: skip
MOVED_AWAY = Row(29, "run directory moved away", move_run_away, (), (), "gone", pace_s=0.3)
