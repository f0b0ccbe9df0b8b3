"""`python -m tests.aegis.simulation --seed N`: play one schedule, and show what happens; or find one that is bad.

Without `--seed`, `--runs` schedules are played. A violated invariant prints its seed, the shortest schedule that
still shows it, and the story of that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.aegis.simulation.schedules import Schedule, drawn, shortest
from tests.aegis.simulation.simulation import Played, play, play_all, violates


def main() -> int:
    """Return 1 if an invariant does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.aegis.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this schedule")
    parser.add_argument("--runs", type=int, default=1000, help="play so many schedules (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of their seeds (default: 0)")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of a job at most (default: 8)")
    parser.add_argument("--fewest-nodes", type=int, default=1, help="nodes of the ranks at least (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="processes that play them (default: 1)")
    given = parser.parse_args()
    sizes = {"fewest_nodes": given.fewest_nodes, "most_nodes": given.nodes}
    if given.seed is not None:
        return show(given.seed, drawn(given.seed, **sizes))
    began, ends, bad = time.perf_counter(), Counter[str](), Counter[str]()
    seeds = range(given.first, given.first + given.runs)
    for seed, end, violation in play_all(seeds, given.processes, **sizes):
        ends[end] += 1
        if violation is not None:
            if not bad[violation]:
                show(seed, drawn(seed, **sizes))
            bad[violation] += 1
    seconds = time.perf_counter() - began
    print(f"{given.runs} schedules in {seconds:.0f} s, {given.runs / seconds:.1f} a second: {dict(ends)}")
    for name, count in bad.items():
        print(f"violated {count} times: {name}")
    return 1 if bad else 0


def show(seed: int, schedule: Schedule) -> int:
    """Print a schedule and its story; if it violates an invariant, the shortest one that does."""
    played = play(schedule)
    if played.violation is None:
        _print(seed, schedule, play(schedule, tell=True))
        return 0
    name = played.violation.name
    short = shortest(schedule, lambda other: violates(other, name))
    _print(seed, short, play(short, tell=True))
    return 1


def _print(seed: int, schedule: Schedule, played: Played) -> None:
    size = f"{schedule.needed} nodes, {schedule.spares} spares, {schedule.partition} in the partition"
    print(f"seed {seed}: {size}{', recovery in memory' if schedule.in_memory else ''}")
    print(schedule)
    print("\n".join(played.story))
    if played.violation is not None:
        print(f"VIOLATED at {played.violation.at} s: {played.violation.name}: {played.violation.what}")


if __name__ == "__main__":
    sys.exit(main())
