"""Simulate a run many times; compare intervals between saves, numbers of spares and ways to replace a lost node.

Each figure is the mean over simulated runs that differ in their faults only, with its 95 % confidence interval;
what is compared is compared on the same seeds. Beside it are the 5th and the 95th percentile: one real run is
one draw, and varies by more than the mean is uncertain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zslurm.aegis.types import Decision
from zslurm.config.aegis import Heal
from zslurm.plan.failures import FailureRates, RandomFaults
from zslurm.plan.simulate import PARTS, Scenario, SimulatedOutcome, simulate
from zslurm.plan.young_daly import daly_interval_s

_FLAT = 5e-4
"""Share of the time by which an interval may be worse than the best and still be advised: it saves less often."""
_LONGEST_S = 3600.0
"""Of work between two saves: no simulation knows what faults come, and no more than this is put at risk."""
_FINE = 2**0.25
"""Factor between two intervals that are tried last."""
_HEALS: tuple[Heal, ...] = ("helper", "shrink", "requeue")
"""Ways to replace a lost node without a spare that are compared (`aegis.heal`)."""
_SPARES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Estimate:
    """A figure over many simulated runs.

    Attributes:
        mean: over them.
        error: half the width of the 95 % confidence interval of the mean.
        low: the 5th percentile of single runs.
        high: the 95th.
    """

    mean: float
    error: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate from two or more values."""
        ordered, mean = sorted(values), statistics.fmean(values)
        spread = statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, _student_t(len(values) - 1) * spread, _quantile(ordered, 0.05), _quantile(ordered, 0.95))


def _student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t (Cornish and Fisher's expansion; within 1 % from 3 degrees on)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated between the two next to it."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to take.

    Attributes:
        scenario: that was simulated.
        runs: how often.
        goodput: share of the time that became steps that were kept.
        wall_s: seconds from the first start to the end.
        node_hours: that are allocated.
        parts: mean share of the time by what it was spent on.
        faults: mean number of faults in a run, of all kinds.
        actions: mean number of each action.
        unfinished: share of the runs that were given up, or that Aegis stopped.
        stopped: why Aegis stopped runs, a reason for each of them.
    """

    scenario: Scenario
    runs: int
    goodput: Estimate
    wall_s: Estimate
    node_hours: Estimate
    parts: dict[str, float]
    faults: float
    actions: dict[str, float]
    unfinished: float
    stopped: tuple[str, ...] = ()

    @property
    def of_held_nodes(self) -> float:
        """Return the share of the time of all nodes, spares and waits included, that became kept steps."""
        return self.goodput.mean * self.scenario.nodes / (self.scenario.nodes + self.scenario.spares)


@dataclass(frozen=True)
class Study:
    """Simulations of one run with one set of rates.

    Attributes:
        rates: of faults.
        gpus_per_node: to which they apply.
        seed: of the first run; the others follow.
    """

    rates: FailureRates
    gpus_per_node: int
    seed: int = 0

    def outcomes(self, scenario: Scenario, runs: int) -> list[SimulatedOutcome]:
        """Simulate a number of runs."""
        seeds = range(self.seed, self.seed + runs)
        decisions: dict[object, Decision] = {}
        return [
            simulate(scenario, RandomFaults(self.rates, self.gpus_per_node, seed), decisions) for seed in seeds
        ]

    def predict(self, scenario: Scenario, runs: int) -> Prediction:
        """Return what a run is expected to take, from at least two simulated runs."""
        outcomes = self.outcomes(scenario, runs)
        wall = statistics.fmean(outcome.wall_s for outcome in outcomes)
        names = sorted({name for outcome in outcomes for name in outcome.actions})
        return Prediction(
            scenario,
            runs,
            Estimate.of([outcome.goodput for outcome in outcomes]),
            Estimate.of([outcome.wall_s for outcome in outcomes]),
            Estimate.of([outcome.node_s / 3600 for outcome in outcomes]),
            {
                time_part: statistics.fmean(outcome.parts_s[time_part] for outcome in outcomes) / wall
                for time_part in PARTS
            },
            statistics.fmean(sum(outcome.faults.values()) for outcome in outcomes),
            {name: statistics.fmean(outcome.actions.get(name, 0) for outcome in outcomes) for name in names},
            statistics.fmean(not outcome.finished for outcome in outcomes),
            tuple(outcome.stopped for outcome in outcomes if outcome.stopped),
        )

    def between_faults_s(self, nodes: int) -> float:
        """Return the mean seconds between two faults on a number of nodes; infinity without faults."""
        per_hour = self.rates.total * self.gpus_per_node * nodes
        return 3600 / per_hour if per_hour else math.inf

    def daly_interval(self, scenario: Scenario) -> int | None:
        """Return Daly's interval in steps; None if there are no faults, or saves cost nothing."""
        between = self.between_faults_s(scenario.nodes)
        if not scenario.stall_s or math.isinf(between):
            return None
        return _whole(daly_interval_s(scenario.stall_s, between) / scenario.step_s, scenario.steps)

    def best_interval(self, scenario: Scenario, runs: int) -> tuple[int, list[Prediction]]:
        """Return the steps between two saves at which a run is expected to end first, and what was tried.

        Of intervals that are as good within half a thousandth it is the longest, up to an hour of work.
        Intervals are tried in factors of two from Daly's in both directions until the time grows, then more finely
        around the best.
        """
        tried: dict[int, Prediction] = {}

        def time_at(every: float) -> float:
            steps = _whole(every, scenario.steps)
            if steps not in tried:
                tried[steps] = self.predict(replace(scenario, every=steps), runs)
            return tried[steps].wall_s.mean

        shortest = max(1.0, scenario.write_s / scenario.step_s)
        longest = max(shortest, min(_LONGEST_S / scenario.step_s, scenario.steps))
        start = min(longest, max(shortest, float(self.daly_interval(scenario) or shortest)))
        self._descend(time_at, start, 2.0, shortest, longest)
        best = min(tried, key=lambda every: tried[every].wall_s.mean)
        for power in (-3, -2, -1, 1, 2, 3):
            if shortest <= best * _FINE**power <= longest:
                time_at(best * _FINE**power)
        least = min(prediction.wall_s.mean for prediction in tried.values())
        best = max(every for every, prediction in tried.items() if prediction.wall_s.mean <= (1 + _FLAT) * least)
        return best, [tried[every] for every in sorted(tried)]

    @staticmethod
    def _descend(
        time_at: Callable[[float], float], start: float, factor: float, shortest: float, longest: float
    ) -> None:
        """Follow falling times from `start` down and up, to one step beyond the lowest in each direction."""
        for ratio in (factor, 1 / factor):
            interval, before = start, time_at(start)
            while shortest <= (interval := interval * ratio) <= longest:
                if (now := time_at(interval)) > before:
                    break
                before = now

    def best_spares(self, scenario: Scenario, runs: int) -> tuple[int, list[Prediction]]:
        """Return the number of spares that turns most of all nodes' time into kept steps, and what was tried.

        The time that the run waits for a node counts, because it is late by it. More are tried until three in a
        row were worse.
        """
        tried: list[Prediction] = []
        best = 0
        for spares in _SPARES:
            within = scenario.cluster_nodes is None or scenario.nodes + spares <= scenario.cluster_nodes
            if spares > scenario.nodes or not within or len(tried) - best > 3:
                break
            tried.append(self.predict(replace(scenario, spares=spares), runs))
            if tried[-1].of_held_nodes > tried[best].of_held_nodes:
                best = len(tried) - 1
        return tried[best].scenario.spares, tried

    def by_heal(self, scenario: Scenario, spares: int, *, helpers: bool, runs: int) -> list[Prediction]:
        """Return a run with spares and requeues, and without spares with each other way to replace a lost node.

        Args:
            scenario: of the run.
            spares: that replace lost nodes; without one the job is requeued.
            helpers: the run may ask for helper jobs; else that way is left out.
            runs: simulated, of each.
        """
        ways: list[tuple[Heal, int]] = [("requeue", spares), *((heal, 0) for heal in _HEALS)]
        return [
            self.predict(
                replace(
                    scenario,
                    spares=count,
                    helpers=heal == "helper",
                    aegis=scenario.aegis.model_copy(update={"heal": heal}),
                ),
                runs,
            )
            for heal, count in ways
            if helpers or heal != "helper"
        ]


def _whole(steps: float, most: int) -> int:
    return max(1, min(round(steps), most))
