"""The faults of one attempt: noticed in srun's output, in the ranks' records and in the agents' reports.

srun reports which rank ended, ranks record why, and the agents report what they see on the nodes. Each fault is
written to the events as it is noticed. What they mean together is the policy's to decide.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from zslurm.aegis.core.attempt import GONE, AttemptState, MovesState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.detection.early_exits import early_exits
from zslurm.aegis.core.ending import awaits_records, looks_at_disk, looks_at_step_log, may_have_early_exits
from zslurm.aegis.core.messages import (
    AskAbout,
    AskForHelper,
    CoreAction,
    CoreEvent,
    DismissHelper,
    DumpStacks,
    EndRanks,
    EndRead,
    ExamineHang,
    Exclude,
    FaultsFound,
    ForgetReplaced,
    GiveUp,
    KillRanks,
    LookForCancel,
    LookForPreemption,
    LookupsFailed,
    Paused,
    ProgressRead,
    RanksFailed,
    RanksKilled,
    ReadEnd,
    ReadLastWords,
    Record,
    ReportReceived,
    Resumed,
    StepCancelled,
    StopChanged,
    Tick,
)
from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.core.step import may_be_cancelled, step
from zslurm.aegis.logs.name_lookups import failed_lookups
from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.attempt_starter import RunningAttempt
from zslurm.aegis.supervisor.hanging_ranks import dump_stacks, end_ranks, examine_hang, kill_ranks
from zslurm.aegis.supervisor.helper_jobs import HelperJobs
from zslurm.aegis.supervisor.in_memory.move_requests import MoveRequests
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.rank_exits import (
    cancelled,
    faults_in_step_log,
    faults_of_failure,
    forget_former_end,
    full_disk,
    late_faults,
    rank_ends,
    tail,
)
from zslurm.aegis.supervisor.rank_times_writer import RankTimesWriter
from zslurm.aegis.supervisor.spare_checks import unfit_spares
from zslurm.aegis.supervisor.work_left import committed_step
from zslurm.aegis.types import Fault
from zslurm.core.errors import Exit
from zslurm.core.files import read_json
from zslurm.core.pauses import PauseReader, Pauses
from zslurm.run.events import (
    FaultDetected,
    RanksEnded,
    RanksExpelled,
    RanksJoined,
    RanksMoved,
    RecoveredInMemory,
    StepKilled,
    StopAsked,
)
from zslurm.run.events.event import select
from zslurm.run.metrics.tail import last_step_at, newest_rows
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.environment import task_node
from zslurm.slurm.on_nodes.srun_output import TaskFailure, failed_nodes, task_failures
from zslurm.train.jsonl import read_jsonl

_LONGEST_LOOK_S = 30.0
"""No look takes longer by itself, questions to Slurm included."""

_LOOKUPS_EVERY_S, _MOST_LOGS, _LOOKUP_BYTES = 5.0, 64, 1 << 14
"""How often to look for names that cannot be resolved, and how many logs, and bytes of each, to read for that."""


class FaultCollector:
    """Reports what happens to one attempt to the core, and carries out what follows for its records.

    Attributes:
        job: the start of the job that it belongs to.
        running: the attempt.
        agents: the agents; None if the run has none.
        state: all that is known of the attempt.
        signalled: an agent has reported a signal since this was last reset.
        given_up: why the core ends the attempt, as of the last `look`; None while it continues.
    """

    def __init__(
        self,
        job: Job,
        running: RunningAttempt,
        agents: Agents | None,
        detector: Detector,
        reported: set[tuple[str, bool]] | None = None,
        spares: int = 0,
        helpers: HelperJobs | None = None,
    ) -> None:
        """Begin; for `reported` and `spares` see `AttemptState`."""
        self.job, self.running, self.agents = job, running, agents
        memory = running.memory
        self._requests = MoveRequests(job, ask_drains=memory is not None and job.on_slurm)
        if memory is not None and agents is not None:
            limit_s = job.spec.aegis.recovery_s / 2  # and there is time for another one
            memory.check, memory.state.checks_spares = partial(unfit_spares, job, agents, timeout_s=limit_s), True
        ranks = [node for node in running.nodes for _ in range(job.spec.ranks_per_node)]
        self.state = AttemptState(
            job.spec.aegis,
            running.attempt.number,
            running.nodes,
            ranks if memory is None else memory.rank_nodes,
            detector,
            has_agents=agents is not None,
            on_slurm=job.on_slurm,
            own_node=task_node(job.environ),
            history=job.history(),
            spares=spares,
            reported=set() if reported is None else reported,
            memory=memory.state if memory is not None else None,
            moves=MovesState(self._requests.answered()),
        )
        if memory is not None and job.spec.may_ask_for_helpers and helpers is not None:
            memory.state.wanted, memory.state.weighs_helper = job.spec.slurm.nodes, job.spec.aegis.heal == "auto"
        self._helpers = helpers
        self.signalled = False
        self.given_up: GiveUp | None = None
        # Without agents no thread ticks, and a look may take long by itself.
        unticked = Pauses(_LONGEST_LOOK_S + job.spec.aegis.poll_s)
        self._pauses = PauseReader(job.pauses if agents is not None else unticked)
        self._rank_times = RankTimesWriter(self.attempt)
        self._lookups_at = 0.0
        self._next_log = 0
        """The node, by its place in the attempt, whose log is read next for failed look-ups."""

    @property
    def attempt(self) -> AttemptDir:
        """The directory of the attempt."""
        return self.running.attempt

    # --- the core -----------------------------------------------------------------------------------------------

    def tell(self, event: CoreEvent) -> None:
        """Report an event to the core, and do what follows from it."""
        events = deque([event])
        while events:
            _, actions = step(self.state, events.popleft())
            for action in actions:
                events.extend(self._carry_out(action))

    def _carry_out(self, action: CoreAction) -> Iterable[CoreEvent]:
        """Do what the core asks for; return what came of it."""
        match action:
            case Record():
                self.job.record(action.event)
            case GiveUp():
                self.given_up = action
            case LookForPreemption():
                self.signalled = True
            case AskAbout() if self.agents is not None:
                self.agents.ask_about(action)
            case LookForCancel():
                if (fault := cancelled(self.attempt)) is not None:
                    yield StepCancelled(fault)
            case ReadEnd():
                end = read_json(self.attempt.rank_end(action.rank))
                yield EndRead(action.rank, end, action.gone_s, time.monotonic())
            case ExamineHang():
                yield examine_hang(self.attempt, self.state, self.agents)
            case DumpStacks():
                self.dump_stacks()
            case KillRanks():
                reason = kill_ranks(action.ranks, self.state, self.agents)
                yield RanksKilled(action.ranks, reason, time.monotonic())
            case AskForHelper() if self._helpers is not None:
                yield from self._helpers.ask(action)
            case DismissHelper() if self._helpers is not None:
                self._helpers.dismiss(action.helper, action.reason)
            case EndRanks() if self.agents is not None:
                end_ranks(action.ranks, self.agents)
            case Exclude():
                self.job.exclude(action.nodes, action.reason, action.attempt, is_private=action.is_private)
            case ForgetReplaced():
                self._forget(action)
            case ReadLastWords():
                yield FaultsFound(tuple(self._last_words(action)))
            case _ if self.running.memory is not None:
                yield from self.running.memory.carry_out(action)

    def _forget(self, action: ForgetReplaced) -> None:
        """Forget what was recorded of the former processes of ranks, and heard of nodes that died."""
        self.running = replace(self.running, nodes=self.state.nodes)
        for rank, member in action.members.items():
            forget_former_end(self.attempt, rank, member)
        if self.agents is not None and action.dead:
            self.agents.liveness.forget(action.dead)

    def dump_stacks(self) -> None:
        """Have every rank that is left write the stacks of its threads to its log, before anything is ended."""
        if (dumped := dump_stacks(self.state, self.agents)) is not None:
            self.job.record(dumped)

    def _last_words(self, action: ReadLastWords) -> Iterable[Fault]:
        """Yield what ranks recorded and logged; what has no time gets the time at which they ended."""
        for fault in faults_of_failure(self.attempt, action.failure, self.state.rank_nodes, Signatures.load()):
            if action.ago_s and fault.line == GONE:
                fault = replace(fault, time=fault.time - action.ago_s, source="agent")
            yield fault

    def _tell_stop(self) -> None:
        if (state := self.job.stop.state()) != self.state.stop:
            self.tell(StopChanged(state))

    def _tell_progress(self) -> None:
        step_at = last_step_at(self.job.run.metrics, self.attempt.number)
        self.tell(ProgressRead(committed_step(self.job.run, self.job.spec), step_at))

    # --- what is noticed ----------------------------------------------------------------------------------------

    def note(self, faults: Iterable[Fault]) -> None:
        """Report faults that were found outside of the core."""
        self.tell(FaultsFound(tuple(faults)))

    def resume(self) -> None:
        """Take over what an earlier supervisor has noticed and recorded."""
        kinds = (
            FaultDetected, RanksEnded, StepKilled, StopAsked, RecoveredInMemory, RanksExpelled, RanksJoined,
            RanksMoved,
        )  # fmt: skip
        events = select(read_jsonl(self.job.run.events), *kinds)
        recorded = tuple(event for event in events if event.row.get("attempt") == self.attempt.number)
        in_log, ends = tuple(task_failures(read_step_log(self.attempt))), {}
        if any(failure.exit_code == Exit.INTERRUPTED for failure in in_log):
            ends = {int(end["rank"]): end for end in rank_ends(self.attempt)}
        self._tell_stop()
        self.tell(Resumed(recorded, in_log, ends, time.monotonic(), time.time()))
        memory = self.running.memory
        if memory is not None and memory.resumed is not None:
            self.tell(memory.resumed)
        for event in self._helpers.begin_attempt() if self._helpers is not None else ():
            self.tell(event)

    def tell_pause(self) -> None:
        """Report a time in which this process was stopped, before what came after it: that must not be excused."""
        now = time.monotonic()
        if (paused_s := self._pauses.new_s()) > 0:
            self.tell(Paused(paused_s, now))

    def look(self, broken: str) -> GiveUp | None:
        """Report everything new, and that time has passed; return why the attempt must be ended now, if it must.

        Args:
            broken: why the attempt cannot continue by what the shell sees itself; empty if it can.
        """
        self._tell_stop()
        self.tell_pause()
        log = self._collect_ends()
        self._find_failed_lookups()
        if self.state.memory is not None and self.running.memory is not None:
            for event in self.running.memory.events(self.state.memory.members):
                self.tell(event)
        for event in (*(self._helpers.events() if self._helpers else ()), *self._requests.events()):
            self.tell(event)
        self.given_up = None
        self.collect_from_nodes(log=log, broken=broken)
        return self.given_up

    def _collect_ends(self) -> str:
        """Take the ends that srun has reported; return what it has printed."""
        log = read_step_log(self.attempt)
        for failure in task_failures(log)[self.state.ends_taken :]:
            self.tell_end(failure)
        return log

    def collect_last(self) -> None:
        """Take everything new of an attempt that has ended by itself."""
        self._tell_stop()
        self.tell_pause()
        self.collect_from_nodes(over=True, log=self._collect_ends())

    def tell_end(self, failure: TaskFailure) -> None:
        """Report the bad end of tasks of the step."""
        of_ranks = self.state.of_ranks(failure)
        ranks = of_ranks.ranks if of_ranks is not None and of_ranks.exit_code == Exit.INTERRUPTED else ()
        ends = {rank: end for rank in ranks if (end := read_json(self.attempt.rank_end(rank)))}
        self.tell(RanksFailed(failure, ends, time.monotonic()))

    def collect_from_nodes(self, *, over: bool = False, log: str | None = None, broken: str = "") -> None:
        """Take what the agents report, and nodes that Slurm has given up; see `Tick` for the others."""
        failed = failed_nodes(read_step_log(self.attempt) if log is None else log)
        news = self.agents.news() if self.agents is not None else ()
        # In this order a pause is told before what came after it, and before the time that has passed with it.
        monotonic, wall = time.monotonic(), time.time()
        self.tell_pause()
        for event in news:
            self.tell(event)
            if isinstance(event, ReportReceived):
                self._rank_times.feed(event.report)
        self._rank_times.write_if_due(self.state.rank_nodes, time.monotonic())
        if self.state.needs_progress(time.monotonic()):
            self._tell_progress()
        self.tell(Tick(monotonic, wall, failed_nodes=tuple(failed), over=over, broken=broken))

    def _find_failed_lookups(self) -> None:
        """Before the first step, find the nodes on which torch tries to resolve a name.

        Of each node one rank's log is read, and of many nodes some at a time.
        """
        if self.state.detector.step >= 0 or time.monotonic() < self._lookups_at:
            return
        self._lookups_at = time.monotonic() + _LOOKUPS_EVERY_S
        ranks: dict[str, int] = {}
        for rank, node in enumerate(self.state.rank_nodes):
            ranks.setdefault(node, rank)
        nodes = list(ranks)
        chosen, self._next_log = nodes[self._next_log :][:_MOST_LOGS], self._next_log + _MOST_LOGS
        if self._next_log >= len(nodes):
            self._next_log = 0
        for node in chosen:
            failed = failed_lookups(tail(self.attempt.rank_log(ranks[node]), _LOOKUP_BYTES).splitlines())
            if failed is not None:
                self.tell(LookupsFailed(node, failed))

    def find_cancel(self) -> None:
        """Find out whether the step was cancelled, unless the supervisor ended it itself."""
        self._tell_stop()
        if may_be_cancelled(self.state) and (fault := cancelled(self.attempt)) is not None:
            self.tell(StepCancelled(fault))

    def close(self) -> None:
        """End what belongs to the attempt; its ranks are gone."""
        self._requests.close()
        if self.running.memory is not None:
            self.running.memory.close()

    def note_late(self, outcome: AttemptOutcome) -> None:
        """Note what the ranks' records and srun's messages show only after the end of the attempt."""
        state = self.state
        self.note(late_faults(self.attempt, state.faults, state.rank_nodes, Signatures.load()))
        self._tell_stop()
        self._tell_progress()
        if looks_at_step_log(state, time.time(), outcome):
            self.note(faults_in_step_log(self.attempt))
        if looks_at_disk(outcome):
            self.note(full_disk(self.job.run.path, state.faults))

    def note_early_exits(self) -> bool:
        """Find ranks that exited with 0 before the end of the run and recorded nothing; returns whether there are.

        Their records may be a moment late: an NFS client asks for a directory again only now and then.
        """
        process, began = self.running.process, time.monotonic()
        in_order = process.poll() is not None and process.left_exit_code
        if not may_have_early_exits(self.state, in_order=in_order):
            return False
        code = process.poll() or 0
        while True:
            if code == 0 and committed_step(self.job.run, self.job.spec) >= self.job.spec.total_steps:
                return False
            ends, log = rank_ends(self.attempt), read_step_log(self.attempt)
            dead, last = self.state.dead_nodes, self._last_step(ends)
            faults = early_exits(code, log, ends, self.state.rank_nodes, dead=dead, step=last, now=time.time())
            if not awaits_records(faults, time.monotonic() - began):
                break
            time.sleep(self.job.spec.aegis.poll_s)
        self.note(faults)
        return bool(faults)

    def _last_step(self, ends: Iterable[Mapping[str, Any]]) -> int | None:
        """Return the last step that the attempt is known to have finished: its ranks finish a step together."""
        newest = newest_rows(self.job.run.metrics).step
        steps = [self.state.detector.step, *(int(end.get("step", -1)) for end in ends)]
        if newest.get("attempt") == self.attempt.number:
            steps.append(int(newest["step"]))
        return max(steps) if max(steps) >= 0 else None


def read_step_log(attempt: AttemptDir) -> str:
    """Return what srun has printed so far; nothing while the file system does not answer."""
    try:
        return attempt.step_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
