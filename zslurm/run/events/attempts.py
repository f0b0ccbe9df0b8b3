"""Events of an attempt: its start, its faults, its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.units import show_time
from zslurm.run.events.event import Event, Nodes, Row
from zslurm.run.events.event_text import ROLES, cause_of, describe_cause, describe_fault, node_list, rank_list


class AttemptStarted(Event, name="attempt_started", changes_state=True):
    """The ranks were started."""

    attempt: int
    world_size: int | None = None

    def _sentence(self) -> str:
        ranks = "" if self.world_size is None else f", {counted(self.world_size, 'rank')}"
        return f"attempt {self.attempt} started{self.on_nodes}{ranks}"


class StopAsked(Event, name="signal"):
    """The ranks are asked to save and stop."""

    signal: str
    to: str | None = None

    def _sentence(self) -> str:
        return f"asked {'the ranks ' if self.to == 'ranks' else ''}to save and stop ({self.signal})"


class Preempted(Event, name="preempted", changes_state=True):
    """Slurm takes the nodes for another job."""

    mode: str
    preempt_time: float | None = None
    ends_at: float | None = None

    def _sentence(self) -> str:
        then = "puts it back into the queue" if self.mode == "requeue" else "ends it (PreemptMode=CANCEL)"
        grace = f"; the grace time ends {show_time(self.ends_at)}" if self.ends_at else ""
        return f"preempted: Slurm takes the nodes for another job and {then}{grace}"


class FaultDetected(Event, name="fault_detected"):
    """A fault was noticed; `fault_time` is the fault's own time, and the other fields are the fault's."""

    kind: str
    fault_time: float | None = None
    role: str | None = None
    scope: str | None = None
    source: str | None = None
    line: str | None = None
    node: str | None = None
    gpu: str | None = None
    nic: str | None = None
    rank: int | None = None
    step: int | None = None
    cleared: bool | None = None
    fingerprint: str | None = None

    def _sentence(self) -> str:
        role = "over" if self.cleared else ROLES.get(str(self.role), "fault")
        return f"{role}: {describe_fault(vars(self))}"


class RanksEnded(Event, name="ranks_ended"):
    """Ranks ended badly; reported by srun, or by the agent of their node (`by_agent`).

    With `warm`, the rank was a process of a warm step that had taken its place.
    """

    ranks: list[int]
    node: str
    what: str
    by_agent: bool | None = None
    warm: bool | None = None

    def _sentence(self) -> str:
        return f"{rank_list(self.ranks)} on {self.node}: {self.what}"


class CollectivesExamined(Event, name="collectives_examined"):
    """The dumps of the ranks' flight recorders were read; `found` names the ranks for which the others wait."""

    attempt: int
    dumps: int
    found: list[str] | None = None

    def _sentence(self) -> str:
        sentence = "; ".join(self.found) if self.found else "no rank differs from the others"
        return f"{counted(self.dumps, 'flight-recorder dump')}: {sentence}"


class RasAnswered(Event, name="ras_answered"):
    """The RAS service of the collective library was asked about a hang; `found` has what it shows, a line each."""

    attempt: int
    node: str
    version: str = ""
    found: list[str] | None = None

    def _sentence(self) -> str:
        sentence = "; ".join(self.found) if self.found else "no rank is behind the others"
        return f"the RAS service on {self.node}{f' (NCCL {self.version})' if self.version else ''}: {sentence}"


class StacksDumped(Event, name="stacks_dumped"):
    """Ranks wrote the stacks of their threads to their logs."""

    ranks: list[int] | None = None

    def _sentence(self) -> str:
        which = rank_list(self.ranks) if self.ranks else "every rank"
        return f"the stacks of {which}{self.on_nodes} are in the ranks' logs"


class StepKilled(Event, name="step_killed"):
    """The supervisor ended an attempt; `root` is the fault for which, if it is one."""

    TEXT = "attempt {event.attempt} was torn down: {event.reason}"
    attempt: int
    reason: str
    root: dict[str, Any] | None = None


class Ended(Event):
    """An attempt or the run ended."""

    outcome: str
    exit_code: int | None = None
    cause: dict[str, Any] | None = None

    @classmethod
    def renew(cls, row: Row) -> Row:
        """Leave a damaged cause out."""
        return {**row, "cause": cause_of(row)} if "cause" in row else row

    def _sentence(self) -> str:
        cause = f": {describe_cause(self.cause)}" if self.cause else ""
        which = "the run" if self.attempt is None else f"attempt {self.attempt}"
        code = "" if self.exit_code is None else f" (exit code {self.exit_code})"
        return f"{which} {self.outcome}{code}{cause}"


class AttemptEnded(Ended, name="attempt_ended", changes_state=True):
    """An attempt ended; `cause` is the root of a failure."""


class RunEnded(Ended, name="run_ended", changes_state=True):
    """The run ended in this job."""


class AttemptCleared(Event, name="attempt_cleared"):
    """Every process of an attempt is gone, or `left` names those that are not."""

    attempt: int
    seconds: float | None = None
    killed: int | None = None
    left: dict[str, Any] | int | None = None
    unseen: Nodes | None = None

    def _sentence(self) -> str:
        took = f" in {self.seconds:.1f} s" if self.seconds is not None else ""
        killed = f", {counted(self.killed, 'orphaned process')} killed" if self.killed else ""
        unseen = f"; not checked: {node_list(self.unseen)}" if self.unseen else ""
        if left_over := self.left:
            by_node = left_over.items() if isinstance(left_over, Mapping) else ()
            where = "; ".join(f"{node}: {why}" for node, why in by_node) or left_over
            return f"attempt {self.attempt} could not be ended everywhere{took}{killed}{unseen}: {where}"
        return f"every process of attempt {self.attempt} is gone{took}{killed}{unseen}"
