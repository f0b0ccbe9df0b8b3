"""The faults of one attempt: noticed in srun's output, in the ranks' records and in the agents' reports.

srun reports which rank ended, ranks record why, and the agents report what they see on the nodes. Each fault is
written to the events as it is noticed. What they mean together is the policy's to decide.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zslurm.aegis.core.detection.attempt_progress import GONE_S
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.detection.early_exits import early_exits
from zslurm.aegis.core.detection.name_lookups import failed_lookups
from zslurm.aegis.core.policy.history import fault_of
from zslurm.aegis.core.policy.outcome import AttemptOutcome, stopped_in_order
from zslurm.aegis.core.root_cause import is_orderly, roots_of
from zslurm.aegis.fault_kinds import (
    EARLY_EXIT,
    NET_CONFIG,
    NODE_DEAD,
    RANK_HANG,
    SENSOR_UNAVAILABLE,
    SLURM_CANCELLED,
)
from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.protocol import AgentReport
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.attempt_starter import RunningAttempt
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.rank_exits import (
    OF_RANKS,
    cancelled,
    faults_in_step_log,
    faults_of_failure,
    full_disk,
    late_faults,
    node_failed,
    rank_ends,
    tail,
)
from zslurm.aegis.supervisor.rank_times_writer import RankTimesWriter
from zslurm.aegis.supervisor.work_left import committed_step
from zslurm.aegis.types import OF_STEP, AttemptSummary, Fault
from zslurm.core.errors import Exit
from zslurm.core.files import read_json
from zslurm.run.events import (
    FaultDetected,
    RanksEnded,
    RanksMoved,
    RecoveredInMemory,
    SpareWarmed,
    StepKilled,
    StopAsked,
)
from zslurm.run.events.event import from_row, only_known, select
from zslurm.run.metrics.tail import last_step_at, newest_rows
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.on_nodes.srun_output import TaskFailure, failed_nodes, task_failures
from zslurm.train.jsonl import read_jsonl

GONE = "its process is gone, by the agent of its node; its end was not reported"
"""What is recorded of a rank that only an agent reports to have ended."""

_RECORDS_S = 5.0
"""How long the record of a rank that has ended may take to be seen on a shared file system."""

_LOOKUPS_EVERY_S, _MOST_LOGS, _LOOKUP_BYTES = 5.0, 64, 1 << 14
"""How often to look for names that cannot be resolved, and how many logs, and bytes of each, to read for that."""


@dataclass
class FaultCollector:
    """Notices the faults of one attempt, and records them.

    Attributes:
        job: the start of the job that it belongs to.
        running: the attempt.
        agents: the agents; None where the run has none.
        detector: makes faults of what the agents report.
        reported: sensors that cannot read, each recorded once in this start of the job.
        faults: what was noticed so far, without what the run overcame.
        failures: the ends of ranks that srun has reported so far.
        failed_at: when the first rank failed (monotonic seconds); None while none has.
        signalled: an agent has reported a signal since this was last reset.
        lost: ranks that have ended badly and that no recovery in memory has replaced since.
        replaced: ranks that one has replaced.
        overcome_nodes: nodes that died, and whose ranks are elsewhere now.
    """

    job: Job
    running: RunningAttempt
    agents: Agents | None
    detector: Detector
    reported: set[tuple[str, bool]] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    failures: list[TaskFailure] = field(default_factory=list)
    failed_at: float | None = None
    signalled: bool = False
    lost: set[int] = field(default_factory=set)
    replaced: set[int] = field(default_factory=set)
    overcome_nodes: set[str] = field(default_factory=set)
    _changes: list[tuple[frozenset[int], bool]] = field(default_factory=list)
    """The ranks that each recovery has replaced, and whether it has left them out instead."""
    _left_in_order: set[int] = field(default_factory=set)
    """Ranks that recorded an end in order, and whose progress is still there."""
    _read: int = 0
    """How many ends of ranks were taken from srun's output."""
    _asked_before: bool = False
    """An earlier supervisor has asked this attempt to stop."""
    _killed_before: bool = False
    """An earlier supervisor has ended the step."""
    _lookups_at: float = 0.0
    """When to look for names that cannot be resolved, monotonic seconds."""
    _next_log: int = 0
    """The node, by its place among those of the attempt, whose log is read next for that."""

    def __post_init__(self) -> None:
        """Begin to measure the ranks."""
        self._rank_times = RankTimesWriter(self.attempt)

    @property
    def attempt(self) -> AttemptDir:
        """The directory of the attempt."""
        return self.running.attempt

    # --- what is known ------------------------------------------------------------------------------------------

    def attempt_state(self, outcome: AttemptOutcome | None = None) -> AttemptSummary:
        """Return what the policy decides on."""
        return AttemptSummary(
            time.time(),
            self.attempt.number,
            outcome.outcome if outcome is not None else None,
            tuple(sorted(self.faults, key=lambda fault: fault.time)),
            committed_step(self.job.run, self.job.spec),
            self.job.stop.name,
            self.job.stop.requeued,
            preempted=self.job.stop.preempted,
            nodes=self.running.nodes,
            progressed_at=last_step_at(self.job.run.metrics, self.attempt.number),
        )

    def has_root(self, outcome: AttemptOutcome | None = None) -> bool:
        """Return whether something is known that may be why the attempt ended, or ends."""
        if not any(fault.role == "root" for fault in self.faults):
            return False
        roots = roots_of(self.attempt_state(outcome), self.job.spec.aegis)
        return any(fault.role == "root" for fault in roots)

    @property
    def asked(self) -> bool:
        """Whether the ranks were asked to stop."""
        return self.job.stop.asked or self._asked_before

    @property
    def cancelled(self) -> Fault | None:
        """The fault that the step was cancelled, where that is known."""
        ours = (fault for fault in self.faults if fault.source in OF_STEP)
        return next((fault for fault in ours if fault.kind == SLURM_CANCELLED), None)

    @property
    def early_exits(self) -> list[Fault]:
        """Ranks that exited too early by what srun did not report, and not by a record of the rank."""
        return [fault for fault in self.faults if fault.kind == EARLY_EXIT and fault.source in OF_STEP]

    @property
    def dead_nodes(self) -> set[str]:
        """Nodes that are known to be dead."""
        return self.overcome_nodes | {
            fault.node for fault in self.faults if fault.kind == NODE_DEAD and fault.node is not None
        }

    def alive(self) -> list[str]:
        """Return the nodes of the attempt that are not known to be dead."""
        return [node for node in self.running.nodes if node not in self.dead_nodes]

    def rank_nodes(self) -> list[str]:
        """Return the node of each rank."""
        if self.running.memory is not None:
            return list(self.running.memory.places.nodes)
        return [node for node in self.running.nodes for _ in range(self.job.spec.ranks_per_node)]

    # --- what is noticed ----------------------------------------------------------------------------------------

    def note(self, faults: Iterable[Fault]) -> None:
        """Remember and record faults; what no node's sensor can read is recorded once, and not for every node."""
        for each in faults:
            local = each.source == "srun" and not self.job.on_slurm
            fault = replace(each, source="launcher") if local else each
            self.faults.append(fault)
            if fault.kind == SENSOR_UNAVAILABLE:
                if (fault.line, fault.cleared) in self.reported:
                    continue
                self.reported.add((fault.line, fault.cleared))
            self.job.record(_event_of(fault, self.attempt.number))

    def resume(self) -> None:
        """Take over what an earlier supervisor has noticed and recorded, so that it is not noticed again.

        It may have died between the two records of a failure, the end of the ranks and the fault.
        """
        recorded, explained = 0, True
        by_agents: list[TaskFailure] = []
        unexplained: RanksEnded | None = None  # the last end that an agent reported, while no fault was recorded
        kinds = (FaultDetected, RanksEnded, StepKilled, StopAsked, RecoveredInMemory, RanksMoved)
        for event in select(read_jsonl(self.job.run.events), *kinds):
            if event.row.get("attempt") != self.attempt.number:
                continue
            if isinstance(event, RecoveredInMemory):
                self.overcome(event.ranks or (), self.dead_nodes, left_out=event.world_size is not None)
                by_agents, explained, unexplained = [], True, None
            elif isinstance(event, RanksMoved):
                self.overcome(event.ranks, (), left={event.off})
            elif isinstance(event, RanksEnded):
                if event.warm:
                    self.lost |= set(event.ranks)
                elif event.by_agent:
                    by_agents.append(TaskFailure(event.node, tuple(event.ranks), event.what))
                    unexplained = event
                    continue
                else:
                    recorded += 1
                explained = False
            elif isinstance(event, FaultDetected) and (fault := fault_of(event)) is not None:
                self.faults.append(fault)
                explained = explained or fault.source in OF_RANKS
                if unexplained is not None and fault.rank in unexplained.ranks:
                    unexplained = None
            self._asked_before |= isinstance(event, StopAsked)
            self._killed_before |= isinstance(event, StepKilled)
        self.detector.restore(self.faults)
        self._read = recorded
        taken = task_failures(read_step_log(self.attempt))[:recorded]
        self.failures = [known for failure in taken if (known := self._of_ranks(failure)) is not None]
        if self.failures and not explained and not self._stopped_in_order(self.failures[-1]):
            self._note_failure(self.failures[-1])
        reported = {rank for failure in self.failures for rank in failure.ranks}
        self.failures += [failure for failure in by_agents if not reported & set(failure.ranks)]
        if unexplained is not None and not reported & set(unexplained.ranks):
            self._note_failure(by_agents[-1], time.time() - unexplained.time + GONE_S)
        for failure in self.failures:
            if not self._stopped_in_order(failure):
                self.failed_at = time.monotonic()
                self.lost |= set(failure.ranks)

    def collect(self) -> None:
        """Take everything new from srun, the ranks and the agents."""
        for failure in task_failures(read_step_log(self.attempt))[self._read :]:
            self._read += 1
            if (known := self._of_ranks(failure)) is not None:
                self._replace_by(known)
                self.note_end(known)
        self.collect_from_nodes()
        self._note_gone()
        self._note_failed_lookups()

    def _note_gone(self) -> None:
        """Take the ranks whose processes are gone by their agents, and whose ends srun has not reported in time.

        While slurmctld is away srun may not hear of them (26.05). A rank that recorded an end in order is none of
        them: it could only not remove its progress any more.
        """
        gone, nodes = self.detector.gone(time.monotonic()), self.rank_nodes()
        for rank in sorted(gone.keys() - self.lost - self._left_in_order):
            end = read_json(self.attempt.rank_end(rank))
            if end is not None and is_orderly(end):
                self._left_in_order.add(rank)
                continue
            self.note_end(TaskFailure(nodes[rank], (rank,), GONE), gone[rank], by_agent=True)

    def _note_failed_lookups(self) -> None:
        """Before the first step, find the nodes on which torch has tried for long to resolve a name.

        Of each node one rank's log is read, and of many nodes some at a time.
        """
        if self.detector.step >= 0 or time.monotonic() < self._lookups_at:
            return
        self._lookups_at = time.monotonic() + _LOOKUPS_EVERY_S
        known = {fault.node for fault in self.faults if fault.kind == NET_CONFIG}
        ranks: dict[str, int] = {}
        for rank, node in enumerate(self.rank_nodes()):
            ranks.setdefault(node, rank)
        nodes = list(ranks)
        chosen, self._next_log = nodes[self._next_log :][:_MOST_LOGS], self._next_log + _MOST_LOGS
        if self._next_log >= len(nodes):
            self._next_log = 0
        for node in chosen:
            failed = failed_lookups(tail(self.attempt.rank_log(ranks[node]), _LOOKUP_BYTES).splitlines())
            if node in known or failed is None:
                continue
            lasted = failed.last - failed.first
            if lasted >= self.job.spec.aegis.tolerate_s:
                line = f"torch has tried for {lasted:.0f} s to resolve the name {failed.name}: {failed.reason}"
                self.note([Fault.of_kind(NET_CONFIG, failed.first, "log", line, scope="node", node=node)])

    def _replace_by(self, failure: TaskFailure) -> None:
        """Forget what agents reported of ranks, now that srun reports how these ended."""
        self.failures = [
            known for known in self.failures if known.what != GONE or not set(known.ranks) & set(failure.ranks)
        ]

    def _of_ranks(self, failure: TaskFailure) -> TaskFailure | None:
        """Return a failure of tasks of the step as one of ranks; None where they are none any more.

        Of a rank that was replaced the step has the former process only: it froze, or was cut off, and ends when
        it finds out; or Slurm learns late that its node is dead. The rank trains elsewhere.
        """
        ranks = [self.rank_of(task) for task in failure.ranks]
        left = tuple(rank for rank in ranks if rank is not None)
        return replace(failure, ranks=left) if left else None

    def rank_of(self, task: int) -> int | None:
        """Return the rank that a task of the step is now; None where it is none."""
        rank = task
        for gone, left_out in self._changes:
            if rank in gone:
                return None
            rank -= sum(other < rank for other in gone) if left_out else 0
        return rank

    def note_end(
        self, failure: TaskFailure, ago_s: float = 0.0, *, by_agent: bool | None = None, warm: bool | None = None
    ) -> None:
        """Take the bad end of ranks, `ago_s` seconds ago; the event states who reported it, and of whom."""
        self.failures.append(failure)
        ended = RanksEnded(
            attempt=self.attempt.number, ranks=list(failure.ranks), node=failure.node, what=failure.what,
            by_agent=by_agent, warm=warm,
        )  # fmt: skip
        self.job.record(only_known(ended))
        if self._stopped_in_order(failure):
            return
        self.lost |= set(failure.ranks)
        self.failed_at = self.failed_at or time.monotonic()
        self.note_cancelled()
        self._note_failure(failure, ago_s)

    def overcome(
        self, ranks: Iterable[int], dead: Iterable[str], *, left: Collection[str] = (), left_out: bool = False
    ) -> None:
        """Forget what took these ranks and nodes: other processes are in their place, and the others continue.

        Of the nodes that the ranks have `left` as planned nothing matters any more. Where they are `left_out`
        no process is in their place, and the others have the numbers from 0 on.
        """
        gone = set(ranks)
        self.replaced |= gone
        self.lost -= gone
        self._left_in_order -= gone
        self._changes.append((frozenset(gone), left_out))
        if left_out:
            self.lost, self._left_in_order = (
                {rank - sum(other < rank for other in gone) for rank in ranks}
                for ranks in (self.lost, self._left_in_order)
            )
        self.overcome_nodes |= set(dead)
        self.failures = [failure for failure in self.failures if not set(failure.ranks) <= gone]
        self.faults = [
            fault
            for fault in self.faults
            if not fault.rule.in_memory
            and fault.role not in ("cascade", "teardown")
            and fault.node not in left
            and not (fault.kind == RANK_HANG and fault.rank in gone)
        ]
        if not self.lost:
            self.failed_at = None

    def _note_failure(self, failure: TaskFailure, ago_s: float = 0.0) -> None:
        faults = faults_of_failure(self.attempt, failure, self.rank_nodes(), Signatures.load())
        # What a rank recorded, and a line of its log, have times of their own.
        self.note(
            replace(fault, time=fault.time - ago_s, source="agent") if ago_s and fault.line == GONE else fault
            for fault in faults
        )

    def _stopped_in_order(self, failure: TaskFailure) -> bool:
        """Return whether these ranks saved and stopped."""
        if failure.exit_code != Exit.INTERRUPTED:
            return False
        ends = {rank: end for rank in failure.ranks if (end := read_json(self.attempt.rank_end(rank)))}
        return stopped_in_order(failure, ends, asked=self.asked)

    def collect_from_nodes(self, *, over: bool = False) -> None:
        """Take what the agents report, and nodes that Slurm has given up.

        Where ranks complain of lost peers, a node that misses heartbeats is dead: while they run only as long as
        nothing else explains it, but once they are over in any case, for none of them can show any more that its
        node lives. And what is left of them then does not hang.
        """
        dead = failed_nodes(read_step_log(self.attempt))
        if self.agents is None:
            known = self.dead_nodes
            self.note(node_failed(node) for node in dead if node not in known)
            return
        for received in self.agents.reports():
            if isinstance(received.report, AgentReport):
                self._note_of_agent(received.report)
            self.detector.feed(received.report, received.time, time.time() - (time.monotonic() - received.time))
            self._rank_times.feed(received.report)
        self._rank_times.write_if_due(self.rank_nodes(), time.monotonic())
        found = self.detector.check(
            time.monotonic(),
            time.time(),
            dead={node: f"Slurm reports node {node} as failed" for node in dead},
            trouble=self.agents.liveness.trouble(),
            witness_reports=self.agents.witness_reports(),
            lost_peers=self.failed_at is not None and (over or not self.has_root()),
        )
        self.note(fault for fault in found if not (over and fault.kind == RANK_HANG))

    def _note_of_agent(self, report: AgentReport) -> None:
        """Take what an agent reports of itself: a signal, or that its spare node has read a checkpoint."""
        if report.event == "signalled":
            self.signalled = True
        elif report.event == "warmed":
            warmed = from_row({"event": SpareWarmed.NAME, "node": report.stamp.node, **report.values})
            if isinstance(warmed, SpareWarmed):
                self.job.record(warmed)

    def note_cancelled(self) -> None:
        """Find out whether somebody cancelled the step, as long as it was not this supervisor that ended it."""
        if self.asked or self._killed_before or self.cancelled is not None:
            return
        if (fault := cancelled(self.attempt)) is not None:
            self.note([fault])

    def note_late(self, outcome: AttemptOutcome) -> None:
        """Note what the ranks' records and srun's messages show only after the end of the attempt."""
        self.note(late_faults(self.attempt, self.faults, self.rank_nodes(), Signatures.load()))
        if not self.has_root(outcome):
            self.note(faults_in_step_log(self.attempt))
        if outcome.outcome == "failed":
            self.note(full_disk(self.job.run.path, self.faults))

    def note_early_exits(self) -> bool:
        """Find ranks that exited with 0 before the end of the run and recorded nothing; returns whether there are.

        Their records may be a moment late: an NFS client asks for a directory again only now and then.
        """
        process = self.running.process
        if process.poll() is None or not process.left_exit_code or self.early_exits:
            return False
        code, deadline = process.poll() or 0, time.monotonic() + _RECORDS_S
        while True:
            if code == 0 and committed_step(self.job.run, self.job.spec) >= self.job.spec.total_steps:
                return False
            ends, log = rank_ends(self.attempt), read_step_log(self.attempt)
            dead, step = self.dead_nodes, self._last_step(ends)
            found = early_exits(code, log, ends, self.rank_nodes(), dead=dead, step=step, now=time.time())
            if not found or time.monotonic() > deadline:
                break
            time.sleep(self.job.spec.aegis.poll_s)
        self.note(found)
        return bool(found)

    def _last_step(self, ends: Iterable[Mapping[str, Any]]) -> int | None:
        """Return the last step that the attempt is known to have finished: its ranks finish a step together."""
        newest = newest_rows(self.job.run.metrics).step
        known = [self.detector.step, *(int(end.get("step", -1)) for end in ends)]
        if newest.get("attempt") == self.attempt.number:
            known.append(int(newest["step"]))
        return max(known) if max(known) >= 0 else None


def _event_of(fault: Fault, attempt: int) -> FaultDetected:
    """Return the event of a fault, without what is not known of it."""
    event = FaultDetected(
        attempt=attempt, fault_time=fault.time, kind=fault.kind, role=fault.role, scope=fault.scope,
        source=fault.source, line=fault.line, node=fault.node, gpu=fault.gpu, nic=fault.nic, rank=fault.rank,
        step=fault.step, cleared=fault.cleared or None, fingerprint=fault.fingerprint,
    )  # fmt: skip
    return only_known(event)


def read_step_log(attempt: AttemptDir) -> str:
    """Return what srun has printed so far; nothing while the file system does not answer."""
    try:
        return attempt.step_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
