"""How an attempt has ended, by its state and by what its step and its ranks left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zslurm.aegis.core.attempt import GONE, AttemptState
from zslurm.aegis.core.policy.outcome import AttemptOutcome, Cause, attempt_outcome
from zslurm.core.errors import Exit
from zslurm.slurm.on_nodes.srun_output import failed_nodes

_KILLED = 128 + 9
"""Exit code of a step that was killed, and recorded none."""
_TAIL = 2000
"""Characters of the step's log that are looked at if nothing else explains the end."""


def is_shown_by_records(state: AttemptState) -> bool:
    """Return whether the records of its ranks show the end of an attempt, and not the end of its step.

    If ranks were replaced, the step of the others may wait for a dead node, and a step of warm processes for those
    that still wait.
    """
    return state.memory is not None and bool(state.replaced)


def awaits_step(state: AttemptState, *, step_runs: bool) -> bool:
    """Return whether the step should end by itself once every rank has: no node died that it would wait for."""
    return step_runs and not state.overcome_nodes


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
