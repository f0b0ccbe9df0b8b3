"""A world that skips seconds in which nothing happens has the same events at the same times."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.aegis.simulation.schedules import IN_MEMORY, SETTINGS, Schedule, drawn
from tests.aegis.simulation.simulation import play
from zslurm.aegis.simulation.quiet import pass_quietly
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.world import Happening, World

TOTAL_STEPS, LONGEST_S = 600, 6000


def played(schedule: Schedule, *, skip: bool) -> tuple[list[dict[str, Any]], int]:
    """What was recorded until the run ended, or for so long, and how many seconds were played one by one."""
    world = World(schedule.happenings, nodes=schedule.partition, ranks_per_node=2, total=TOTAL_STEPS)
    run = Run(world, SETTINGS, schedule.needed, schedule.spares)
    seconds = 0
    while run.phase != "over" and world.now < LONGEST_S:
        if skip:
            pass_quietly(world, run)
        world.second()
        run.second()
        seconds += 1
    return run.rows, seconds


def spread(seed: int) -> Schedule:
    """A drawn schedule whose faults come minutes after each other."""
    dice = random.Random(seed)
    schedule = replace(drawn(seed, most_nodes=5), in_memory=False)
    times = sorted(dice.randint(1, 1500) for _ in schedule.happenings)
    happenings = tuple(
        Happening(at, each.what, each.where * 10 if each.what == "user_bug" else each.where, each.lasts)
        for at, each in zip(times, schedule.happenings, strict=True)
    )
    return replace(schedule, happenings=happenings)


@pytest.mark.parametrize("seed", range(20))
def test_events_are_the_same_with_and_without_quiet_seconds(seed: int) -> None:
    schedule = spread(seed)
    rows, _ = played(schedule, skip=False)
    assert played(schedule, skip=True)[0] == rows


@pytest.mark.parametrize("seed", range(100, 140))
def test_a_drawn_schedule_has_the_same_events_with_and_without_quiet_seconds(seed: int) -> None:
    schedule = drawn(seed)
    assert play(schedule).run.rows == play(schedule, every_second=True).run.rows


def test_quiet_seconds_end_before_a_second_that_is_given() -> None:
    world = World((), nodes=2, ranks_per_node=2, total=10**9)
    run = Run(world, SETTINGS, 2, 0)
    while world.now < 86_400:
        pass_quietly(world, run, 86_400)
        world.second()
        run.second()
    assert world.now == 86_400
    assert 2 * world.committed == pytest.approx(86_400, abs=60)


def test_a_run_without_faults_takes_few_seconds() -> None:
    rows, seconds = played(Schedule(4, 1, 5, ()), skip=True)
    assert rows[-1]["event"] == "run_ended"
    assert seconds < 60 < 2 * TOTAL_STEPS


@pytest.mark.parametrize("heal", ["helper", "auto"])
def test_events_are_the_same_while_a_helper_job_waits_and_after_it_has_joined(heal: str) -> None:
    def rows(*, skip: bool) -> tuple[list[dict[str, Any]], int]:
        harm = (Happening(100, "node_dies", 1), Happening(500, "rank_killed", 0), Happening(600, "node_dies", 2))
        world = World(harm, nodes=6, ranks_per_node=2, total=TOTAL_STEPS, in_memory=True)
        run = Run(world, IN_MEMORY.model_copy(update={"heal": heal, "min_nodes": 1}), 3, 0)
        run.helper_s, run.helper_wait_s = 300, 300.0
        seconds = 0
        while run.phase != "over" and world.now < LONGEST_S:
            if skip:
                pass_quietly(world, run)
            world.second()
            run.second()
            seconds += 1
        return run.rows, seconds

    (expected, _), (found, seconds) = rows(skip=False), rows(skip=True)
    assert found == expected
    assert [row["event"] for row in found].count("ranks_joined") == 2
    assert seconds < 700, "most of its 1,200 seconds pass at once"
