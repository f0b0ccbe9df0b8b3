"""Which faults happen in a trial: single ones, pairs, and random schedules at published rates."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_FAULTS = json.loads((Path(__file__).parent / "faults.json").read_text())
PROGRAM: dict[str, str] = _FAULTS["program"]
"""Faults that the program injects into itself, and what they are."""
SITE: dict[str, str] = _FAULTS["site"]
"""Faults that need the site's help."""
FAULTS = PROGRAM | SITE

STEPS, PACE_S = 60, 0.25
FIRST_AT, SECOND_AFTER = 25, 15
"""The step of the first fault: five after a checkpoint; and steps from there to the second."""
_SLOW_S, _AWAY_S, _BACK_AFTER_S = 1.25, 20.0, 60.0
_LIMITED_PACE_S, _LIMIT_MINUTES = 2.5, 2
"""The pace of a program that its time limit ends once; Slurm looks for late jobs twice a minute."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault of a plan.

    Attributes:
        fault: its name.
        step: after which it happens.
        rank: to which, or to whose node.
        seconds: how much longer a step takes, or how long what is lost is away.
        again: whether it happens on every start.
    """

    fault: str
    step: int
    rank: int = 1
    seconds: float = 0.0
    again: bool = False


@dataclass(frozen=True)
class Plan:
    """The faults of a trial, and what can become of it.

    Attributes:
        name: of the plan.
        faults: in the order in which they happen.
        steps: of the program.
        pace_s: seconds that each step waits.
        minutes: the time limit with which each job is submitted.
        completes: whether the program can reach its last step.
    """

    name: str
    faults: tuple[PlannedFault, ...]
    steps: int = STEPS
    pace_s: float = PACE_S
    minutes: int = 30
    completes: bool = field(default=True)

    def content(self) -> dict[str, Any]:
        """Return the content of `plan.json`, from which the program takes its faults."""
        faults = [{**vars(each), "in_program": each.fault in PROGRAM} for each in self.faults]
        return {"steps": self.steps, "pace_s": self.pace_s, "faults": faults}


def single(fault: str) -> Plan:
    """Return the plan of one fault.

    Raises:
        KeyError: there is no such fault.
    """
    plan = Plan(fault, tuple(_events(fault, FIRST_AT)), completes=fault != "user_bug")
    return replace(plan, pace_s=_LIMITED_PACE_S, minutes=_LIMIT_MINUTES) if fault == "time_limit" else plan


def pairs() -> list[Plan]:
    """Return the plans of two faults, one after the other."""
    return [
        Plan(f"{first}+{second}", (*_events(first, FIRST_AT), *_events(second, FIRST_AT + SECOND_AFTER)))
        for first, second in _FAULTS["pairs"]
    ]


def drawn(seed: int, steps: int = 4 * STEPS) -> Plan:
    """Return a random plan: published shares of the kinds, and about one fault in each `STEPS` steps."""
    dice = random.Random(seed)
    shares = {name: share for name, share in _FAULTS["rates"].items() if name in FAULTS}
    faults: list[PlannedFault] = []
    at = 0.0
    while (at := at + dice.expovariate(1 / STEPS)) < steps:
        (fault,) = dice.choices(list(shares), list(shares.values()))
        faults += _events(fault, max(1, int(at)), rank=dice.randrange(2))
    return Plan(f"random-{seed}", tuple(faults), steps=steps)


def named(name: str) -> Plan:
    """Return a plan by its name: of a fault, of a pair (`a+b`), or `random-SEED`.

    Raises:
        KeyError: there is no such plan.
    """
    if name.startswith("random-") and name.removeprefix("random-").isdigit():
        return drawn(int(name.removeprefix("random-")))
    known = {plan.name: plan for plan in (*map(single, FAULTS), *pairs())}
    return known[name]


def _events(fault: str, step: int, rank: int = 1) -> list[PlannedFault]:
    """Return the events of a fault, which may need another one to show."""
    match fault:
        case "slow_rank":
            return [PlannedFault(fault, step, rank, _SLOW_S)]
        case "user_bug":
            return [PlannedFault(fault, step, rank, again=True)]
        case "node_killed":
            return [PlannedFault(fault, step, rank, _BACK_AFTER_S)]
        case "link_down":
            return [PlannedFault(fault, step, rank, _AWAY_S)]
        case "controller_lost":
            return [PlannedFault(fault, step, rank, _AWAY_S), PlannedFault("process_killed", step + 8, rank)]
        case _ if fault in FAULTS:
            return [PlannedFault(fault, step, rank)]
        case _:
            raise KeyError(fault)
