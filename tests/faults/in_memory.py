"""The matrix with `aegis.recovery: memory`: which rung of the ladder each fault takes, and faults of its own.

The first rung is the recovery in memory. If the policy or the ranks cannot take it, the run does what it would
do without, and an event has the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.faults.harness import AT, FaultRun
from tests.faults.matrix import ROWS, VICTIM, Injected, Row, by_itself, kill_nodes
from tests.on_slurm.cluster import processes
from tests.waiting import wait_for


@dataclass(frozen=True)
class MemoryRow(Row):
    """A fault of a run that recovers in memory.

    Attributes:
        recovered: the ranks that each recovery in memory replaces, in order.
        why: words of the reason for which a rung was left, if one was.
        after: done once the run trains again.
    """

    recovered: tuple[tuple[int, ...], ...] = ()
    why: str = ""
    after: Callable[[FaultRun], None] | None = None

    @property
    def id(self) -> str:
        """As pytest shows it."""
        return f"memory-{super().id}"

    @property
    def ranks(self) -> tuple[int, int]:
        """Nodes of the run, and ranks of each."""
        return self.nodes, self.slurm.get("ranks_per_node", 1)


def kill_ranks(*ranks: int) -> Callable[[FaultRun], Injected]:
    """These ranks are killed together."""

    def inject(run: FaultRun) -> Injected:
        run.wait_for_step()
        found = [run.rank(rank) for rank in ranks]
        now = time.time()
        for process in found:
            process.kill()
        return Injected(now)

    return inject


def kill_node_after_node(run: FaultRun) -> Injected:
    """The second dies when the first was replaced."""
    first = kill_nodes(VICTIM)(run)
    recovered = run.wait_until_recovered()
    run.wait_for_step(recovered["step"] + 2)
    second = kill_nodes(2)(run)
    return Injected(first.time, first.guilty + second.guilty)


def kill_supervisor_and_rank(run: FaultRun) -> Injected:
    run.wait_for_step()
    rank = run.rank(VICTIM)
    now = run.kill_supervisor()
    rank.kill()
    return Injected(now)


def kill_rank_then_supervisor(run: FaultRun) -> Injected:
    """The supervisor is killed once it has published who takes the rank's place."""
    run.wait_for_step()
    rank, now = run.rank(VICTIM), time.time()
    rank.kill()
    wait_for(lambda: run.events("recovery_started"), "the recovery to begin", every_s=0.01)
    run.kill_supervisor()
    return Injected(now)


def freeze_node(run: FaultRun) -> Injected:
    """All processes of a node stop, as in a virtual machine that is paused."""
    run.wait_for_step()
    node, now = run.node_of(VICTIM), time.time()
    processes.freeze(_of_node(run, node))
    return Injected(now, (node,))


def wake_node(run: FaultRun) -> None:
    """The frozen node wakes up after its rank was replaced: that rank leaves, and has written nothing."""
    frozen = next(mark for mark in run.marks("loaded") if mark["rank"] == VICTIM)
    for process in _of_node(run, frozen["node"]):
        process.resume()
    run.wait_until_gone(frozen["pid"])
    log = run.log_of(VICTIM)
    assert "is no member of generation 1: another process has taken its place" in log, log[-2000:]


def wait_for_helper(run: FaultRun) -> None:
    """A helper job brings a node in the dead one's place, and the run is on as many nodes as before."""
    joined = run.wait_until_joined()
    assert joined["world_size"] == 3 and joined["rolled_back"] == 0
    kinds = ("helper_requested", "helper_queued", "helper_joined", "ranks_joined")
    assert [event["event"] for event in run.events(*kinds)] == list(kinds)


def helper_costs_least(run: FaultRun) -> None:
    """A helper job is chosen though fewer nodes or a requeue would do, and its numbers are there."""
    wait_for_helper(run)
    (started,), (requested,) = run.events("recovery_started"), run.events("helper_requested")
    assert started["heal"] == "helper"
    assert started["helper_lost_s"] < min(started["lost_s"], started["expected_wait_s"])
    assert requested["helper_lost_s"] < requested["lost_s"]


def kill_supervisor_with_helper(run: FaultRun) -> None:
    """The supervisor is killed while a helper job's node is one of the run's: the next one keeps it."""
    joined = run.wait_until_joined()
    run.kill_supervisor()
    run.wait_for_step(joined["step"] + 8)
    assert not run.events("helper_over")


def cancel_helper(run: FaultRun) -> None:
    """Somebody cancels the helper job: the run loses its node, and gets another one in the same way."""
    run.wait_until_joined()
    run.wait_for_step(run.events("ranks_joined")[0]["step"] + 2)
    run.cluster.run(["scancel", run.events("helper_queued")[0]["helper"]])
    run.wait_until_recovered(2)
    run.wait_until_joined(2)


def spare_was_checked_twice(run: FaultRun) -> None:
    """A spare is checked when the job starts, and again before it takes the ranks of the dead node."""
    used = [event for event in run.events("spare_checked") if event["ok"]]
    began = run.events("recovery_started")[-1]["time"]
    assert len({event["node"] for event in used}) == 1
    assert [event["time"] <= began for event in used] == [True, True]


def _of_node(run: FaultRun, node: str) -> list[Any]:
    instance = run.cluster.instance
    return [
        *processes.daemons(instance, f"slurmd.{node}"),
        *processes.step_daemons(instance, node),
        *processes.tasks(instance, node),
    ]


def _in_memory(number: int, **changes: Any) -> MemoryRow:
    """A row of the matrix with what differs if the run recovers in memory."""
    row = next(row for row in ROWS if row.number == number)
    given = {field.name: getattr(row, field.name) for field in fields(Row)}
    return MemoryRow(**given | {"sample": False} | changes)


VICTIM_REPLACED: dict[str, Any] = {"recovered": ((VICTIM,),), "actions": ()}

_DIFFERENT: dict[int, dict[str, Any]] = {
    1: VICTIM_REPLACED | {"sample": True, "nodes": 2},
    2: VICTIM_REPLACED,
    3: VICTIM_REPLACED,
    4: VICTIM_REPLACED | {"after": spare_was_checked_twice},
    5: {"why": "is lost together with rank"},
    6: VICTIM_REPLACED,
    7: VICTIM_REPLACED,
    8: VICTIM_REPLACED,
    10: VICTIM_REPLACED,
    13: VICTIM_REPLACED,
    17: VICTIM_REPLACED,
    21: {
        "inject": kill_node_after_node, "recovered": ((VICTIM,), (2,)), "actions": (),
    },
    24: {"recovered": ((VICTIM,),), "actions": ("requeue",)},
}  # fmt: skip
"""Faults that are recovered from in memory, or for which the reason why they are not is known; others are the
program's own, storage's or Slurm's."""

PAIRS: dict[str, Any] = {"nodes": 2, "slurm": {"ranks_per_node": 2}}
"""Four ranks on two nodes: rank 1's buddy is rank 3, rank 0's is rank 2."""
LAST = 3


def _kills_itself(what: str, rank: int = LAST, **more: Any) -> dict[str, Any]:
    return {"what": what, "rank": rank, **more}


def _further(
    number: int, fault: str, inject: Callable[[FaultRun], Injected], *lost: int, **more: Any
) -> MemoryRow:
    """A rank of four is lost, and replaced."""
    given: dict[str, Any] = {"recovered": (lost,) if lost else (), "actions": ()} | PAIRS | more
    return MemoryRow(number, fault, inject, ("rank_killed",), **given)


MEMORY_ROWS = (
    *(_in_memory(row.number, **_DIFFERENT.get(row.number, {})) for row in ROWS),
    _further(
        41, "rank killed during an all-gather", by_itself, LAST,
        in_ranks=(_kills_itself("kill_in_all_gather", step=AT),),
    ),
    _further(
        42, "rank killed during a reduce-scatter", by_itself, LAST,
        in_ranks=(_kills_itself("kill_in_reduce_scatter", step=AT),),
    ),
    _further(
        43, "rank killed inside a save", by_itself, LAST,
        in_ranks=(_kills_itself("kill_in_save", step=AT),),
    ),
    _further(
        44, "second rank killed while the first is replaced", kill_ranks(LAST), 0, LAST,
        in_ranks=(_kills_itself("kill_in_regroup", 0),),
    ),
    _further(
        45, "replacement killed while it gets its state", kill_ranks(LAST), LAST,
        in_ranks=(_kills_itself("kill_in_restore"),),
    ),
    replace(
        _further(
            46, "rank ends while it is set up", by_itself, actions=("restart",),
            # The other ranks take longer to set up, as with a large model, and so outlive it.
            in_ranks=(_kills_itself("exit_in_setup", setup_s=4.0),), why="no step was finished yet",
        ),
        kinds=("rank_exit",),
    ),
    _further(47, "two ranks of one node killed", kill_ranks(2, 3), 2, 3),
    _further(
        48, "a rank and its buddy killed", kill_ranks(1, 3), actions=("restart",),
        why="rank 1 is lost together with rank 3, which kept the copy of its state",
    ),
    _further(49, "rank 0 killed", kill_ranks(0), 0),
    _further(50, "supervisor and a rank killed together", kill_supervisor_and_rank, VICTIM),
    _further(53, "supervisor killed while a lost rank is replaced", kill_rank_then_supervisor, VICTIM),
    replace(
        _in_memory(4, **VICTIM_REPLACED), number=51, fault="node freezes and wakes up after it was replaced",
        inject=freeze_node, after=wake_node, pace_s=0.3,
    ),
    replace(
        _in_memory(4, **VICTIM_REPLACED), number=54, fault="node dies, and a helper job brings another",
        slurm={}, aegis={"heal": "helper"}, after=wait_for_helper, pace_s=1.0, same_size=False,
    ),
    replace(
        _in_memory(4, **VICTIM_REPLACED), number=57, fault="node dies, and of three ways a helper job costs least",
        slurm={}, aegis={"min_nodes": 2}, after=helper_costs_least, pace_s=4.0, same_size=False,
    ),
    replace(
        _in_memory(4, **VICTIM_REPLACED), number=55, fault="helper job is cancelled after its node has joined",
        slurm={}, aegis={"heal": "helper"}, after=cancel_helper, pace_s=1.5, same_size=False,
        recovered=((VICTIM,), (2,)),
    ),
    replace(
        _in_memory(4, **VICTIM_REPLACED), number=56, fault="supervisor killed after a helper job has joined",
        slurm={}, aegis={"heal": "helper"}, after=kill_supervisor_with_helper, pace_s=1.0, same_size=False,
    ),
    replace(
        _in_memory(5), number=52, fault="two nodes die together that are no pair", inject=kill_nodes(1, 3),
        nodes=4, actions=(), recovered=((1, 3),), slurm={"spares": 2},
    ),
)  # fmt: skip
