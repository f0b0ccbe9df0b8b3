"""Events, which the shell reports to the core, and actions, which the core asks the shell for.

Times called `now` are monotonic seconds of the supervisor, those called `wall` are UNIX seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zslurm.aegis.core.detection.flight_records import Culprits
from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.core.policy.shrinking import Weighed
from zslurm.aegis.logs.name_lookups import FailedLookups
from zslurm.aegis.protocol import Report
from zslurm.aegis.types import Fault
from zslurm.run.events.event import Event
from zslurm.slurm.on_nodes.srun_output import TaskFailure
from zslurm.train.recovery.generation import Generation


@dataclass(frozen=True)
class StopState:
    """Whether and by what the run is asked to save and stop.

    Attributes:
        asked: it is.
        name: the signal that asked; None if none did.
        asked_by: what asked, for messages.
        requeued: Slurm has put the job back into the queue.
        preempted: what Slurm does with the job if it preempts it.
        deadline: until when the ranks may save (monotonic seconds).
        comes_back: the job is to be put back into the queue: it is not cancelled, and Slurm has not done it yet.
    """

    asked: bool = False
    name: str | None = None
    asked_by: str = ""
    requeued: bool = False
    preempted: Literal["requeue", "cancel"] | None = None
    deadline: float | None = None
    comes_back: bool = False


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumed:
    """Another supervisor has watched the attempt before this one.

    Attributes:
        recorded: what it recorded of the attempt, oldest first.
        in_log: the bad ends of tasks that srun has reported so far.
        ends: what the ranks recorded that exited with the code of an orderly stop.
    """

    recorded: tuple[Event, ...]
    in_log: tuple[TaskFailure, ...]
    ends: Mapping[int, Mapping[str, Any]]
    now: float
    wall: float


@dataclass(frozen=True)
class StopChanged:
    """The request to save and stop is another one."""

    stop: StopState


@dataclass(frozen=True)
class ReportReceived:
    """An agent has reported; the times are those at which the report came."""

    report: Report
    now: float
    wall: float


@dataclass(frozen=True)
class AgentGivenUp:
    """The agent of a node was given up; another one is started."""

    node: str


@dataclass(frozen=True)
class SlurmAnswered:
    """What Slurm calls nodes that miss heartbeats; empty for one that is well. `down`: those it calls down."""

    states: Mapping[str, str]
    down: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NodeUnreachable:
    """Slurm can start no agent on a node, and why."""

    node: str
    reason: str


@dataclass(frozen=True)
class NodeAskedAbout:
    """What was answered about a silent node; None if nothing could be asked. See `AskAbout`."""

    node: str
    report: WitnessReport | None


@dataclass(frozen=True)
class RanksFailed:
    """Ranks have ended badly, by srun.

    Attributes:
        failure: what was reported of tasks of the step, whose numbers ranks had at its start.
        ends: what ranks recorded that exited with the code of an orderly stop.
    """

    failure: TaskFailure
    ends: Mapping[int, Mapping[str, Any]]
    now: float


@dataclass(frozen=True)
class EndRead:
    """The record of a rank's end was read; `end` is None if there is none. See `ReadEnd`."""

    rank: int
    end: Mapping[str, Any] | None
    gone_s: float
    now: float


@dataclass(frozen=True)
class FaultsFound:
    """The shell has found faults in logs and records."""

    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class LookupsFailed:
    """A rank's log ends with tries to resolve a name, on a node."""

    node: str
    failed: FailedLookups


@dataclass(frozen=True)
class StepCancelled:
    """srun reports that the step was cancelled."""

    fault: Fault


@dataclass(frozen=True)
class Recovered:
    """Other processes are in the place of ranks, or these were left out; or ranks have moved as planned.

    Attributes:
        ranks: their numbers before.
        dead: nodes that died, on which some of them were.
        left: nodes that ranks have left as planned: nothing there matters any more.
        left_out: no process is in their place, and the others are numbered from 0 on.
        rank_nodes: the node of each rank now; None if that is not known yet.
    """

    ranks: frozenset[int]
    dead: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    left_out: bool = False
    rank_nodes: tuple[str, ...] | None = None
    now: float = 0.0


@dataclass(frozen=True)
class Tick:
    """Time has passed, and this is what the shell knows besides reports.

    Attributes:
        failed_nodes: nodes that Slurm has reported as failed in this attempt.
        over: the attempt is over: nothing hangs any more, and no node has to prove that it lives. Whether it
            continues is only asked before that.
        broken: why the attempt cannot continue by what the shell sees itself; empty if it can.
    """

    now: float
    wall: float
    failed_nodes: tuple[str, ...] = ()
    over: bool = False
    broken: str = ""


@dataclass(frozen=True)
class Cleared:
    """Every process of an attempt that is over was ended, wherever that was possible."""

    now: float


@dataclass(frozen=True)
class ProgressRead:
    """How far the run is by its files; see `AttemptState.needs_progress`.

    Attributes:
        committed_step: step of the newest checkpoint; -1 before the first.
        progressed_at: when the slowest rank last finished a step (UNIX seconds); None if that is not known.
    """

    committed_step: int
    progressed_at: float | None


@dataclass(frozen=True)
class Paused:
    """The supervisor itself was stopped for some seconds, until `now`, and the ranks probably as well."""

    seconds: float
    now: float


@dataclass(frozen=True)
class HangExamined:
    """The witnesses of a hang were asked; see `ExamineHang`.

    Attributes:
        culprits: ranks for which others wait, by the dumps of flight recorders.
        behind: ranks that the RAS service shows behind the others.
        faults: what the dumps show.
        recorded: what was answered, for the run's events.
    """

    culprits: tuple[Culprits, ...] = ()
    behind: frozenset[int] = frozenset()
    faults: tuple[Fault, ...] = ()
    recorded: tuple[Event, ...] = ()


@dataclass(frozen=True)
class RanksKilled:
    """Ranks that hang were killed, or `reason` is why not all of them could be; see `KillRanks`."""

    ranks: tuple[int, ...]
    reason: str
    now: float


@dataclass(frozen=True)
class MemoryResumed:
    """An earlier supervisor has left the recovery in memory of the attempt.

    Attributes:
        pending: the newest generation, if its end is not recorded yet.
        died: nodes that have died in this attempt.
        now: monotonic seconds.
    """

    pending: Generation | None
    died: frozenset[str]
    now: float


@dataclass(frozen=True)
class StoreReported:
    """The store server of the ranks has reported something (job/in_memory/store_server.py)."""

    report: Mapping[str, Any]
    now: float
    wall: float


@dataclass(frozen=True)
class StoreGone:
    """The store server did not take a generation; `move` is true if it belongs to a planned move."""

    move: bool


@dataclass(frozen=True)
class WarmEnded:
    """A process of a warm step has failed; `ends` is as of `RanksFailed`."""

    member: str
    failure: TaskFailure
    ends: Mapping[int, Mapping[str, Any]]
    now: float


@dataclass(frozen=True)
class WarmNotStarted:
    """Warm processes could not be started, and why. See `StartWarm`."""

    action: StartWarm
    reason: str


@dataclass(frozen=True)
class SparesChecked:
    """Spares were checked; the reason is empty for one that is fit. See `CheckSpare`."""

    reasons: Mapping[str, str]
    round: int


@dataclass(frozen=True)
class FewerWeighed:
    """Why the ranks must not continue on that number of nodes; empty if they may. See `WeighFewer`."""

    nodes: int
    reason: str
    weighed: Weighed | None = None


@dataclass(frozen=True)
class MoveRequested:
    """A person asks for the ranks to leave a node."""

    node: str
    reason: str
    request: str
    now: float


@dataclass(frozen=True)
class DrainsRead:
    """The nodes that Slurm drains now, each with the reason."""

    nodes: Mapping[str, str]
    wall: float


@dataclass(frozen=True)
class HelperAsked:
    """A helper job waits in the queue; or none does, and none is asked for before `again_at` (monotonic seconds).

    See `AskForHelper`.
    """

    waits: bool
    again_at: float = 0.0


@dataclass(frozen=True)
class HelperStarted:
    """A helper job has started on these nodes, and its agents are on their way."""

    helper: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class HelperEnded:
    """A helper job is over: its nodes are gone; none if it had not started."""

    helper: str
    nodes: tuple[str, ...]
    now: float


CoreEvent = (
    Resumed
    | StopChanged
    | ReportReceived
    | AgentGivenUp
    | SlurmAnswered
    | NodeUnreachable
    | NodeAskedAbout
    | RanksFailed
    | EndRead
    | FaultsFound
    | LookupsFailed
    | StepCancelled
    | Recovered
    | Tick
    | Cleared
    | ProgressRead
    | Paused
    | HangExamined
    | RanksKilled
    | MemoryResumed
    | StoreReported
    | StoreGone
    | WarmEnded
    | WarmNotStarted
    | SparesChecked
    | FewerWeighed
    | MoveRequested
    | DrainsRead
    | HelperAsked
    | HelperStarted
    | HelperEnded
)


# --- actions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Write an event to the run's events."""

    event: Event


@dataclass(frozen=True)
class ReadLastWords:
    """Read what ranks that failed recorded, or the end of their logs; answered by `FaultsFound`."""

    failure: TaskFailure
    ago_s: float = 0.0


@dataclass(frozen=True)
class ReadEnd:
    """Read the record of a rank whose process is gone for `gone_s` seconds; answered by `EndRead`."""

    rank: int
    gone_s: float


@dataclass(frozen=True)
class LookForCancel:
    """Look whether srun reports that the step was cancelled; answered by `StepCancelled` if it was."""


@dataclass(frozen=True)
class LookForPreemption:
    """Ask Slurm whether it preempts the job: a signal has reached only the steps."""


@dataclass(frozen=True)
class AskAbout:
    """Ask a silent node's slurmd, its neighbours and its agent about it; answered by `NodeAskedAbout`."""

    node: str
    neighbours: tuple[str, ...]


@dataclass(frozen=True)
class GiveUp:
    """End the attempt.

    Attributes:
        reason: one line.
        root: the fault for which, if it is one.
        overdue: the ranks were asked to save and stop, and did not in time.
    """

    reason: str
    root: Fault | None = None
    overdue: bool = False


@dataclass(frozen=True)
class ExamineHang:
    """Read the dumps of the flight recorders and ask the RAS service; answered by `HangExamined`."""


@dataclass(frozen=True)
class DumpStacks:
    """Have every rank that is left write the stacks of its threads to its log."""


@dataclass(frozen=True)
class KillRanks:
    """Have agents kill ranks that hang; answered by `RanksKilled`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class EndRanks:
    """Have agents kill what is left of ranks that others replace, in the meantime; each rank with its node."""

    ranks: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Exclude:
    """Record that the run does not use some nodes from now on, until `aegis.exclude_for_s` is over.

    With `is_private` they are not shared with the group: a person only asked this run to leave them.
    """

    nodes: tuple[str, ...]
    reason: str
    attempt: int
    is_private: bool = False


@dataclass(frozen=True)
class StartWarm:
    """Start a number of warm processes on each of some nodes; answered by `WarmNotStarted` if that fails.

    Attributes:
        nodes: on which.
        per_node: how many on each.
        first: they are the first ones of the attempt.
    """

    nodes: tuple[str, ...]
    per_node: int = 1
    first: bool = False


@dataclass(frozen=True)
class CheckSpare:
    """Check spares while the ranks are watched; answered by `SparesChecked`."""

    nodes: tuple[str, ...]
    round: int


@dataclass(frozen=True)
class WeighFewer:
    """Find out whether the ranks may continue on fewer nodes; answered by `FewerWeighed`."""

    nodes: int
    in_use: int


@dataclass(frozen=True)
class AskForHelper:
    """Submit a helper job for a number of nodes, without some; answered by `HelperAsked`."""

    nodes: int
    avoid: tuple[str, ...] = ()
    weighed: Weighed | None = None


@dataclass(frozen=True)
class DismissHelper:
    """End a helper job of which no node is used; answered by `HelperEnded`."""

    helper: str
    reason: str


@dataclass(frozen=True)
class Regroup:
    """Have the ranks regroup as a generation; answered by `StoreGone` if that fails."""

    generation: Generation


@dataclass(frozen=True)
class HoldForMove:
    """Have the ranks regroup as a generation at the next step's boundary; answered as `Regroup`."""

    generation: Generation


@dataclass(frozen=True)
class ForgetReplaced:
    """Forget what was recorded of the former processes of ranks, and heard of nodes that died.

    Attributes:
        members: the present process of each rank that was replaced, or has another number; empty if it is none.
        dead: nodes that died.
    """

    members: Mapping[int, str]
    dead: frozenset[str]


CoreAction = (
    Record
    | ReadLastWords
    | ReadEnd
    | LookForCancel
    | LookForPreemption
    | AskAbout
    | GiveUp
    | ExamineHang
    | DumpStacks
    | KillRanks
    | EndRanks
    | Exclude
    | StartWarm
    | CheckSpare
    | WeighFewer
    | AskForHelper
    | DismissHelper
    | Regroup
    | HoldForMove
    | ForgetReplaced
)

NO_ANSWER = "its agent does not answer"
"""Why a spare is not used that was not checked in time: no more is known of it."""
