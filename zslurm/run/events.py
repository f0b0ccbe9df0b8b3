"""Every event of a run: one class for each, with its meaning, its fields and the sentence that a person reads.

The supervisor writes them to events.jsonl, commands of people to submissions.jsonl. A new event is one class here,
and one line in docs/run-directory.md. How rows become objects is in event.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_duration
from zslurm.core.units import show_time
from zslurm.run.event import CLASSES, Event, Nodes, Row, from_row
from zslurm.run.event_text import ROLES, cause_of, describe_cause, describe_fault, node_list, rank_list

_ACTIONS = {
    "finish": "nothing more to do",
    "restart": "start again in place",
    "swap": "start again with a spare node",
    "shrink": "continue with fewer nodes",
    "requeue": "requeue the job",
    "stop": "stop for good",
}
_NOT_DONE = {"observe": "would (mode observe)", "off": "would (mode off)"}


def describe(row: Row) -> str:
    """Return the event of a row as a sentence; one of an unknown kind, or that has no sense, as its fields."""
    return from_row(row).describe()


# --- the supervisor and its agents -----------------------------------------------------------------------------


class SupervisorStarted(Event, name="supervisor_started", changes_state=True):
    """A supervisor started in the job, or took an attempt over."""

    host: str
    pid: int | None = None
    adopted: int | None = None

    def _sentence(self) -> str:
        adopted = "" if self.adopted is None else f" and took over attempt {self.adopted}"
        return f"the supervisor started on {self.host}{adopted}"


class AgentsStarted(Event, name="agents_started"):
    """The agents run on the nodes."""

    generation: str | None = None

    def _sentence(self) -> str:
        return f"agents watch{self.on_nodes or ' the nodes'}"


class AgentLost(Event, name="agent_lost"):
    """The agent of a node sends no heartbeats, while the node's ranks run."""

    TEXT = "the agent on {event.node} sends no heartbeats{event.because}"
    node: str


class AgentRestarted(Event, name="agent_restarted"):
    """A lost agent was started again."""

    TEXT = "the agents were started again{event.on_nodes}"


class AgentsUnavailable(Event, name="agents_unavailable"):
    """The agents cannot be started; the run continues without."""

    TEXT = "no agents watch the nodes{event.because}"


class LeaseLost(Event, name="lease_lost"):
    """Another supervisor holds the run's lease."""

    TEXT = "another supervisor has taken over the run"
    generation: str | None = None


class RunDirLost(Event, name="run_dir_lost"):
    """The run directory was moved or removed."""

    TEXT = "the run directory is gone, and the ranks are ended{event.because}"
    rescue_dir: str | None = None


class StartPostponed(Event, name="start_postponed"):
    """The ranks cannot be started yet."""

    TEXT = "the ranks cannot be started yet{event.because}"


class DeputyActed(Event, name="deputy_acted"):
    """The standby supervisor, an agent, acted in place of the lost supervisor."""

    node: str
    batch_node: str | None = None

    def _sentence(self) -> str:
        where = f" on {self.batch_node}" if self.batch_node else ""
        return f"the agent on {self.node} acted in place of the lost supervisor{where}{self.because}"


class NotifyFailed(Event, name="notify_failed"):
    """A hook of aegis.notify, or the job's comment, did not work."""

    TEXT = "a notification was not delivered: {event.reason}"
    reason: str


class NotifyTest(Event, name="notify_test"):
    """What `zslurm aegis notify` sends; in no file."""

    TEXT = "a test of aegis.notify: this hook works"


# --- before the ranks start ------------------------------------------------------------------------------------


class RailsUnknown(Event, name="rails_unknown"):
    """Rails of some nodes could not be checked."""

    TEXT = "rails could not be checked{event.on_nodes}{event.because}"


class RailsDiffer(Event, name="rails_differ"):
    """Rails of some nodes differ from those of the others."""

    TEXT = "rails differ from those of other nodes{event.on_nodes}{event.because}"


class RailsDoubtful(Event, name="rails_doubtful"):
    """Rails of some nodes may be wrong."""

    TEXT = "rails look doubtful{event.on_nodes}{event.because}"


class RailsIncomplete(Event, name="rails_incomplete"):
    """Some nodes lack rails."""

    policy: str | None = None
    action: str | None = None

    def _sentence(self) -> str:
        done = {"start": "the ranks start all the same", "refuse": "the run stops", "exclude": "excluding"}
        action = done.get(str(self.action), str(self.action))
        return f"rails are incomplete{self.on_nodes}{self.because} ({action})"


class ContainerChecked(Event, name="container_checked"):
    """The container runs on the nodes."""

    rdma_abi: dict[str, Any] | None = None

    def _sentence(self) -> str:
        abi = "; ".join(f"RDMA {what} (on {nodes})" for what, nodes in (self.rdma_abi or {}).items())
        return f"the container works{self.on_nodes}{': ' + abi if abi else ''}"


class EnvironmentStaged(Event, name="environment_staged"):
    """The Python environment was copied to the nodes."""

    TEXT = "the Python environment is in {event.path} on each node"
    path: str


class SpareChecked(Event, name="spare_checked"):
    """A spare node was checked before it is used."""

    node: str
    ok: bool

    def _sentence(self) -> str:
        return f"spare node {self.node} {'is in order' if self.ok else 'is not usable'}{self.because}"


class SpareWarmed(Event, name="spare_warmed"):
    """A spare node has read the newest checkpoint into its page cache; of `of` bytes those that fit."""

    node: str
    step: int
    bytes: int
    of: int
    seconds: float | None = None

    def _sentence(self) -> str:
        part = "" if self.bytes >= self.of else f"{show_bytes(self.bytes)} of "
        size = show_bytes(self.of)
        return f"spare node {self.node} has {part}the checkpoint of step {self.step} in memory ({size})"


class GpuTested(Event, name="gpu_tested"):
    """A GPU from which NaN came again and again was tested."""

    node: str
    ok: bool | None
    gpu: str | None = None
    device: str | None = ""

    def _sentence(self) -> str:
        results = {True: "computes correctly", False: "computes wrongly", None: "could not be tested"}
        result = results[self.ok]
        if self.device == "CPU":
            return f"the CPU of {self.node}, on which the run computes, {result}{self.because}"
        if self.ok is False and self.device is None:  # nothing ran
            result = "fails its test"
        what = self.device or f"GPU {self.gpu}"
        return f"{what} of {self.node} {result}{self.because}"


class LockTakenOver(Event, name="lock_taken_over"):
    """A dead job held the lock on the checkpoints."""

    TEXT = "took the checkpoints' lock over from {event.holder}, which is gone"
    holder: str


# --- an attempt ------------------------------------------------------------------------------------------------


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
    """A fault was noticed; `fault_time` is the fault's own time, and the other fields are those of the fault."""

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
    """Srun reported that ranks ended badly."""

    ranks: list[int]
    node: str
    what: str

    def _sentence(self) -> str:
        return f"{rank_list(self.ranks)} on {self.node}: {self.what}"


class CollectivesExamined(Event, name="collectives_examined"):
    """The dumps of the ranks' flight recorders were read; `found` names the ranks for which the others wait."""

    attempt: int
    dumps: int
    found: list[str] | None = None

    def _sentence(self) -> str:
        found = "; ".join(self.found) if self.found else "no rank differs from the others"
        return f"{counted(self.dumps, 'flight-recorder dump')}: {found}"


class RecoveryUnavailable(Event, name="recovery_unavailable"):
    """Faults of this attempt are not recovered from in memory, though that is set."""

    TEXT = "no recovery in memory: {event.reason}; faults restart the ranks"
    attempt: int
    reason: str


class RecoveryReady(Event, name="recovery_ready"):
    """Every node has a warm process: from now on a lost rank can be replaced in memory."""

    TEXT = "lost ranks can be replaced in memory: processes wait{event.on_nodes}"
    attempt: int


class RecoveryStarted(Event, name="recovery_started"):
    """Ranks were lost, and the others regroup with warm processes in their place."""

    attempt: int
    generation: int
    ranks: list[int]
    members: list[str] | None = None

    def _sentence(self) -> str:
        by = f": {', '.join(self.members)} in place" if self.members else ""
        return f"{rank_list(self.ranks)} lost, the others regroup in memory{by}"


class RecoveredInMemory(Event, name="recovered_in_memory", changes_state=True):
    """The ranks train on; `nodes` are those that they are on now."""

    attempt: int
    generation: int
    ranks: list[int]
    step: int
    rolled_back: int = 0
    seconds: float | None = None

    def _sentence(self) -> str:
        lost = f", {counted(self.rolled_back, 'step')} lost" if self.rolled_back else ", no step lost"
        took = "" if self.seconds is None else f" after {self.seconds:.2f} s"
        return (
            f"recovered in memory{took}: trains on from step {self.step}{lost}; {rank_list(self.ranks)} replaced"
        )


class RecoveryFailed(Event, name="recovery_failed"):
    """Lost ranks could not be replaced in memory: every rank is started again."""

    TEXT = "no recovery in memory: {event.reason}; the ranks are started again"
    attempt: int
    reason: str
    generation: int = 0
    ranks: list[int] | None = None


class MovePlanned(Event, name="move_planned"):
    """Ranks are to leave the node `off` for the node `to` at the next step's boundary; nothing was lost."""

    attempt: int
    off: str
    to: str
    ranks: list[int]
    reason: str
    request: str | None = None

    def _sentence(self) -> str:
        return f"{rank_list(self.ranks)} move from {self.off} to {self.to} after this step: {self.reason}"


class RanksMoved(Event, name="ranks_moved", changes_state=True):
    """A planned move was made; `nodes` are those that the ranks are on now, `seconds` how long training paused."""

    attempt: int
    generation: int
    off: str
    ranks: list[int]
    step: int
    rolled_back: int = 0
    seconds: float | None = None
    request: str | None = None

    def _sentence(self) -> str:
        lost = f"{counted(self.rolled_back, 'step')} lost" if self.rolled_back else "no step lost"
        took = "" if self.seconds is None else f", a pause of {self.seconds:.2f} s"
        return f"{rank_list(self.ranks)} moved off {self.off} after step {self.step}, {lost}{took}{self.because}"


class MoveRefused(Event, name="move_refused"):
    """A planned move was not made; the ranks train on where they are."""

    TEXT = "the ranks do not move off {event.off}: {event.reason}"
    off: str
    reason: str
    request: str | None = None


class StacksDumped(Event, name="stacks_dumped"):
    """Ranks wrote the stacks of their threads to their logs."""

    ranks: list[int] | None = None

    def _sentence(self) -> str:
        which = rank_list(self.ranks) if self.ranks else "every rank"
        return f"the stacks of {which}{self.on_nodes} are in the ranks' logs"


class StepKilled(Event, name="step_killed"):
    """The supervisor ended an attempt; `root` is the fault for which, where it is one."""

    TEXT = "attempt {event.attempt} was torn down: {event.reason}"
    attempt: int
    reason: str
    root: dict[str, Any] | None = None


class Ended(Event):
    """An attempt or the run ended."""

    outcome: str
    exit_code: int | None = None
    cause: dict[str, Any] | None = None

    def __init__(self, **fields: Any) -> None:
        """Set the fields; a damaged cause counts as none."""
        super().__init__(**fields)
        self.cause = cause_of(fields)

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
    """Every process of an attempt is gone, or `left` says which are not."""

    attempt: int
    seconds: float | None = None
    killed: int | None = None
    left: dict[str, Any] | int | None = None
    unseen: Nodes | None = None

    def _sentence(self) -> str:
        took = f" in {self.seconds:.1f} s" if self.seconds is not None else ""
        killed = f", {counted(self.killed, 'orphaned process')} killed" if self.killed else ""
        unseen = f"; not checked: {node_list(self.unseen)}" if self.unseen else ""
        if left := self.left:
            by_node = left.items() if isinstance(left, Mapping) else ()
            where = "; ".join(f"{node}: {why}" for node, why in by_node) or left
            return f"attempt {self.attempt} could not be ended everywhere{took}{killed}{unseen}: {where}"
        return f"every process of attempt {self.attempt} is gone{took}{killed}{unseen}"


# --- what was decided and done ---------------------------------------------------------------------------------


class Decided(Event, name="decision", changes_state=True):
    """What the policy decided after an attempt, and from what; done only where `mode` is `act`."""

    FORMER: ClassVar[Mapping[str, str]] = {"attempt_state": "situation"}
    action: str
    mode: str = "act"
    root: dict[str, Any] | None = None
    exclude: list[str] | None = None
    n_nodes: int | None = None
    test_gpu: list[str] | None = None
    wait_s: float | None = None
    step_time_ratio: float | None = None
    expected_wait_s: float | None = None
    committed_step: int | None = None
    attempt_state: dict[str, Any] | None = None
    resources: dict[str, Any] | None = None

    @property
    def acted(self) -> bool:
        """Whether it was done."""
        return self.mode == "act"

    def _sentence(self) -> str:
        action = self.action
        verb = "decided:" if action == "finish" else _NOT_DONE.get(self.mode, "decided to")
        which = f"attempt {self.attempt}: " if self.attempt is not None else ""
        text = f"{which}{verb} {_ACTIONS.get(action, action)}"
        if action in ("swap", "shrink", "restart"):
            text += self.on_nodes
        if action == "requeue" and self.n_nodes:
            text += f" with {counted(self.n_nodes, 'node')}"
        if self.exclude:
            text += f", without {node_list(self.exclude)} from now on"
        if action not in ("finish", "stop") and (self.committed_step or -1) >= 0:
            text += f", from step {self.committed_step}"
        if self.wait_s:
            text += f", in {show_duration(self.wait_s)}"
        if self.test_gpu:
            node, gpu = self.test_gpu
            text += f", after a test of GPU {gpu} on {node}"
        if self.reason:
            return f"{text}: {self.reason}"
        return f"{text}: {describe_fault(self.root)}" if self.root else text


class NodesExcluded(Event, name="nodes_excluded", changes_state=True):
    """The run does not use some nodes any more, until `expires`; without it, never in this job."""

    nodes: Nodes
    expires: float | None = None

    def _sentence(self) -> str:
        until = f" until {show_time(self.expires)}" if self.expires else ""
        return f"the run does not use {node_list(self.nodes)} any more{until}{self.because}"


class ExcludedNodesUsed(Event, name="excluded_nodes_used"):
    """Excluded nodes are used all the same, because there are no others."""

    TEXT = "{event.node_list} is used although excluded: there are no others"
    nodes: Nodes


class ExclusionFailed(Event, name="exclusion_failed", changes_state=True):
    """Slurm did not take an exclusion."""

    TEXT = "{event.node_list} could not be excluded{event.because}"
    nodes: Nodes


class RequeueFailed(Event, name="requeue_failed"):
    """Slurm did not requeue the job."""

    TEXT = "the job could not be requeued{event.because}"
    excluded: str | None = None


class Requeued(Event, name="requeued", changes_state=True):
    """The job is back in the queue."""

    excluded: Nodes | None = None

    def _sentence(self) -> str:
        without = f", without {node_list(self.excluded)}" if self.excluded else ""
        return f"put back into the queue{without}{self.because}"


class SuccessorEnded(Event, name="successor_ended", changes_state=True):
    """A successor job had nothing to continue."""

    TEXT = "job {event.job_id} had nothing to continue: {event.reason}"
    reason: str


# --- what people did: rows of submissions.jsonl ----------------------------------------------------------------


class Action(Event):
    """A user did something to the run; versions before recorded no `user`."""

    user: str | None = None
    launcher: str | None = None
    cluster: str | None = None
    excluded: str | None = None

    def _sentence(self) -> str:
        without = f", without {self.excluded} from now on" if self.excluded else ""
        who = f" by {self.user}" if self.user else ""
        return f"{self.TEXT}{who} as job {self.job_id}{without}"


class Submitted(Action, name="submit"):
    """The run was submitted."""

    TEXT = "submitted"


class RequeuedByUser(Action, name="requeue"):
    """The job was requeued by hand."""

    TEXT = "requeued"


class ExcludedByUser(Action, name="exclude"):
    """Nodes were excluded by hand."""

    TEXT = "changed"


class Cancelled(Action, name="cancel"):
    """The job was cancelled."""

    TEXT = "cancelled"


class MoveAsked(Action, name="move"):
    """Somebody asked that the ranks leave the nodes `off`; `request` is in the events that answer it."""

    off: Nodes
    request: str

    def _sentence(self) -> str:
        return f"asked{f' by {self.user}' if self.user else ''} to move off {node_list(self.off)}"


class Held(Action, name="hold"):
    """The job was held."""

    TEXT = "held"


class Released(Action, name="release"):
    """The job was released."""

    TEXT = "released"


class SuccessorSubmitted(Event, name="successor"):
    """A job was submitted that waits for the end of this one, to continue the run."""

    TEXT = "job {event.successor} waits to continue the run if job {event.job_id} ends early"
    successor: str


KINDS = tuple(CLASSES)
"""Every kind of event."""
