"""The invariants that hold after each second of a simulated run, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.aegis.simulation.schedules import MAX_EXCLUDED, SETTINGS, Schedule
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.world import What


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
    """At most `aegis.max_excluded` nodes are excluded at a time, without those that a person asked to leave."""
    asked: set[str] = set()
    for row in _rows(run, "nodes_excluded"):
        if row and row["reason"] == "the ranks moved off it: asked for":
            asked |= set(row["nodes"])
        if row and len(run.excluded_nodes - asked) > MAX_EXCLUDED:
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
    recoveries = 0
    for row in _rows(run, "ranks_ended", "decision", "recovered_in_memory", "ranks_moved", "ranks_joined"):
        if row is None:
            yield None
            continue
        number = row.get("generation", recoveries if row["event"] == "ranks_ended" else run.starts)
        key = (row["event"], row["attempt"], str(row.get("ranks")), row.get("what", row.get("action")), number)
        recoveries += row["event"] in ("recovered_in_memory", "ranks_moved", "ranks_joined")
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
        is_of_this_start = attempt is not None and attempt.number not in run.left
        if row and attempt is not None and is_of_this_start and attempt.over in (None, run.world.now):
            yield Violation("no attempt runs that is requeued", run.world.now, str(row["reason"]))
        elif row is None:
            yield None


def nothing_is_decided_by_an_unknown_answer(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """While Slurm does not answer, nothing counts as its answer: no node as down, and no number of nodes."""
    for row in _rows(run, "fault_detected", "decision"):
        if row is None:
            yield None
            continue
        world = run.world
        if run.supervisor is None or world.slurm_answers(run.supervisor.host):
            continue
        what = ""
        if row["event"] == "decision":
            counted = row["resources"]["elsewhere"] is not None or row.get("n_nodes") is not None
            what = f"{row['action']}: {row['reason']}" if counted else ""
        elif row["kind"] == "node_dead" and "Slurm reports" in row["line"]:
            what = "" if world.by_name[row["node"]].slurm_knows(world.now) else row["line"]
        if what:
            yield Violation("nothing is decided by an unknown answer", world.now, what)


def runs_that_wait_have_recorded_why(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """A job that its supervisor puts back into the queue has an event that says why."""
    requeued = (row for row in _rows(run, "attempt_started", "requeued"))
    last, known = "", 0
    while True:
        while (row := next(requeued)) is not None:
            last = str(row["event"])
        waits = run.phase == "queued" and bool(run.world.attempts) and not run.is_requeued_by_slurm
        if waits and last != "requeued" and known != run.world.attempts:
            known = run.world.attempts
            yield Violation("a run waits only for what its events say", run.world.now, run.why)
        yield None


def only_the_owner_acts(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """A supervisor that no longer has the run does nothing."""
    while True:
        acted, run.foreign = run.foreign, []
        yield (
            Violation("no action by a supervisor that no longer has the run", run.world.now, acted[0])
            if acted
            else None
        )


def nobody_interrupts_a_run(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """A run that no person stops, and that Slurm only requeues, does not end as interrupted."""
    for row in _rows(run, "run_ended"):
        if row and row["outcome"] == "interrupted":
            yield Violation("a run that nobody stops is not interrupted", run.world.now, run.why)
        elif row is None:
            yield None


_IN_MEMORY: tuple[What, ...] = ("rank_killed", "rank_hangs", "node_dies", "ecc_error", "move_asked", "drained")
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
            ready_at = ready_at or run.world.now + 5  # the processes of the spare are ready as well
        elif ready_at is None or ready_at > harm[0].at:
            yield None
        elif row["event"] == "step_killed" and run.world.committed >= run.world.total:
            yield None  # the ranks are done: only srun waits until Slurm knows that a node died
        elif row["event"] != "recovered_in_memory" or row["rolled_back"] > 1:
            what = f"{row['event']}: {row.get('reason')}"
            yield Violation("what is recoverable in memory costs no restart", run.world.now, what)


def helper_jobs_end_with_the_run(run: Run, _: Schedule) -> Iterator[Violation | None]:
    """Nothing of a run that is over is left in the queue, or on nodes; and one helper job waits at a time."""
    while True:
        left = [helper for helper in run.helpers if not helper.over]
        waiting = [helper for helper in left if not helper.nodes]
        what, most = "", run.needed - 1
        if run.phase == "over" and left:
            what = f"{len(left)} left when the run is over"
        elif len(waiting) > 1:
            what = f"{len(waiting)} wait in the queue"
        elif any(helper.count > most for helper in waiting):
            what = f"{waiting[0].count} nodes are asked for"
        yield Violation("helper jobs end with the run", run.world.now, what) if what else None


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
    nothing_is_decided_by_an_unknown_answer,
    runs_that_wait_have_recorded_why,
    only_the_owner_acts,
    helper_jobs_end_with_the_run,
    nobody_interrupts_a_run,
)
"""That every run ends is checked by `play`."""
