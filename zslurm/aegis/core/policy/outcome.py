"""How an attempt ended and why: a pure function of what its step and its ranks recorded.

root_cause.py finds the root: the first rank that a signal killed or that failed with its own error. Among
ranks reported on one line the one that recorded its error first counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from zslurm.aegis.core.root_cause import earliest_root, is_orderly, reports_lost_peer, root_failure
from zslurm.aegis.types import EndedAs
from zslurm.core.errors import Exit
from zslurm.slurm.on_nodes.srun_output import TaskFailure, is_warning


@dataclass(frozen=True)
class Cause:
    """The root of a failure."""

    message: str
    rank: int | None = None
    node: str | None = None
    exit_code: int | None = None
    step: int | None = None


class OutcomeFields(TypedDict):
    """An outcome as fields of an event."""

    outcome: str
    exit_code: int
    cause: dict[str, Any] | None


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended, and why."""

    outcome: EndedAs
    exit_code: int
    cause: Cause | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> AttemptOutcome | None:
        """Return the outcome in a row `attempt_ended`; None if the row is damaged."""
        try:
            cause = Cause(**row["cause"]) if row.get("cause") else None
            return cls(row["outcome"], int(row["exit_code"]), cause)
        except (KeyError, TypeError, ValueError):
            return None

    def fields(self) -> OutcomeFields:
        """Return the outcome as fields of an event."""
        cause = {k: v for k, v in asdict(self.cause).items() if v is not None} if self.cause else None
        return {"outcome": self.outcome, "exit_code": self.exit_code, "cause": cause}


def attempt_outcome(
    step_exit: int,
    rank_ends: Sequence[Mapping[str, Any]],
    failures: Sequence[TaskFailure],
    failed_nodes: Sequence[str],
    step_log_tail: str,
    killed_because: str | None = None,
    *,
    early: Sequence[Cause] = (),
    asked: bool = False,
) -> AttemptOutcome:
    """Return how an attempt ended, and why.

    Args:
        step_exit: exit code of the step (of srun: the highest of its tasks, 128 + signal for a killed one).
        rank_ends: what ranks recorded when they ended (AttemptDir.rank_end).
        failures: failed tasks in the order in which the step reported them; without those that the supervisor
            killed itself.
        failed_nodes: nodes that Slurm declared failed.
        step_log_tail: the last lines of the step's log, for an end that nothing else explains.
        killed_because: why the supervisor killed the step, if it did.
        early: ranks that exited with 0 before the end of the run and recorded nothing (early_exits.py).
        asked: whether the run was asked to stop.
    """
    if failed_nodes:
        node = failed_nodes[0]
        return AttemptOutcome(
            "failed", step_exit or Exit.FAILED, Cause(f"Slurm reports node {node} as failed", node=node)
        )
    if step_exit == 0 and not early:
        return AttemptOutcome("completed", Exit.DONE)
    by_rank = {int(end["rank"]): end for end in rank_ends}
    bad = [failure for failure in failures if not stopped_in_order(failure, by_rank, asked=asked)]
    # It is the highest code of all: others may have failed with a lower.
    if step_exit == Exit.INTERRUPTED and not bad and not early:
        return AttemptOutcome("interrupted", Exit.INTERRUPTED)
    if early and root_failure(bad, by_rank) is None:
        return AttemptOutcome("failed", step_exit or Exit.FAILED, early[0])
    if killed_because is not None and root_failure(bad, by_rank) is None:
        return AttemptOutcome("failed", step_exit, Cause(killed_because))
    if bad:
        return _from_failure(root_failure(bad, by_rank) or bad[0], by_rank, step_exit)
    errors = sorted((end for end in rank_ends if not is_orderly(end)), key=earliest_root)
    if errors:
        return AttemptOutcome("failed", int(errors[0]["exit_code"]), _from_rank_end(errors[0]))
    lines = [line for line in step_log_tail.splitlines() if not is_warning(line)]
    words = " ".join(" ".join(lines).split()) or "the step ended without a word"
    return AttemptOutcome("failed", step_exit, Cause(words[-500:], exit_code=step_exit))


def stopped_in_order(failure: TaskFailure, ends_by_rank: Mapping[int, Mapping[str, Any]], *, asked: bool) -> bool:
    """Return whether ranks that exited with 75 saved and stopped: a program may exit with this code by itself.

    If the run was asked to stop (`asked`), a rank's record may be missing still.
    """
    if failure.exit_code != Exit.INTERRUPTED:
        return False
    ends = [ends_by_rank.get(rank) for rank in failure.ranks]
    return all(asked if end is None else is_orderly(end) for end in ends)


def _from_failure(
    failure: TaskFailure, by_rank: Mapping[int, Mapping[str, Any]], step_exit: int
) -> AttemptOutcome:
    code = failure.exit_code
    silent = [rank for rank in failure.ranks if rank not in by_rank]
    recorded = sorted((by_rank[rank] for rank in failure.ranks if rank in by_rank), key=earliest_root)
    if code is None or not recorded or (silent and reports_lost_peer(recorded[0])):
        code, rank = code or step_exit, (silent or failure.ranks)[0]
        return AttemptOutcome("failed", code, Cause(failure.what, rank=rank, node=failure.node, exit_code=code))
    return AttemptOutcome("failed", code, _from_rank_end(recorded[0]))


def _from_rank_end(end: Mapping[str, Any]) -> Cause:
    message = f"{end['error']}: {end['message']}" if end.get("error") else f"exit code {end['exit_code']}"
    return Cause(message, int(end["rank"]), str(end["node"]), int(end["exit_code"]), int(end["step"]))
