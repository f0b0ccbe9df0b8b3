"""Play a run in the simulated world of Aegis, and simulate it as a plan does: with the same faults and times.

The world (aegis/simulation) has nodes, agents, messages and Slurm, and the core of the supervisor. Its steps,
saves and starts take fixed times. So a play does not show how long a run takes, but that a plan has its decisions,
and what waits and fewer nodes cost: nodes, spares, `aegis` and the wait in the queue are those of the run. Faults
of the network are left out: they end all ranks at once, which no single fault of the world does.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zslurm.aegis.core.policy.shrinking import HELPER_STARTS_S
from zslurm.aegis.simulation.quiet import pass_quietly
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.run_record import REQUEUE_S
from zslurm.aegis.simulation.truth import SLURM_TIMEOUT_S
from zslurm.aegis.simulation.world import (
    PEERS_NOTICE_S,
    SAVE_EVERY,
    SAVE_S,
    SETUP_S,
    STEP_S,
    Happening,
    What,
    World,
)
from zslurm.aegis.types import WorkLeft
from zslurm.config.aegis import AegisSection, HangLimits
from zslurm.plan.failures import KINDS, FailureRates, GivenFaults, Kind
from zslurm.plan.simulate import Scenario, simulate

_HAPPENS: dict[Kind, What] = {"node": "node_dies", "process": "rank_killed", "hang": "rank_hangs"}
_RANKS = 2
"""Ranks of a node: with more the world takes longer, and decides the same."""
_JOINS_S, _RESTARTS_S, _REGROUPS_S, _REQUEUES_S = 7, 2, 3, 1
"""Seconds in the world: of helper nodes until their ranks join; of a restart besides the set-up; of a recovery in
memory with its detection; of a requeue besides the wait."""
_QUEUE_LAST_S = 2
"""Seconds of a wait in the queue that are played."""
_HANG = HangLimits(setup_s=60, step_s=30, step_factor=5, save_s=30, eval_s=30)
"""Limits that pass before ranks in the world give up waiting for one that hangs."""
_FEWEST_RECOVERY_S = 15.0
"""Of `aegis.recovery_s`: in the world a process takes a few seconds to be ready."""
_AS_NODES = 20
"""Nodes that take as long as everything else in a second of the world."""
_MOST_FAULTS, _MOST_NODE_SECONDS = 100, 200_000
"""Where a play ends: about two seconds of processor time. A second in which nothing happens costs nothing."""


@dataclass(frozen=True)
class PlacedFault:
    """A fault of a run in the world.

    Attributes:
        at: seconds since the run began.
        kind: node, process or hang.
        position: of its node among those in use, as a share of them.
    """

    at: int
    kind: Kind
    position: float


@dataclass(frozen=True)
class Played:
    """A run in the world, next to its simulation.

    Attributes:
        goodput: in the world.
        simulated: the goodput by the simulation of plans.
        seconds: that were played.
        faults: that struck the run.
        actions: how often each was taken in the world: memory, shrink, helper, requeue, restart.
        simulated_actions: the same by the simulation.
        outcome: how the run ended in the world; empty if it did not.
    """

    goodput: float
    simulated: float
    seconds: int
    faults: int
    actions: dict[str, int]
    simulated_actions: dict[str, int]
    outcome: str


def drawn(rates: FailureRates, gpus_per_node: int, scenario: Scenario, seed: int) -> list[PlacedFault]:
    """Draw the first faults of a run on its nodes."""
    dice = random.Random(seed)
    shares = {kind: rate for kind, rate in zip(KINDS, rates.per_gpu_hour, strict=True) if kind in _HAPPENS}
    per_second = sum(shares.values()) * gpus_per_node * scenario.nodes / 3600
    at, faults = 0.0, list[PlacedFault]()
    while per_second and len(faults) < _MOST_FAULTS:
        at += dice.expovariate(per_second)
        (kind,) = dice.choices(list(shares), list(shares.values()))
        faults.append(PlacedFault(int(at) + 1, kind, dice.random()))
    return faults


def play(scenario: Scenario, faults: Sequence[PlacedFault]) -> Played:
    """Play a run in the world until it ends, took long or met many faults, and simulate the same time of it.

    Faults that come while no ranks run, as in the queue, strike nothing.
    """
    scenario = _with_times_of_world(scenario)
    run = _run(scenario, sum(fault.kind == "node" for fault in faults))
    world, due, met = run.world, list(faults), list[PlacedFault]()
    most = _MOST_NODE_SECONDS // (scenario.nodes + scenario.spares + _AS_NODES)
    work, step, seconds = 0.0, 0, 0
    while run.phase != "over" and seconds < most and (due or len(faults) < _MOST_FAULTS):
        _wait_in_queue(run, due[0].at if due else None)
        pass_quietly(world, run, due[0].at - 1 if due else None)
        if due and world.now + 1 >= due[0].at:
            fault = due.pop(0)
            if (happening := _happening(run, fault)) is not None:
                world.happenings.append(happening)
                met.append(fault)
        world.second()
        run.second()
        seconds += 1
        attempt = world.attempt
        if attempt is not None and run.phase in ("watching", "over") and attempt.step != step:
            work += (attempt.step - step) * len(attempt.nodes) / scenario.nodes  # lost steps are taken again
            step = attempt.step
    to_simulate = GivenFaults([(float(fault.at), fault.kind) for fault in met], [fault.position for fault in met])
    simulated = simulate(replace(scenario, horizon_s=float(world.now)), to_simulate)
    return Played(
        goodput=work * STEP_S / world.now,
        simulated=simulated.goodput,
        seconds=world.now,
        faults=len(met),
        actions=_actions(run),
        simulated_actions=simulated.actions,
        outcome=run.outcome,
    )


def _with_times_of_world(s: Scenario) -> Scenario:
    """Return a run as it is in the world."""
    changed = {
        "recovery": "restart" if s.regroup_s is None else "memory",
        "recovery_s": max(s.aegis.recovery_s, _FEWEST_RECOVERY_S),
        "expected_wait_s": s.wait_s,
        "hang": _HANG,
    }
    return replace(
        s,
        steps=max(1, round(s.ideal_s / STEP_S)),
        step_s=float(STEP_S),
        every=SAVE_EVERY,
        stall_s=0.0,
        write_s=float(SAVE_S),
        detect_s={
            "process": PEERS_NOTICE_S,
            "node": _dead_after_s(s.aegis),
            "hang": _HANG.step_s,
        },
        batch_lost_s=SLURM_TIMEOUT_S,
        restart_s=SETUP_S + _RESTARTS_S,
        regroup_s=None if s.regroup_s is None else _REGROUPS_S,
        copy_every=1,
        copy_s=0.0,
        cluster_nodes=None,
        aegis=s.aegis.model_copy(update=changed),
        work=WorkLeft(s.nodes * _RANKS, 1, _RANKS),
        limit_s=None,
        slowdown=None,
    )


def _dead_after_s(aegis: AegisSection) -> float:
    """Return the seconds after which a dead node is confirmed: sooner if its slurmd and neighbours are asked."""
    if aegis.ask_after_s == 0:
        return aegis.heartbeat_timeout_s
    return min(aegis.heartbeat_timeout_s, math.ceil(max(aegis.ask_after_s, 1.5 * aegis.sensors.progress_s)))


def _run(s: Scenario, lost: int) -> Run:
    """Return a run that is submitted in a world with a node for each that is lost."""
    world = World(
        (),
        nodes=s.nodes + s.spares + lost,
        ranks_per_node=_RANKS,
        total=s.steps,
        in_memory=s.regroup_s is not None,
    )
    run = Run(world, s.aegis, s.nodes, s.spares)
    run.requeue_s = max(1, round(s.wait_s) - _REQUEUES_S)
    run.helper_s = max(1, round(s.wait_s + HELPER_STARTS_S) - _JOINS_S)
    run.helper_wait_s = s.wait_s if s.helpers and s.aegis.heal == "auto" else None
    return run


def _wait_in_queue(run: Run, until: int | None) -> None:
    """Let the seconds pass in which the job waits and no fault comes, but for the last ones.

    A job that Slurm itself has put back, after the loss of its batch node, waits as long as any other.
    """
    world = run.world
    if run.phase == "queued":
        if run.is_requeued_by_slurm:  # it starts again in the world as soon as there are nodes
            run.until += run.requeue_s - REQUEUE_S
            run.is_requeued_by_slurm = False
        seconds = max(0, (run.until if until is None else min(run.until, until)) - _QUEUE_LAST_S - world.now)
        world.now, world.awake = world.now + seconds, world.awake + seconds


def _happening(run: Run, fault: PlacedFault) -> Happening | None:
    """Return what happens to the world in its next second; None if no ranks run that the fault could strike."""
    world, attempt = run.world, run.world.attempt
    if run.phase != "watching" or attempt is None or attempt.over is not None:
        return None
    position = int(fault.position * len(attempt.nodes))
    where = world.nodes.index(attempt.nodes[position]) if fault.kind == "node" else _RANKS * position
    return Happening(world.now + 1, _HAPPENS[fault.kind], where)


def _actions(run: Run) -> dict[str, int]:
    """Return what was done in the world, by the names of the simulation."""
    rows = Counter(str(row["event"]) for row in run.rows)
    shrunk = sum(row["event"] == "recovered_in_memory" and row.get("world_size") is not None for row in run.rows)
    done = {
        "memory": rows["recovered_in_memory"],
        "helper": rows["ranks_joined"],
        "shrink": shrunk,
        "requeue": run.starts - 1,
        "restart": rows["attempt_started"] - 1,
    }
    return {name: count for name, count in done.items() if count}
