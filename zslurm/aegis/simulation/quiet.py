"""Seconds in which nothing happens pass at once: the world goes from event to event.

While every rank trains, every agent of the job reports, and nothing is on its way, a second changes nothing but
counters. The steps follow from the time by division, and the supervisor hears of them in the next second.
"""

from __future__ import annotations

from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.protocol import ProgressReport
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.supervisor import DRAINS_S
from zslurm.aegis.simulation.truth import AttemptTruth, NodeTruth
from zslurm.aegis.simulation.world import SAVE_EVERY, SAVE_S, SETUP_S, STEP_S, World

_SETTLED_S = 3
"""Seconds after the set-up, and after the last record, in which the supervisor gets to know an attempt."""
_REMEMBERED_S = 120
"""Seconds after the last record in which a fault may still have consequences that depend on time."""
_DUE_S = 3


def pass_quietly(world: World, run: Run, until: int | None = None) -> int:
    """Let the seconds pass in which nothing happens, but for the last ones; return how many they were.

    They end before the second `until`, if it is given.
    """
    seconds = _quiet_s(world, run)
    if until is not None:
        seconds = min(seconds, until - _DUE_S - world.now)
    if seconds <= 0:
        return 0
    attempt, supervisor = world.attempt, run.supervisor
    assert attempt is not None and supervisor is not None
    steps_before = attempt.worked_s // STEP_S
    attempt.worked_s += seconds
    world.now, world.awake, supervisor.seen = world.now + seconds, world.awake + seconds, supervisor.seen + seconds
    if steps := attempt.worked_s // STEP_S - steps_before:
        attempt.step += steps
        past = attempt.worked_s % STEP_S
        attempt.moved, attempt.awake = world.now - past, world.awake - past
        _save(world, attempt, steps)
    world.inbox = [(when + seconds, report) for when, report in world.inbox]
    if supervisor.drains_at <= world.now:  # the questions that were passed had the same answer
        supervisor.drains_at += ((world.now - supervisor.drains_at) // DRAINS_S + 1) * DRAINS_S
    return seconds


def _save(world: World, attempt: AttemptTruth, steps: int) -> None:
    """Write the checkpoints of the last steps, and perhaps only begin the last one."""
    if world.saving is not None and world.now >= world.saving[1]:
        world.committed, world.saving = world.saving[0], None
    last = attempt.step // SAVE_EVERY * SAVE_EVERY
    if last <= attempt.step - steps:
        return
    complete_at = attempt.moved - (attempt.step - last) * STEP_S + SAVE_S
    if world.now >= complete_at:
        world.committed, world.saving = last, None
    else:
        before = last - SAVE_EVERY
        world.committed = before if before > attempt.step - steps else world.committed
        world.saving = last, complete_at


def _quiet_s(world: World, run: Run) -> int:
    """Return how many seconds pass in which nothing happens."""
    attempt, state, now = world.attempt, run.state, world.now
    if run.phase != "watching" or not run.alive or attempt is None or attempt.over is not None or state is None:
        return 0
    supervisor = run.supervisor
    assert supervisor is not None
    last = world.total if world.bug is None else min(world.total, world.bug)
    due = [helper.due for helper in run.helpers if not helper.over and not helper.nodes]
    until = (
        min([now + (last - attempt.step - 1) * STEP_S, *(each.at for each in world.happenings[:1]), *due]) - _DUE_S
    )
    settled = max(
        *(max(attempt.began + SETUP_S, run.until) + _SETTLED_S, run.recorded_at + _SETTLED_S),
        *(world.slurm_away_until, world.unknown_until, world.suspended_until),
    )
    if state.faults:
        settled = max(settled, run.recorded_at + _REMEMBERED_S)
    is_busy = (
        any(not isinstance(report, ProgressReport) for _, report in world.inbox)
        or world.kill_supervisor is not None
        or world.time_is_up
        or world.preempted_until is not None
        or run.former is not None
    )
    is_busy = is_busy or supervisor.moves_read < len(world.moves_asked) or bool(state.moves.wishes)
    if until <= now or settled >= now or is_busy or not _is_memory_quiet(world, run, state):
        return 0
    if any(rank.ended is not None or rank.hangs for rank in attempt.ranks):
        return 0
    in_use = {rank.node.name for rank in attempt.ranks}
    members = [node for node in world.nodes if node.name in world.agents_on]
    is_quiet = world.by_name[world.batch].died is None and all(_is_quiet(node, now, in_use) for node in members)
    return until - now if is_quiet else 0


def _is_memory_quiet(world: World, run: Run, state: AttemptState) -> bool:
    """Return whether no recovery in memory is under way, and none is about to begin."""
    store, memory = world.store, state.memory
    if store is None or memory is None:
        return True
    in_use = set(state.rank_nodes)
    if len(in_use) < memory.wanted and not memory.awaits_helper:
        return False
    if any(not helper.over and not in_use.issuperset(helper.nodes) for helper in run.helpers):
        return False
    is_idle = not (store.is_regrouping or store.move or store.coming or store.reports or store.ends)
    return is_idle and not (memory.active or memory.move or any(memory.coming.values()) or world.drained_until)


def _is_quiet(node: NodeTruth, now: int, in_use: set[str]) -> bool:
    """Return whether nothing is to be noticed of a node: it is well, or dead and used by no rank."""
    if node.died is not None:
        return node.name not in in_use
    ends = node.silent_until, node.nic_until, node.called_down_until, node.cut_off_until
    return max(ends) < now and not node.is_new and not node.computes_wrong
