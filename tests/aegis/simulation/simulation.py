"""Schedules of what happens, played in the simulated world while the invariants are checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from tests.aegis.simulation.invariants import INVARIANTS, Violation
from tests.aegis.simulation.schedules import IN_MEMORY, SETTINGS, TOTAL_STEPS, Schedule, drawn
from zslurm.aegis.simulation.quiet import pass_quietly
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.world import Happening, World
from zslurm.slurm.hostlist import compress

LONGEST_S = 3600
"""Seconds after the last thing that happens in which every run must have ended, or wait for nodes."""


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
    if schedule.least is not None:
        settings = settings.model_copy(update={"min_nodes": schedule.least})
    if schedule.helped:
        settings = settings.model_copy(update={"heal": "helper"})
    if schedule.heal is not None:
        helper_s, requeue_s = schedule.waits
        settings = settings.model_copy(update={"heal": schedule.heal, "expected_wait_s": requeue_s or None})
    else:
        helper_s = None
    played = Played(run := Run(world, settings, schedule.needed, schedule.spares))
    run.helper_wait_s = helper_s
    last = max((each.at + each.lasts for each in schedule.happenings), default=0)
    checks = [check(run, schedule) for check in INVARIANTS]
    known, shown = 0, ""
    while run.phase != "over" and world.now < last + LONGEST_S and played.violation is None:
        before = world.now
        if not every_second:
            pass_quietly(world, run)
        world.second()
        run.second()
        struck = [each for each in schedule.happenings if before < each.at <= world.now] if tell else []
        played.story += [f"{each.at:5d} s  HAPPENS {_words(each)}" for each in struck]
        if len(run.rows) != known or run.phase != shown or struck:
            if tell:
                played.story += list(_told(run, known, shown))
            known, shown = len(run.rows), run.phase
            played.violation = next(filter(None, map(next, checks)), None)
        if run.phase == "queued" and world.now > last + 60 and world.slurm_works:
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


_NOT_TOLD = frozenset(("time", "fault_time", "event", "job_id", "root", "attempt_state", "resources"))
"""Fields of events that make a story longer, not clearer."""


def _words(happening: Happening) -> str:
    lasts = f", for {happening.lasts} s" if happening.lasts else ""
    return f"{happening.what}, where {happening.where}{lasts}"


def _told(run: Run, known: int, shown: str) -> Iterator[str]:
    now = run.world.now
    if run.phase != shown:
        why = run.why if run.phase in ("queued", "over") else ""
        yield f"{now:5d} s  [{run.phase}] {why}".rstrip()
    for row in run.rows[known:]:
        fields = {
            name: compress(value) if isinstance(value, list) and name in ("nodes", "excluded") else value
            for name, value in row.items()
            if name not in _NOT_TOLD and value is not None
        }
        told = ", ".join(f"{name} {value}" for name, value in fields.items())
        yield f"{now:5d} s  {row['event']}: {told}"
    yield f"         world: {_state_of_world(run.world)}"
    yield f"         Aegis: {_state_of_aegis(run)}"


def _state_of_world(world: World) -> str:
    """Return what is the case, in one line."""
    now, wrong = world.now, []
    for node in world.nodes:
        states = {
            f"died at {node.died} s": node.died is not None,
            f"agent silent until {node.silent_until} s": node.silent_until > now,
            f"link down until {node.nic_until} s": node.nic_until > now,
            "GPU loses data": node.ecc,
        }
        wrong += [f"{node.name}: {state}" for state, holds in states.items() if holds]
    wrong += [] if world.slurm_works else [f"Slurm away until {world.slurm_away_until} s"]
    wrong += [f"job suspended until {world.suspended_until} s"] if world.is_suspended else []
    attempt = world.attempt
    if attempt is None:
        return "; ".join(["no ranks", *wrong])
    ended = Counter(rank.fault or "by Aegis, or in order" for rank in attempt.ranks if rank.ended is not None)
    wrong += [f"{count} of {len(attempt.ranks)} ranks ended ({fault})" for fault, count in ended.items()]
    wrong += [f"rank {number} hangs" for number, rank in enumerate(attempt.ranks) if rank.hangs]
    over = "" if attempt.over is None else f", over at {attempt.over} s"
    nodes = compress([node.name for node in attempt.nodes])
    about = f"attempt {attempt.number} on {nodes}, step {attempt.step}, saved {world.committed}{over}"
    return "; ".join([about, *wrong])


def _state_of_aegis(run: Run) -> str:
    """Return what the core knows, in one line."""
    state, excluded = run.state, sorted(run.excluded_nodes)
    known = [f"excluded {', '.join(excluded)}"] if excluded else []
    if not run.alive:
        return "; ".join(["its supervisor is dead", *known])
    if state is None:
        return "; ".join(["no attempt", *known])
    faults = Counter(f"{fault.kind}{f' of {fault.node}' if fault.node else ''}" for fault in state.faults)
    known += [f"faults: {', '.join(faults)}"] if faults else []
    known += [f"lost ranks: {', '.join(map(str, sorted(state.lost)))}"] if state.lost else []
    known += [f"dead nodes: {', '.join(sorted(state.dead_nodes))}"] if state.dead_nodes else []
    if (memory := state.memory) is not None:
        phase = (
            "regroups"
            if memory.active
            else "given up"
            if memory.given_up
            else "ready"
            if memory.announced
            else "not ready"
        )
        known.append(f"recovery in memory {phase}, generation {memory.number}")
    known += ["asked to stop"] if state.stop.asked else []
    return "; ".join([f"watches attempt {state.number}", *known])


def violates(schedule: Schedule, name: str) -> bool:
    """Return whether a schedule violates an invariant."""
    found = play(schedule).violation
    return found is not None and found.name == name
