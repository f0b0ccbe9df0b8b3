"""`python -m tests.aegis.simulation --seed N`: play one schedule, and show what happens; or find one that is bad.

Without `--seed`, `--runs` schedules are played. A violated invariant prints its seed, the shortest schedule that
still shows it, and the story of that. With `--tally FILE` the file always has what was played; the same command
continues from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.aegis.simulation.schedules import Schedule, drawn, shortest
from tests.aegis.simulation.simulation import Played, play, play_all, violates
from zslurm.core.files import write_atomically

_TALLIED = 500
"""Schedules after which a tally is written."""


def main() -> int:
    """Return 1 if an invariant does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.aegis.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this schedule")
    parser.add_argument("--runs", type=int, default=1000, help="play so many schedules (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of their seeds (default: 0)")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of a job at most (default: 8)")
    parser.add_argument("--fewest-nodes", type=int, default=1, help="nodes of the ranks at least (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="processes that play them (default: 1)")
    parser.add_argument("--tally", type=Path, help="keep what was played in this file, and continue from it")
    given = parser.parse_args()
    sizes = {"fewest_nodes": given.fewest_nodes, "most_nodes": given.nodes}
    if given.seed is not None:
        return show(given.seed, drawn(given.seed, **sizes))
    if given.tally is not None:
        return play_on(given.tally, range(given.first, given.first + given.runs), sizes)
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


def play_on(path: Path, seeds: range, sizes: dict[str, int]) -> int:
    """Play those schedules that are not in a tally yet; return 1 if an invariant does not hold."""
    about = {"first": seeds.start, **sizes}
    empty = {**about, "played": 0, "processor_s": 0.0, "ends": {}, "violations": {}}
    tally: dict[str, Any] = json.loads(path.read_text()) if path.exists() else empty
    if any(tally[name] != value for name, value in about.items()):
        print(f"{path}: the tally is of other schedules: {tally}", file=sys.stderr)
        return 2
    before, processor = tally["processor_s"], time.process_time()
    for seed, end, violation in play_all(seeds[tally["played"] :], 1, **sizes):
        tally["played"] += 1
        tally["ends"][end] = tally["ends"].get(end, 0) + 1
        if violation is not None:
            tally["violations"][str(seed)] = violation
            show(seed, drawn(seed, **sizes))
        if violation is not None or tally["played"] % _TALLIED == 0 or seed == seeds[-1]:
            tally["processor_s"] = round(before + time.process_time() - processor, 1)
            write_atomically(path, json.dumps(tally, indent=1) + "\n")
    return 1 if tally["violations"] else 0


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
