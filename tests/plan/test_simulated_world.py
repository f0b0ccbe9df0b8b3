"""The plan of a run against the simulated world of Aegis: the same faults cost the same, by the same decisions.

The plan has no nodes, agents and messages: what a fault costs is a number there, and the world shows it. It leaves
out two things: a lost batch node, after which Slurm requeues the job though there are spares, and a dead node
without a spare that ranks continue without in memory (`aegis.min_nodes`).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.aegis.simulation.schedules import SETTINGS
from zslurm.aegis.simulation.quiet import pass_quietly
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.run_record import REQUEUE_S
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
from zslurm.plan.failures import GivenFaults, Kind, SampledFault
from zslurm.plan.simulate import Scenario, simulate

STEPS, FAULTS = 1500, 6
AEGIS = SETTINGS.model_copy(update={"max_excluded": 1000})
HAPPENS: dict[Kind, What] = {"node": "node_dies", "process": "rank_killed", "hang": "rank_hangs"}


@dataclass(frozen=True)
class Faults:
    """Faults, minutes after each other, and the node of the run that each of them strikes: not the first one."""

    nodes: int
    spares: int
    times: tuple[int, ...]
    kinds: tuple[Kind, ...]
    places: tuple[int, ...]

    @classmethod
    def drawn(cls, seed: int) -> Faults:
        """Return faults by chance, no two ranks on one node: a node on which ranks fail repeatedly is excluded."""
        dice = random.Random(seed)
        kinds = tuple(dice.choice(tuple(HAPPENS)) for _ in range(FAULTS))
        times = tuple(300 * number + dice.randint(100, 250) for number in range(FAULTS))
        return cls(8, dice.choice([0, 1, 2]), times, kinds, tuple(dice.sample(range(1, 8), FAULTS)))


class PlacedFaults(GivenFaults):
    """Given faults, each on its node."""

    def __init__(self, faults: Faults) -> None:
        super().__init__([(float(at), kind) for at, kind in zip(faults.times, faults.kinds, strict=True)])
        self._draws = [(place + 0.5) / faults.nodes for place in faults.places]

    def pop(self) -> SampledFault:
        return super().pop()._replace(draw=self._draws.pop(0))


def played(faults: Faults, *, in_memory: bool) -> tuple[Counter[str], int]:
    """Return what was done in the world, and the seconds that the run took."""
    world = World((), nodes=40, ranks_per_node=2, total=STEPS, in_memory=in_memory)
    settings = AEGIS.model_copy(update={"recovery": "memory", "recovery_s": 15.0}) if in_memory else AEGIS
    run = Run(world, settings, faults.nodes, faults.spares)
    due = list(zip(faults.times, faults.kinds, faults.places, strict=True))
    while run.phase != "over":
        pass_quietly(world, run, due[0][0] - 1 if due else None)
        if due and world.now + 1 >= due[0][0]:
            at, kind, place = due.pop(0)
            assert world.attempt is not None
            node = world.nodes.index(world.attempt.nodes[place])
            world.happenings.append(Happening(at, HAPPENS[kind], node if kind == "node" else 2 * place))
        world.second()
        run.second()
    assert run.outcome == "completed"
    done = Counter(str(row["action"]) for row in run.rows if row["event"] == "decision")
    return done + Counter(row["event"] for row in run.rows if row["event"] == "recovered_in_memory"), world.now


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_plan_has_the_decisions_and_the_time_of_the_simulated_world(seed: int, *, in_memory: bool) -> None:
    faults = Faults.drawn(seed)
    done, seconds = played(faults, in_memory=in_memory)
    scenario = Scenario(
        steps=STEPS,
        step_s=STEP_S,
        nodes=faults.nodes,
        spares=faults.spares,
        every=SAVE_EVERY,
        write_s=SAVE_S,
        detect_s={"process": PEERS_NOTICE_S, "node": AEGIS.heartbeat_timeout_s, "hang": AEGIS.hang.step_s},
        restart_s=SETUP_S + 2,
        regroup_s=3.0 if in_memory else None,
        wait_s=REQUEUE_S + 1,
        aegis=AEGIS,
    )
    plan = simulate(scenario, PlacedFaults(faults))
    assert plan.finished
    assert plan.wall_s == pytest.approx(seconds, rel=0.02)
    recovered = done["recovered_in_memory"]
    assert plan.actions.get("memory", 0) == recovered
    assert plan.actions.get("requeue", 0) == done["requeue"]
    assert plan.actions.get("restart", 0) == FAULTS - recovered
    if not in_memory:
        assert plan.actions.get("swap", 0) == done["swap"]
