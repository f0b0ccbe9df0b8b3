"""How an attempt has ended, by its state and by what its step and its ranks left, and what is still waited for.

the step has ended, or is given up -> early exits -> the outcome
ranks stopped unasked   -> who asked them? (`asks_who_stopped`, `gives_up_answer`)
ranks failed            -> end what is left (`is_to_be_cleared`), early exits again, late faults
the run directory is lost -> a save elsewhere (`awaits_rescue`)
Slurm preempts the job  -> it requeues it itself (`awaits_slurm`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zslurm.aegis.core.attempt import GONE, AttemptState
from zslurm.aegis.core.messages import StopState
from zslurm.aegis.core.policy.outcome import AttemptOutcome, Cause, attempt_outcome
from zslurm.aegis.types import Fault
from zslurm.core.errors import Exit
from zslurm.slurm.on_nodes.srun_output import failed_nodes

_KILLED = 128 + 9
"""Exit code of a step that was killed, and recorded none."""
_TAIL = 2000
"""Characters of the step's log that are looked at if nothing else explains the end."""
_RECORDS_S = 5.0
"""How long the record of a rank that has ended may take to be seen on a shared file system."""
_SLURM_S = 86400.0
"""How long a controller that is away is waited for when ranks were stopped, or Slurm is to requeue the job."""


def is_shown_by_records(state: AttemptState) -> bool:
    """Return whether the records of its ranks show the end of an attempt, and not the end of its step.

    If ranks were replaced, the step of the others may wait for a dead node, and a step of warm processes for those
    that still wait.
    """
    return state.memory is not None and bool(state.replaced)


def awaits_step(state: AttemptState, *, step_runs: bool) -> bool:
    """Return whether the step should end by itself once every rank has: no node died that it would wait for."""
    return step_runs and not state.overcome_nodes


def may_have_early_exits(state: AttemptState, *, in_order: bool) -> bool:
    """Return whether unknown ranks may have exited too early; `in_order`: the step has left its exit code."""
    return in_order and not state.early_exits


def awaits_records(early: Sequence[Fault], waited_s: float) -> bool:
    """Return whether the records of ranks may still come that seem to have exited too early."""
    return bool(early) and waited_s <= _RECORDS_S


def is_to_be_cleared(outcome: AttemptOutcome) -> bool:
    """Return whether something of an attempt may be left: not if every rank has left by itself."""
    return outcome.outcome not in ("completed", "interrupted")


def looks_at_step_log(state: AttemptState, wall: float, outcome: AttemptOutcome) -> bool:
    """Return whether srun's messages are to explain the end of an attempt: nothing else does."""
    return not state.has_root(wall, outcome)


def looks_at_disk(outcome: AttemptOutcome) -> bool:
    """Return whether a full file system may be why an attempt ended."""
    return outcome.outcome == "failed"


def asks_who_stopped(outcome: AttemptOutcome, stop: StopState) -> bool:
    """Return whether Slurm is to be asked who has stopped the ranks: it may have been a preemption."""
    return outcome.outcome == "interrupted" and stop.preempted is None


def gives_up_answer(waited_s: float) -> str:
    """Return why Slurm is not asked any more who has stopped the ranks; empty while it is."""
    if waited_s < _SLURM_S:
        return ""
    return (
        f"the ranks were asked to stop, and Slurm has not answered for {waited_s:.0f} s whether it preempts the "
        "job; the run ends as if a person had stopped it"
    )


def awaits_slurm(stop: StopState) -> bool:
    """Return whether Slurm itself is about to requeue the job: one that ended before would not come back."""
    return stop.preempted == "requeue" and stop.name is None and not stop.requeued


def gives_up_slurm(waited_s: float, grace_s: float) -> str:
    """Return why Slurm's requeue of a job that it preempts is not waited for any more; empty while it is.

    Args:
        waited_s: for so long.
        grace_s: what was left of the grace time when the wait began.
    """
    if waited_s < max(0.0, grace_s) + _SLURM_S:
        return ""
    return f"Slurm preempts the job, and has not requeued it within {waited_s:.0f} s; the job ends"


def awaits_rescue(waited_s: float, save_s: float, *, can_save: bool, runs: bool) -> bool:
    """Return whether the ranks of a lost run directory may still save elsewhere.

    Args:
        waited_s: for so long they were asked.
        save_s: aegis.save_s.
        can_save: another directory is set (checkpoint.rescue_dir).
        runs: their step has not ended.
    """
    return can_save and runs and waited_s < save_s


def why_without_store(log: str, *, never_listened: bool) -> str:
    """Return why an attempt cannot continue without the store server of its ranks, which has written a log."""
    why = "ended before it listened" if never_listened else "has ended, and without it ranks cannot save"
    return f"the ranks' store server {why}; see {log}"


def outcome_without_run_dir(why: str, saved_in: str) -> AttemptOutcome:
    """Return how an attempt ended whose run directory is lost; `saved_in` is empty if no other one is set."""
    saved = f"the ranks were asked to save in {saved_in}" if saved_in else "nothing was saved"
    return AttemptOutcome("failed", Exit.STOPPED, Cause(f"{why}; {saved}"))


def outcome_of(
    state: AttemptState,
    step_exit: int | None,
    rank_ends: Sequence[Mapping[str, Any]],
    step_log: str,
    killed_because: str | None,
) -> AttemptOutcome:
    """Return how an attempt ended.

    Args:
        state: of the attempt.
        step_exit: exit code of its step; None if it recorded none.
        rank_ends: what its ranks recorded.
        step_log: what srun printed.
        killed_because: why the supervisor ended it, if it did.
    """
    code = _KILLED if step_exit is None else step_exit
    if state.replaced and not state.lost and len(rank_ends) == len(state.rank_nodes):
        code = max(int(end["exit_code"]) for end in rank_ends)  # srun's is that of a rank that was replaced
    dead = [node for node in failed_nodes(step_log) if node not in state.overcome_nodes]
    early = [Cause(fault.line, fault.rank, fault.node, int(Exit.DONE), fault.step) for fault in state.early_exits]
    exited = {cause.rank for cause in early}
    # An agent sees that a process is gone, and not how: a rank that exited with 0 was not killed.
    failures = [
        reduced
        for reduced in state.failures
        if reduced.what != GONE or not (None in exited or exited & set(reduced.ranks))
    ]
    outcome = attempt_outcome(
        code, rank_ends, failures, dead, step_log[-_TAIL:], killed_because, early=early, asked=state.asked
    )
    cancelled = state.cancelled
    if cancelled is not None and outcome.outcome == "failed" and not dead:
        return replace(outcome, cause=Cause(cancelled.line, exit_code=outcome.exit_code))
    return outcome
