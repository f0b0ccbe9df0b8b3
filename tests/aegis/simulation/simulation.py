"""Schedules of what happens, played in the simulated world, and the invariants that hold after each second."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, get_args

from zslurm.aegis.simulation.quiet import pass_quietly
from zslurm.aegis.simulation.supervisor import Run
from zslurm.aegis.simulation.world import WALL, Happening, What, World
from zslurm.config.aegis import AegisSection

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

LONGEST_S = 3600
"""Seconds after the last thing that happens in which every run must have ended, or wait for nodes."""
TOTAL_STEPS = 40


@dataclass(frozen=True)
class Schedule:
    """What happens in one run.

    Attributes:
        needed: nodes of its ranks.
        spares: nodes that its job has besides.
        partition: nodes of the partition.
        happenings: what happens.
        in_memory: the run recovers in memory.
    """

    needed: int
    spares: int
    partition: int
    happenings: tuple[Happening, ...]
    in_memory: bool = False


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold.

    Attributes:
        name: of the invariant.
        at: the second.
        what: what was seen.
    """

    name: str
    at: int
    what: str


@dataclass
class Played:
    """What came of a schedule.

    Attributes:
        run: the run at its end.
        violation: the first invariant that did not hold; None if all did.
        story: what was recorded, and the state of the run at each change.
    """

    run: Run
    violation: Violation | None = None
    story: list[str] = field(default_factory=list)


def drawn(seed: int, *, fewest_nodes: int = 1, most_nodes: int = 8) -> Schedule:
    """Return a schedule: a few things that happen, many of them at nearly the same time.

    Its ranks are on `fewest_nodes` to `most_nodes` - 2 nodes; up to two spares are besides.
    """
    dice = random.Random(seed)
    needed = dice.randint(fewest_nodes, max(fewest_nodes, most_nodes - 2))
    spares = dice.choice([0, 0, 1, 2])
    partition = needed + spares + dice.choice([0, 1, 2])
    kinds: tuple[What, ...] = get_args(What)
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
    in_memory = dice.random() < 0.5
    return Schedule(needed, spares, partition, tuple(sorted(happenings, key=lambda each: each.at)), in_memory)


def play(schedule: Schedule, *, tell: bool = False, every_second: bool = False) -> Played:
    """Play a schedule until the run ends, waits for nodes for good, or an invariant does not hold.

    Seconds in which nothing happens are passed at once, unless `every_second`.
    """
    world = World(
        schedule.happenings,
        nodes=schedule.partition,
        ranks_per_node=2,
        total=TOTAL_STEPS,
        in_memory=schedule.in_memory,
    )
    settings = IN_MEMORY if schedule.in_memory else SETTINGS
    played = Played(run := Run(world, settings, schedule.needed, schedule.spares))
    last = max((each.at + each.lasts for each in schedule.happenings), default=0)
    checks = [check(run, schedule) for check in INVARIANTS]
    known, shown = 0, ""
    while run.phase != "over" and world.now < last + LONGEST_S and played.violation is None:
        if not every_second:
            pass_quietly(world, run)
        world.second()
        run.second()
        if len(run.rows) != known or run.phase != shown:
            if tell:
                played.story += list(_told(run, known, shown))
            known, shown = len(run.rows), run.phase
            played.violation = next(filter(None, map(next, checks)), None)
        if run.phase == "queued" and world.now > last + 60 and world.slurm_answers:
            break  # it waits for nodes, and none comes back
    if played.violation is None and run.phase not in ("over", "queued"):
        what = f"{run.phase} since the second {run.until}, and no reason to wait: {run.why}"
        played.violation = Violation("every run ends", world.now, what)
    return played


def play_all(
    seeds: range, processes: int, *, fewest_nodes: int = 1, most_nodes: int = 8
) -> Iterator[tuple[int, str, str | None]]:
    """Play schedules; yield the seed of each, how its run ended, and the invariant that it violates, if any."""
    play_one = partial(_end_of, fewest_nodes=fewest_nodes, most_nodes=most_nodes)
    if processes <= 1:
        yield from map(play_one, seeds)
        return
    with get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(play_one, seeds, chunksize=50)


def _end_of(seed: int, fewest_nodes: int, most_nodes: int) -> tuple[int, str, str | None]:
    played = play(drawn(seed, fewest_nodes=fewest_nodes, most_nodes=most_nodes))
    violation = None if played.violation is None else played.violation.name
    return seed, played.run.outcome or f"waits: {played.run.phase}", violation


def _told(run: Run, known: int, shown: str) -> Iterator[str]:
    now = run.world.now
    if run.phase != shown:
        yield f"{now:5d} s  [{run.phase}] {run.why}"
    for row in run.rows[known:]:
        fields = {k: v for k, v in row.items() if k not in ("time", "event", "job_id", "root", "attempt_state")}
        yield f"{now:5d} s  {row['event']}: {fields}"


# --- invariants -------------------------------------------------------------------------------------------------

Check = Callable[[Run, Schedule], Iterator[Violation | None]]


def _rows(run: Run, *events: str) -> Iterator[dict[str, Any] | None]:
    """Yield each new row of some kinds, and None when there is none for now."""
    read = 0
    while True:
        new = run.rows[read:]
        read += len(new)
        for row in new:
            if row["event"] in events:
                yield row
        yield None


def healthy_nodes_are_never_excluded(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """A node is excluded only if it is, or was, not fit to train."""
    for row in _rows(run, "nodes_excluded"):
        nodes = row["nodes"] if row else []
        innocent = [node for node in nodes if node not in run.world.guilty]
        if row and innocent:
            what = f"{', '.join(innocent)}: {row['reason']}"
            yield Violation("a healthy node is never excluded", run.world.now, what)
        elif row is None:
            yield None


def few_nodes_are_excluded(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """At most `aegis.max_excluded` nodes are excluded at the same time."""
    for row in _rows(run, "nodes_excluded"):
        if row and len(run.excluded_nodes) > MAX_EXCLUDED:
            what = f"{len(run.excluded_nodes)} nodes are excluded"
            yield Violation("at most the allowed number of nodes is excluded", run.world.now, what)
        elif row is None:
            yield None


def living_nodes_are_never_called_dead(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """No node that lives is reported as dead, if only its agent is silent, or Slurm does not answer.

    Nobody can tell a node whose agent is silent while a rank hangs elsewhere from a dead one: the ranks halt.
    """
    for row in _rows(run, "fault_detected"):
        if row and row["kind"] == "node_dead" and str(row["node"]) not in run.world.guilty:
            yield Violation("a living node is never called dead", run.world.now, str(row["line"]))
        elif row is None:
            yield None


def nothing_is_recorded_twice(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """A supervisor that was killed and started again records no end of a rank and no decision twice.

    Nor a recovery; a process that has taken the place of a rank may end as the rank did.
    """
    seen: set[object] = set()
    recoveries = requeues = 0
    for row in _rows(run, "ranks_ended", "decision", "recovered_in_memory", "ranks_moved", "requeued"):
        if row is None:
            yield None
            continue
        if row["event"] == "requeued":
            requeues += 1
            continue
        number = row.get("generation", recoveries if row["event"] == "ranks_ended" else requeues)
        key = (row["event"], row["attempt"], str(row.get("ranks")), row.get("what", row.get("action")), number)
        recoveries += row["event"] in ("recovered_in_memory", "ranks_moved")
        if key in seen:
            yield Violation("nothing is recorded twice", run.world.now, f"{key}")
        seen.add(key)


def healthy_attempts_are_not_ended(run: Run, schedule: Schedule) -> Iterator[Violation | None]:
    """The step of ranks that all make progress, on nodes that are fit, is not killed."""
    for row in _rows(run, "step_killed"):
        attempt = run.world.attempt
        if row is None or attempt is None:
            yield None
            continue
        harmed = any(
            rank.hangs
            or (rank.ended is not None and rank.ended < run.world.now)
            or rank.node.name in run.world.guilty
            or rank.node.nic_downs
            for rank in attempt.ranks
        )
        if not harmed:
            yield Violation("a healthy attempt is not ended", run.world.now, str(row["reason"]))


def a_bug_stops_the_run(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """A bug of the program stops the run within `aegis.retries` failures, and excludes no node by itself."""
    failures = 0
    for row in _rows(run, "decision"):
        if row is None:
            yield None
            continue
        root = row.get("root")
        failures += isinstance(root, dict) and root.get("kind") == "user_error"
        if failures > SETTINGS.retries + 1:
            yield Violation(
                "a bug stops the run within its limit of restarts", run.world.now, f"{failures} failures"
            )


def healthy_ranks_are_not_killed_alone(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """Of an attempt that recovers in memory only ranks that hang are killed and replaced."""
    for row in _rows(run, "hanging_ranks_ended"):
        attempt = run.world.attempt
        if row is None or attempt is None:
            yield None
            continue
        healthy = [rank for rank in row["ranks"] if not attempt.ranks[rank].hangs]
        if healthy:
            yield Violation("a healthy rank is not killed alone", run.world.now, f"{healthy}: {row['reason']}")


def no_attempt_runs_that_is_requeued(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """A requeue is never asked for while ranks run."""
    for row in _rows(run, "requeued"):
        attempt = run.world.attempt
        if row and attempt is not None and attempt.over is None:
            yield Violation("no attempt runs that is requeued", run.world.now, str(row["reason"]))
        elif row is None:
            yield None


_IN_MEMORY: tuple[What, ...] = ("rank_killed", "rank_hangs", "node_dies", "move_asked", "drained")
"""What a run with a spare survives in memory if nothing else happens."""


def what_is_recoverable_costs_no_restart(run: Run, schedule: Schedule) -> Iterator[Violation | None]:
    """With a spare and recovery in memory no more than a step is lost for a fault that it can recover from."""
    harm = [each for each in schedule.happenings if each.what in _IN_MEMORY]
    others = [
        each for each in schedule.happenings if each.what not in (*_IN_MEMORY, "reports_twice", "clock_jumps")
    ]
    applies = schedule.in_memory and schedule.spares > 0 and schedule.needed > 1 and len(harm) == 1 and not others
    ready_at: float | None = None
    for row in _rows(run, "recovery_ready", "recovered_in_memory", "step_killed", "decision"):
        if row is None or not applies:
            yield None
            continue
        if row["event"] == "recovery_ready":
            ready_at = ready_at or row["time"] + 5  # the processes of the spare are ready as well
        elif ready_at is None or ready_at > harm[0].at + WALL:
            yield None
        elif row["event"] != "recovered_in_memory" or row["rolled_back"] > 1:
            what = f"{row['event']}: {row.get('reason')}"
            yield Violation("what is recoverable in memory costs no restart", run.world.now, what)


INVARIANTS: tuple[Check, ...] = (
    healthy_ranks_are_not_killed_alone,
    no_attempt_runs_that_is_requeued,
    what_is_recoverable_costs_no_restart,
    healthy_nodes_are_never_excluded,
    few_nodes_are_excluded,
    living_nodes_are_never_called_dead,
    nothing_is_recorded_twice,
    healthy_attempts_are_not_ended,
    a_bug_stops_the_run,
)


# --- shrinking --------------------------------------------------------------------------------------------------


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


def violates(schedule: Schedule, name: str) -> bool:
    """Return whether a schedule violates an invariant."""
    found = play(schedule).violation
    return found is not None and found.name == name
