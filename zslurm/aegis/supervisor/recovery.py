"""Carries out what follows an attempt that did not complete, as the core decides it (core/following.py).

The core asks for what it needs to know: the run's history, the nodes, the test of a GPU or of a spare.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.ending import awaits_slurm, gives_up_slurm
from zslurm.aegis.core.following import (
    AttemptOver,
    CheckSpares,
    CountNodes,
    DecisionFound,
    EndRun,
    FindNodes,
    FollowAction,
    FollowEvent,
    FollowState,
    GpuTestEnded,
    LeaveToSlurm,
    NodesCounted,
    NodesFound,
    NodesOffered,
    ReadRun,
    Requeue,
    RequeueTried,
    RunRead,
    SparesExamined,
    StartAgain,
    StartHere,
    StopBetween,
    TestGpu,
    follow,
)
from zslurm.aegis.core.messages import NO_ANSWER, Exclude, LookForPreemption, ProgressRead, Record
from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.core.policy.policy import most_excluded
from zslurm.aegis.core.starting import HELD_S, PendingDecision, decided_requeue, nodes_to_skip
from zslurm.aegis.notify.recorder import Recorder
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.gpu_test import try_gpu
from zslurm.aegis.supervisor.helper_jobs import HelperJobs
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.aegis.supervisor.requeue import requeue_job
from zslurm.aegis.supervisor.spare_checks import CHECK_S, unfit_spares
from zslurm.aegis.supervisor.work_left import committed_step, work_left
from zslurm.aegis.types import Resources
from zslurm.core.errors import ZslurmError
from zslurm.run.events import (
    AttemptEnded,
    AttemptStarted,
    Decided,
    ExclusionFailed,
    GpuTested,
    Requeued,
    WaitGivenUp,
)
from zslurm.run.events.event import select
from zslurm.run.exclusions import excluded_by_run
from zslurm.run.metrics.tail import last_step_at
from zslurm.slurm.hostlist import compress, expand
from zslurm.train.jsonl import read_jsonl

_AGAIN_S = 5.0
"""Seconds between two questions whether Slurm preempts the job."""

_NARROWING_FLAGS = frozenset("reservation nodefile switches contiguous gres tmp mincpus".split())
"""Options of sbatch (`slurm.flags`) with which a job may not use every node of its partition."""

HELD_CHECK_S = 20.0
"""Seconds that agents get to start, and to look for GPU memory that is held, before the first ranks start."""

_LOOK_S = 0.2
"""Seconds between two looks whether the agents of spares have started."""


class Recovery:
    """Carries out what follows each attempt in one start of the job."""

    def __init__(
        self,
        job: Job,
        nodes: Nodes,
        agents: Agents | None,
        recorder: Recorder,
        helpers: HelperJobs | None = None,
    ) -> None:
        """Prepare; no attempt has ended yet. The helper jobs are ended before the job is put back."""
        self._helpers = helpers
        self.job, self.nodes, self.agents, self.recorder = job, nodes, agents, recorder
        self.settings = job.spec.aegis
        required = frozenset(expand(job.spec.slurm.nodelist or ""))
        unwanted = frozenset(expand(job.spec.slurm.exclude or ""))
        self._state = FollowState(job.spec.aegis, job.spec.ranks_per_node, required, unwanted)

    def after(
        self, attempt: AttemptState, outcome: AttemptOutcome, *, overdue: bool
    ) -> tuple[AttemptOutcome | None, tuple[str, ...]]:
        """Decide what follows an attempt, and do it.

        Args:
            attempt: its state.
            outcome: how it ended.
            overdue: its ranks did not save and stop in time when asked to.

        Returns:
            How the run ends in this job, or the nodes on which to start again.
        """
        return self._tell(AttemptOver(attempt, outcome, overdue))

    def carry_out(self, found: PendingDecision) -> tuple[AttemptOutcome | None, tuple[str, ...]]:
        """Do what an earlier supervisor has decided after an attempt; returns what `after` does."""
        return self._tell(DecisionFound(found.decision, found.outcome, found.attempt))

    def asked_between(self) -> AttemptOutcome:
        """Return how the run ends in this job if it is asked to stop while no ranks run."""
        kinds = (AttemptStarted, AttemptEnded, Requeued, Decided)
        events = list(select(read_jsonl(self.job.run.events), *kinds))
        outcome, _ = self._tell(StopBetween(decided_requeue(events, self.job.job_id)))
        assert outcome is not None  # no ranks start
        return outcome

    def leave_excluded(self, nodes: Sequence[str]) -> AttemptOutcome | None:
        """Requeue a job whose ranks would start on excluded nodes; None if they are to start here."""
        self.job.follow_group()
        can_leave = self.job.on_slurm and self.nodes.can_requeue and not self._is_narrowed()
        excluded, requeues = frozenset(self.job.excluded()), self._requeued_in_vain()
        return self._tell(NodesOffered(tuple(nodes), excluded, can_leave, len(self.nodes.every), requeues))[0]

    def _tell(self, event: FollowEvent) -> tuple[AttemptOutcome | None, tuple[str, ...]]:
        """Report an event to the core, and do what follows from it until the run ends here, or ranks start."""
        events: deque[FollowEvent] = deque([event])
        while events:
            self._state.stop = self.job.stop.state()
            for action in follow(self._state, events.popleft()):
                match action:
                    case EndRun():
                        return action.outcome, ()
                    case StartHere():
                        return None, ()
                    case StartAgain():
                        self.job.pause(action.wait_s)
                        return None, action.nodes
                    case _:
                        events.extend(self._carry_out(action))
        raise AssertionError("the core has neither ended the run nor started ranks")

    def _carry_out(self, action: FollowAction) -> Iterable[FollowEvent]:
        """Do what the core asks for; yield what came of it."""
        job = self.job
        match action:
            case Record():
                job.record(action.event)
            case Exclude():
                job.exclude(action.nodes, action.reason, action.attempt)
            case LookForPreemption():
                job.look_for_preemption()
            case LeaveToSlurm():
                self.leave_to_slurm()
            case ReadRun():
                yield self._read_run()
            case FindNodes():
                yield NodesFound(self._find_nodes(action))
            case CountNodes():
                yield NodesCounted(self.nodes.elsewhere(action.excluded))
            case TestGpu():
                tested = try_gpu(action.node, action.gpu, job.slurm_id, job.spec, job.environ)
                event = GpuTested(
                    node=action.node, gpu=action.gpu, ok=tested.ok, reason=tested.reason, device=tested.device
                )
                yield GpuTestEnded(event, time.time())
            case CheckSpares():
                yield SparesExamined(self._unfit(action.nodes))
            case Requeue():
                try:
                    self._put_back(action)
                except ZslurmError as error:
                    if self._helpers is not None:
                        self._helpers.reopen()
                    yield RequeueTried(str(error))
                else:
                    yield RequeueTried()

    def _read_run(self) -> RunRead:
        job, attempts = self.job, self.job.run.attempt_dirs()
        job.follow_group()
        number = attempts[-1].number if attempts else 0
        progress = ProgressRead(committed_step(job.run, job.spec), last_step_at(job.run.metrics, number))
        ends = select(read_jsonl(job.run.events), AttemptEnded)
        is_ended = any(event.attempt == number for event in ends)
        return RunRead(job.history(), progress, number, time.time(), is_ended)

    def _find_nodes(self, action: FindNodes) -> Resources:
        job, work, helper_wait_s = self.job, None, None
        if action.weigh_from is not None and job.on_slurm:
            left_s = self.nodes.job_left_s()
            work = work_left(job.run, job.spec, action.weigh_from, left_s)
            missing = max(1, job.spec.slurm.nodes - len(self.nodes.usable(action.excluded)))
            helper_wait_s = None if self._helpers is None else self._helpers.expected_wait_s(missing, left_s)
        resources = self.nodes.resources(
            action.excluded, action.in_use, look_elsewhere=action.look_elsewhere, work=work
        )
        return replace(resources, helper_wait_s=helper_wait_s)

    def leave_to_slurm(self) -> None:
        """Wait until Slurm itself requeues the job that it preempts.

        That is at the end of the grace time; a job that ended before would not come back.
        """
        stop, began = self.job.stop, time.monotonic()
        ends_at = stop.preemption.ends_at if stop.preemption is not None else None
        grace_s = 0.0 if ends_at is None else ends_at - time.time()
        while awaits_slurm(stop.state()):
            if why := gives_up_slurm(time.monotonic() - began, grace_s):
                self.job.record(WaitGivenUp(reason=why))
                return
            until = time.monotonic() + _AGAIN_S
            while stop.signum is None and time.monotonic() < until:
                time.sleep(min(self.settings.poll_s, _AGAIN_S))
            self.job.look_for_preemption()

    def _put_back(self, action: Requeue) -> None:
        """Requeue the job, and record what it excludes from now on.

        Raises:
            ZslurmError: Slurm refused.
        """
        self.recorder.flush()
        if self._helpers is not None:
            self._helpers.close()
        reason = action.decision.reason
        done = requeue_job(
            self.job, action.decision, excluded=action.excluded, expired=action.expired, dead=self.nodes.dead,
            on_requeued=lambda: self.job.record_requeue(compress(action.excluded), reason),
        )  # fmt: skip
        if done is None:
            return
        self.job.record_requeue(done.excluded, reason)
        if done.problem:
            self.job.record(ExclusionFailed(nodes=compress(action.excluded), reason=done.problem))

    def _is_narrowed(self) -> bool:
        """Return whether the job may use only some nodes of its partition; how many is not known here."""
        slurm = self.job.spec.slurm
        return bool(slurm.constraint or slurm.nodelist or _NARROWING_FLAGS.intersection(slurm.flags))

    def _requeued_in_vain(self) -> int:
        """Return how often the job was requeued since ranks last started, without the requeue of this start."""
        count = 0
        for event in select(read_jsonl(self.job.run.events), AttemptStarted, Requeued):
            if isinstance(event, Requeued):
                count += not self.job.is_left_by(event)
            else:
                count = 0
        return count

    def skip_unfit(self, nodes: Sequence[str]) -> bool:
        """Look at nodes before the first ranks start; return whether some are not used for what was found.

        Those that the run has excluded before are tested as spares are.
        """
        agents, returned = self.agents, self.job.returned().intersection(nodes)
        if agents is None or self.settings.mode != "act":
            return False
        unfit: dict[str, str] = {}
        if returned:
            self._await_agents(agents, sorted(returned), CHECK_S)
            unfit = {node: why for node, why in self._unfit(sorted(returned)).items() if why != NO_ANSWER}
        room = max(0, self._may_exclude() - 1)  # one is left for a fault to come
        unfit = dict(list(unfit.items())[:room])
        for node, why in unfit.items():
            self.job.exclude((node,), f"{node} was excluded before, and is not fit: {why}")
        others = [node for node in nodes if node not in unfit]
        return self._skip_held(agents, others) or bool(unfit)

    def _skip_held(self, agents: Agents, nodes: Sequence[str]) -> bool:
        """Look for GPU memory that a former job's processes hold; return whether nodes are not used for that.

        A node whose agent does not answer in time is used: nothing is known of it.
        """
        job = self.job
        is_alone = job.spec.needs_rails_alone or "exclusive" in job.spec.slurm.flags
        if not (job.on_slurm and is_alone and job.spec.cluster.gpus_per_node and nodes):
            return False  # on a node that is shared, the memory may be in use by another job
        self._await_agents(agents, nodes, HELD_CHECK_S)
        answers = agents.ask("gpus_idle", sorted(nodes), timeout_s=HELD_CHECK_S)
        held = {node: answer.why for node, answer in sorted(answers.items()) if not answer.ok}
        skipped = nodes_to_skip(held, len(nodes), self.nodes.needed, self._may_exclude())
        for node, why in skipped.items():
            job.exclude((node,), f"it is not free: {why}", for_s=HELD_S)
        return bool(skipped)

    def _may_exclude(self) -> int:
        """Return how many nodes the run may still exclude."""
        excluded = excluded_by_run(self.job.history().exclusions, time.time())
        return most_excluded(self.settings, len(self.nodes.every)) - len(excluded)

    def check_spares(self, nodes: Sequence[str]) -> None:
        """Check the job's spares in a thread, as `_unfit` does when they are used, and record what is wrong.

        None is excluded: what is wrong may be over when a spare is needed.
        """
        if self.agents is not None and nodes and self.settings.mode == "act":
            work = threading.Thread(
                target=self._check_spares, args=(self.agents, nodes), name="spares", daemon=True
            )
            work.start()

    def _check_spares(self, agents: Agents, nodes: Sequence[str]) -> None:
        self._await_agents(agents, nodes, CHECK_S)
        self._unfit(nodes)

    def _await_agents(self, agents: Agents, nodes: Sequence[str], seconds: float) -> None:
        """Wait until the agents of these nodes have reported, at most so long, and not if the run is to stop."""
        deadline = time.monotonic() + seconds
        while agents.liveness.never_heard(nodes) and time.monotonic() < deadline and not agents.over:
            if self.job.stop.asked:
                return
            time.sleep(_LOOK_S)

    def _unfit(self, nodes: Sequence[str]) -> dict[str, str]:
        """Check spares before they replace nodes; without agents nothing is known, and every node is fit."""
        return {} if self.agents is None else unfit_spares(self.job, self.agents, nodes)
