"""The plan of a run against the simulated world of Aegis: the same faults cost the same, by the same decisions.

The plan has no nodes, agents and messages: what a fault costs is a number there, and the world shows it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.aegis.simulation.schedules import SETTINGS
from tests.plan.in_world import PlacedFault, Played, drawn, play
from zslurm.aegis.simulation.truth import SLURM_TIMEOUT_S
from zslurm.aegis.simulation.world import SAVE_EVERY, STEP_S
from zslurm.config.aegis import AegisSection, Heal
from zslurm.plan.failures import PRESETS, Kind
from zslurm.plan.simulate import Scenario

FAULTS = 6
AEGIS = SETTINGS.model_copy(update={"max_excluded": 1000})
EIGHT = Scenario(steps=1500, step_s=2.0, nodes=8, wait_s=6.0, aegis=AEGIS)


def heals(heal: Heal, scenario: Scenario = EIGHT) -> Scenario:
    """Return a run with recovery in memory that replaces lost nodes in this way."""
    aegis: AegisSection = scenario.aegis.model_copy(update={"heal": heal, "min_nodes": 2})
    return replace(scenario, regroup_s=3.0, aegis=aegis, helpers=heal in ("helper", "auto"))


def some_faults(seed: int, first: int = 1) -> list[PlacedFault]:
    """Draw faults, no two of them on one node of eight: one on which ranks fail repeatedly is excluded."""
    dice = random.Random(seed)
    kinds: tuple[Kind, ...] = tuple(dice.choice(("node", "process", "hang")) for _ in range(FAULTS))
    places = dice.sample(range(first, 8), FAULTS)
    times = [300 * number + dice.randint(100, 250) for number in range(FAULTS)]
    return [PlacedFault(at, kind, (place + 0.5) / 8) for at, kind, place in zip(times, kinds, places, strict=True)]


def assert_alike(played: Played, faults: int = FAULTS) -> None:
    """Assert that a plan has the decisions of the world, and loses as much time.

    They may differ by three seconds a fault, and by the steps between two saves: a fault may come before a save in
    one of them and after it in the other.
    """
    assert played.outcome == "completed"
    assert played.faults == faults
    assert {name: count for name, count in played.simulated_actions.items() if name != "swap"} == played.actions
    lost_s, planned_s = (played.seconds * (1 - goodput) for goodput in (played.goodput, played.simulated))
    assert planned_s == pytest.approx(lost_s, abs=3.0 * faults + SAVE_EVERY * STEP_S)


@pytest.mark.parametrize("seed", range(10))
def test_runs_that_restart_are_as_in_the_world(seed: int) -> None:
    assert_alike(play(replace(EIGHT, spares=seed % 3), some_faults(seed, first=seed % 2)))


@pytest.mark.parametrize("heal", ["spare", "helper", "requeue", "shrink", "auto"])
@pytest.mark.parametrize("seed", range(8))
def test_each_way_to_replace_a_lost_node_is_as_in_the_world(seed: int, heal: Heal) -> None:
    spares = FAULTS if heal == "spare" else seed % 3
    scenario = heals(heal, replace(EIGHT, spares=spares, wait_s=(6.0, 100.0, 400.0)[seed % 3]))
    played = play(scenario, some_faults(seed, first=seed % 2))
    assert played.faults >= FAULTS - 2, "two may come while the job waits in the queue"
    assert_alike(played, played.faults)


def test_a_fault_while_the_job_waits_in_the_queue_strikes_nothing() -> None:
    played = play(replace(EIGHT, wait_s=400.0), [PlacedFault(at, "node", 0.6) for at in (300, 500, 900)])
    assert played.actions == {"requeue": 2, "restart": 2}
    assert_alike(played, faults=2)


def test_no_spare_ends_a_run_that_only_takes_spares_as_in_the_world() -> None:
    played = play(heals("spare"), [PlacedFault(500, "node", 0.6)])
    assert played.outcome == "stopped"
    assert played.simulated == pytest.approx(played.goodput, rel=0.02)


def test_a_run_whose_supervisor_only_observes_ends_at_its_first_failure_as_in_the_world() -> None:
    observed = replace(EIGHT, spares=2, aegis=AEGIS.model_copy(update={"mode": "observe"}))
    played = play(observed, [PlacedFault(500, "node", 0.6)])
    assert played.outcome == "stopped"
    assert played.actions == played.simulated_actions == {}
    # The same steps are kept. The world takes longer: nobody ends the other ranks before Slurm misses the node.
    kept_s = played.goodput * played.seconds
    assert played.simulated * (500 + 2) == pytest.approx(kept_s, abs=2.0)
    assert played.seconds > 500 + SLURM_TIMEOUT_S


@pytest.mark.parametrize("ask_after_s", [0.0, 1.5, 4.5, 20.0])
def test_a_dead_node_is_noticed_as_early_as_in_the_world(ask_after_s: float) -> None:
    asked = replace(EIGHT, spares=1, aegis=AEGIS.model_copy(update={"ask_after_s": ask_after_s}))
    played = play(asked, [PlacedFault(500, "node", 0.6)])
    assert played.seconds * played.simulated == pytest.approx(played.seconds * played.goodput, abs=0.5)


def test_a_lost_batch_node_requeues_a_job_that_has_spares() -> None:
    played = play(heals("requeue", replace(EIGHT, spares=2)), [PlacedFault(500, "node", 0.05)])
    assert played.actions == {"requeue": 1, "restart": 1}
    assert_alike(played, faults=1)


def test_a_helper_job_that_comes_late_brings_one_node_and_another_is_asked_for() -> None:
    """Two more nodes are lost while it waits."""
    lost = [PlacedFault(at, "node", 0.5) for at in (200, 400, 600)]
    played = play(heals("helper", replace(EIGHT, wait_s=900.0)), lost)
    assert played.actions == {"memory": 3, "shrink": 3, "helper": 2}
    assert_alike(played, faults=3)


def test_a_node_that_a_helper_job_has_brought_is_lost_as_others_are() -> None:
    played = play(heals("helper"), [PlacedFault(200, "node", 0.5), PlacedFault(900, "node", 0.99)])
    assert played.actions == {"memory": 2, "shrink": 2, "helper": 2}
    assert_alike(played, faults=2)


def test_a_requeue_ends_helper_jobs() -> None:
    played = play(heals("helper"), [PlacedFault(200, "node", 0.5), PlacedFault(900, "node", 0.05)])
    assert played.actions == {"memory": 1, "shrink": 1, "helper": 1, "requeue": 1, "restart": 1}
    assert_alike(played, faults=2)


@pytest.mark.parametrize("heal", ["helper", "requeue", "shrink"])
def test_a_month_at_published_rates_is_as_in_the_world(heal: Heal) -> None:
    scenario = heals(heal, replace(EIGHT, steps=15 * 86400, nodes=64, wait_s=1800.0))
    faults = drawn(PRESETS["llama3"], 8, scenario, seed=3)
    played = play(scenario, faults)
    assert played.seconds >= 30 * 86400
    assert_alike(played, played.faults)
    assert 4 < played.faults < 20
