"""Schedules of what happens to a simulated run, and how they are drawn and made shorter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from zslurm.aegis.simulation.world import Happening, What
from zslurm.config.aegis import AegisSection, Heal

MAX_EXCLUDED = 3

SETTINGS = AegisSection.model_validate(
    {
        "heartbeat_timeout_s": 8,
        "tolerate_s": 12,
        "grace_s": 20,
        "lost_peer_s": 60,
        "retry_wait_s": 5,
        "restarts_per_hour": 30,
        "max_excluded": MAX_EXCLUDED,
        "hang": {"setup_s": 60, "step_s": 30, "step_factor": 5, "save_s": 30, "eval_s": 30},
    }
)
"""As by default, with shorter limits: what takes minutes takes seconds here."""

IN_MEMORY = SETTINGS.model_copy(update={"recovery": "memory", "recovery_s": 15.0})

OF_HELPERS: tuple[What, ...] = ("helper_refused", "helper_ends")
"""What happens only to runs with helper jobs."""

TOTAL_STEPS = 40
"""Steps of a run."""


@dataclass(frozen=True)
class Schedule:
    """What happens in one run.

    Attributes:
        needed: nodes of its ranks.
        spares: nodes that its job has besides.
        partition: nodes of the partition.
        happenings: what happens.
        in_memory: the run recovers in memory.
        least: `aegis.min_nodes`: it may continue on so many nodes.
        helped: `aegis.heal: helper`: helper jobs bring missing nodes.
        heal: `aegis.heal`, if it is another one than that and the default.
        waits: seconds that a helper job and a requeue are expected to wait; None if that is not known.
    """

    needed: int
    spares: int
    partition: int
    happenings: tuple[Happening, ...]
    in_memory: bool = False
    least: int | None = None
    helped: bool = False
    heal: Heal | None = None
    waits: tuple[float | None, float | None] = (None, None)


def drawn(seed: int, *, fewest_nodes: int = 1, most_nodes: int = 8) -> Schedule:
    """Return a schedule: a few things that happen, many of them at nearly the same time.

    Its ranks are on `fewest_nodes` to `most_nodes` - 2 nodes; up to two spares are besides.
    """
    dice = random.Random(seed)
    needed = dice.randint(fewest_nodes, max(fewest_nodes, most_nodes - 2))
    spares = dice.choice([0, 0, 1, 2])
    partition = needed + spares + dice.choice([0, 1, 2])
    # One kind more would change what every seed that is recorded somewhere plays.
    kinds = tuple(kind for kind in get_args(What) if kind not in (*OF_HELPERS, "numbers_wrong"))
    moments = [dice.randint(1, 90) for _ in range(dice.randint(1, 3))]
    happenings = []
    for _ in range(dice.choice([1, 2, 2, 3, 3, 4, 6])):
        what = dice.choice(kinds)
        at = max(1, dice.choice(moments) + dice.choice([0, 0, 1, 2, 5, 9]))
        lasts = dice.choice([1, 3, 6, 10, 20, 40, 100])
        if what == "user_bug":
            where = dice.randint(1, TOTAL_STEPS)
        elif what == "reports_late":
            where, lasts = dice.randrange(partition), dice.randint(1, 3)
        else:
            where = dice.randrange(2 * partition)
        happenings.append(Happening(at, what, where, lasts))
    in_memory, least = dice.random() < 0.5, dice.choice([None, None, max(1, needed - dice.randint(1, 3))])
    helped = in_memory and dice.random() < 0.3
    if helped:
        harm = ("node_dies", *OF_HELPERS)
        moments = [dice.randint(20, 70) for _ in harm]
        kept = [kind for kind in harm if kind == "node_dies" or dice.random() < 0.3]
        happenings += [
            Happening(at, kind, dice.randrange(partition), dice.choice([1, 10, 40]))
            for at, kind in zip(moments, kept, strict=False)
        ]
        partition += dice.choice([0, 1, 2])
    happenings.sort(key=lambda each: each.at)
    return Schedule(needed, spares, partition, tuple(happenings), in_memory, least, helped)


def shortest(schedule: Schedule, is_bad: Callable[[Schedule], bool]) -> Schedule:
    """Return the shortest schedule found that still shows what is bad, by delta debugging."""
    kept = list(schedule.happenings)
    part = max(1, len(kept) // 2)
    while part:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + part :]
            if is_bad(_with(schedule, fewer)):
                kept = fewer
            else:
                at += part
        part //= 2
    for number, happening in enumerate(kept):
        for lasts in (1, 3, 6, 10, 20, 40):
            if lasts >= happening.lasts:
                break
            shorter = Happening(happening.at, happening.what, happening.where, lasts)
            if is_bad(_with(schedule, [*kept[:number], shorter, *kept[number + 1 :]])):
                kept[number] = shorter
                break
    return _with(schedule, kept)


def _with(schedule: Schedule, happenings: list[Happening]) -> Schedule:
    return replace(schedule, happenings=tuple(happenings))
