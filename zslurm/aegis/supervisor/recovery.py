"""What follows an attempt that did not complete: decide, record the decision, and carry it out.

The policy decides what a fault means and what to do about it (aegis/core/policy/policy.py). Here it gets what it
needs to know, a GPU is tested or a spare is checked where it asks for one, and what it decides is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from zslurm.aegis.core.policy.outcome import AttemptOutcome, Cause
from zslurm.aegis.core.policy.policy import SLURM_REQUEUES, decide
from zslurm.aegis.fault_kinds import CONFIG_ERROR, GPU_TEST_FAILED
from zslurm.aegis.notify.recorder import Recorder
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.fault_collector import FaultCollector
from zslurm.aegis.supervisor.gpu_test import try_gpu
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.aegis.supervisor.requeue import requeue_job
from zslurm.aegis.supervisor.spare_checks import CHECK_S, unfit_spares
from zslurm.aegis.supervisor.work_left import committed_step, work_left
from zslurm.aegis.types import AttemptSummary, Decision, Fault, Resources, WorkLeft
from zslurm.core.errors import Exit, ZslurmError
from zslurm.run.events import (
    AttemptEnded,
    AttemptStarted,
    Decided,
    ExclusionFailed,
    GpuTested,
    Requeued,
    RequeueFailed,
    StopAsked,
)
from zslurm.run.events.event import only_known, select
from zslurm.run.exclusions import active_exclusions
from zslurm.run.state.state_events import IN_PLACE
from zslurm.slurm.hostlist import compress, expand
from zslurm.train.jsonl import read_jsonl

_AGAIN_S = 5.0
"""Seconds between two questions whether Slurm preempts the job."""

_MOST_REQUEUES = 3
"""Requeues in a row without a start of ranks, to leave excluded nodes; then the ranks start on them."""

_NARROWING_FLAGS = frozenset("reservation nodefile switches contiguous gres tmp mincpus".split())
"""Options of sbatch (`slurm.flags`) with which a job may not use every node of its partition."""

_LOOK_S = 0.2
"""Seconds between two looks whether the agents of spares have started."""


class Recovery:
    """Decides what follows each attempt in one start of the job, and carries it out."""

    def __init__(self, job: Job, nodes: Nodes, agents: Agents | None, recorder: Recorder) -> None:
        """Nothing has failed yet."""
        self.job, self.nodes, self.agents, self.recorder = job, nodes, agents, recorder
        self.settings = job.spec.aegis
        self.failed: AttemptOutcome | None = None
        """The failed attempt from which the run recovers; None where the one before ended in order."""

    def after(
        self, collected: FaultCollector, outcome: AttemptOutcome, *, overdue: bool
    ) -> tuple[AttemptOutcome | None, tuple[str, ...]]:
        """Decide what follows an attempt, and do it.

        Args:
            collected: the attempt and its faults.
            outcome: how it ended.
            overdue: its ranks did not save and stop in time when asked to.

        Returns:
            How the run ends in this job, or the nodes on which to start again.
        """
        decision, resources = self._decide(collected, outcome)
        if not overdue:
            outcome = _with_root(outcome, decision.root)
        self.job.record(AttemptEnded(attempt=collected.attempt.number, **outcome.fields()))
        self._record(decision, resources, collected.summary())
        return self.carry_out(decision, outcome)

    def _decide(self, collected: FaultCollector, outcome: AttemptOutcome) -> tuple[Decision, Resources]:
        """Return what the policy decides, once the nodes and GPUs that it names were tested."""
        settings, acts, running = self.settings, self.settings.mode == "act", collected.running
        tested: set[tuple[str, str]] = set()
        while True:
            history = self.job.history()
            attempt_state = collected.summary(outcome)
            excluded = set(active_exclusions(history.exclusions, attempt_state.now))
            # A job that excludes nodes must not ask for more than are left.
            look = bool(excluded) or any(f.role == "root" and f.scope != "user" for f in attempt_state.faults)
            work = self._work_left(attempt_state.committed_step) if look else None
            resources = self.nodes.resources(excluded, running.nodes, look_elsewhere=look, work=work)
            decision = decide(attempt_state, history, resources, settings)
            if acts and decision.test_gpu is not None and decision.test_gpu not in tested:
                tested.add(decision.test_gpu)
                if self._gpu_fails(decision, collected):
                    continue
            fresh = [node for node in decision.nodes if node not in running.nodes]
            broken = self._unfit(fresh) if acts else {}
            if not broken:
                return decision, resources
            for node, reason in broken.items():
                self.job.exclude([node], f"spare {node} is not fit: {reason}", running.attempt.number)

    def _work_left(self, committed: int) -> WorkLeft | None:
        """Return what is left to train after a checkpoint, where the run may continue with fewer nodes."""
        if self.settings.min_nodes is None or not self.job.on_slurm:
            return None
        return work_left(self.job.run, self.job.spec, committed, self.nodes.job_left_s())

    def _gpu_fails(self, decision: Decision, collected: FaultCollector) -> bool:
        """Test a GPU from which NaN came again and again; where it computes wrongly, that is one more fault."""
        assert decision.test_gpu is not None
        node, gpu = decision.test_gpu
        if decision.root is not None and decision.root.gpu is None:  # then it is the rank that is named
            gpu = str(int(gpu) % self.job.spec.ranks_per_node)
        tested = try_gpu(node, gpu, self.job.slurm_id, self.job.spec, self.job.environ)
        self.job.record(GpuTested(node=node, gpu=gpu, ok=tested.ok, reason=tested.reason, device=tested.device))
        if tested.ok is not False:
            return False
        line = f"{tested.device or f'GPU {gpu}'}: {tested.reason or 'it computes wrongly'}"
        collected.note([Fault.of_kind(GPU_TEST_FAILED, time.time(), "gpu_test", line, node=node, gpu=gpu)])
        return True

    def _record(self, decision: Decision, resources: Resources, attempt_state: AttemptSummary) -> None:
        decided = Decided(
            attempt=attempt_state.attempt,
            mode=self.settings.mode,
            committed_step=attempt_state.committed_step,
            action=decision.action,
            reason=decision.reason,
            root=None if decision.root is None else decision.root.fields(),
            exclude=list(decision.exclude) or None,
            nodes=list(decision.nodes) or None,
            n_nodes=decision.n_nodes,
            test_gpu=None if decision.test_gpu is None else list(decision.test_gpu),
            wait_s=decision.wait_s,
            step_time_ratio=decision.step_time_ratio,
            expected_wait_s=decision.expected_wait_s,
            attempt_state=attempt_state.fields(),
            resources=resources.fields(),
        )
        self.job.record(only_known(decided))
        if decision.exclude and self.settings.mode == "act":
            self.job.exclude(decision.exclude, decision.reason, attempt_state.attempt)

    def carry_out(
        self, decision: Decision, outcome: AttemptOutcome
    ) -> tuple[AttemptOutcome | None, tuple[str, ...]]:
        """Do what was decided; return how the run ends in this job, or the nodes on which to start again."""
        if decision.action == "finish" and decision.reason == SLURM_REQUEUES and outcome.outcome != "completed":
            return replace(outcome, outcome="interrupted", exit_code=Exit.INTERRUPTED), ()
        if decision.action == "finish" or self.settings.mode != "act":
            return outcome, ()
        stop = self.job.stop
        if stop.comes_back and decision.action in IN_PLACE:  # the request came after the decision to start again
            return self.asked_between(outcome), ()
        if decision.action == "stop":
            # A wrong configuration has its own exit code.
            is_config = decision.root is not None and decision.root.kind == CONFIG_ERROR
            code = outcome.exit_code if is_config else Exit.STOPPED
            return replace(outcome, outcome="failed", exit_code=code), ()
        if stop.asked and not (stop.comes_back and decision.action == "requeue"):
            return self._interrupted(outcome), ()  # a job that was cancelled must not come back
        if decision.action == "requeue":
            return self._requeue(decision, outcome), ()
        self.failed = outcome
        self.job.pause(decision.wait_s or 0.0)
        return None, decision.nodes

    def _interrupted(self, failed: AttemptOutcome | None) -> AttemptOutcome:
        """Return the outcome of a run that is asked to stop while it recovers from a failure."""
        message = f"asked to stop ({self.job.stop.asked_by})"
        if failed is None or failed.outcome not in ("failed", "lost"):
            return AttemptOutcome("interrupted", Exit.INTERRUPTED, failed.cause if failed else None)
        why = f": {failed.cause.message}" if failed.cause else ""
        return AttemptOutcome(
            "interrupted", Exit.INTERRUPTED, Cause(f"{message} while it recovered from a failure{why}")
        )

    def asked_between(self, outcome: AttemptOutcome | None = None) -> AttemptOutcome:
        """Return how the run ends in this job where it is asked to stop while no ranks run.

        Args:
            outcome: how the attempt ended that has just ended; None where what follows it is decided.
        """
        job, settings = self.job, self.settings
        if job.stop.name is not None:
            job.record(StopAsked(signal=job.stop.name))
        job.look_for_preemption()
        outcome = self._interrupted(outcome or self.failed)
        if settings.mode == "off":
            return outcome
        attempts, history, now = job.run.attempt_dirs(), job.history(), time.time()
        number, step = (attempts[-1].number if attempts else 0), committed_step(job.run, job.spec)
        attempt_state = AttemptSummary(
            now, number, "interrupted", (), step, job.stop.name, job.stop.requeued, preempted=job.stop.preempted
        )
        excluded = set(active_exclusions(history.exclusions, now))
        resources = self.nodes.resources(excluded, (), look_elsewhere=bool(excluded))
        decision = decide(attempt_state, history, resources, settings)
        if decision.action == "finish":
            return outcome
        self._record(decision, resources, attempt_state)
        return self.carry_out(decision, outcome)[0] or outcome

    def leave_to_slurm(self) -> None:
        """Wait until Slurm itself requeues the job that it preempts.

        That is at the end of the grace time; a job that ended before would not come back.
        """
        stop = self.job.stop
        while stop.preempted == "requeue" and stop.signum is None and not stop.requeued:
            until = time.monotonic() + _AGAIN_S
            while stop.signum is None and time.monotonic() < until:
                time.sleep(min(self.settings.poll_s, _AGAIN_S))
            self.job.look_for_preemption()

    def _requeue(self, decision: Decision, outcome: AttemptOutcome) -> AttemptOutcome:
        """Put the job back into the queue. Slurm ends this process soon after."""
        try:
            self._put_back(decision)
        except ZslurmError as error:
            self.job.record(RequeueFailed(excluded=compress(decision.exclude), reason=str(error)))
            if self.job.stop.preempted == "requeue":
                self.leave_to_slurm()
                return AttemptOutcome("interrupted", Exit.INTERRUPTED, outcome.cause)
            message = outcome.cause.message if outcome.cause else decision.reason
            cause = replace(outcome.cause or Cause(""), message=f"{message}; the job cannot be requeued: {error}")
            return AttemptOutcome("failed", Exit.STOPPED, cause)
        return AttemptOutcome("interrupted", Exit.INTERRUPTED, outcome.cause)

    def _put_back(self, decision: Decision) -> None:
        """Requeue the job, and record what it excludes from now on.

        Raises:
            ZslurmError: Slurm refused.
        """
        history, now = self.job.history(), time.time()
        active = active_exclusions(history.exclusions, now)
        expired = set(history.exclusions) - set(active)
        excluded = {*active, *decision.exclude}.difference(expand(self.job.spec.slurm.nodelist or ""))
        self.recorder.flush()
        recorded = False

        def record(nodes: str) -> None:
            nonlocal recorded
            if not recorded:
                self.job.record(Requeued(excluded=nodes, reason=decision.reason))
            recorded = True

        done = requeue_job(
            self.job, decision, excluded=excluded, expired=expired, dead=self.nodes.dead,
            on_requeued=lambda: record(compress(excluded)),
        )  # fmt: skip
        if done is None:
            return
        record(done.excluded)
        if done.problem:
            self.job.record(ExclusionFailed(nodes=compress(excluded), reason=done.problem))

    def leave_excluded(self, nodes: Sequence[str]) -> AttemptOutcome | None:
        """Requeue a job whose ranks would start on excluded nodes; None if they are to start here.

        Slurm did not take the exclusion, for example while it ended the job on a dead node, or the run was
        submitted again. The nodes are used if the job could not start elsewhere, or was requeued
        several times in vain.
        """
        excluded = self.job.excluded()
        unwanted = set(nodes).intersection(excluded).difference(expand(self.job.spec.slurm.nodelist or ""))
        if not unwanted or self.settings.mode != "act" or not self.job.on_slurm or not self.nodes.can_requeue:
            return None
        if self._is_narrowed():
            return None
        others = self.nodes.elsewhere(excluded)
        if others is None or others < len(self.nodes.every) or self._requeued_in_vain() >= _MOST_REQUEUES:
            return None
        cause = Cause(f"Slurm started the job on {compress(unwanted)}, which the run excludes")
        try:
            self._put_back(Decision("requeue", f"{cause.message}; requeue", exclude=tuple(sorted(unwanted))))
        except ZslurmError as error:
            self.job.record(ExclusionFailed(nodes=compress(unwanted), reason=str(error)))
            return None
        return AttemptOutcome("interrupted", Exit.INTERRUPTED, cause)

    def _is_narrowed(self) -> bool:
        """Return whether the job may use only some nodes of its partition; how many is not known here."""
        slurm = self.job.spec.slurm
        return bool(slurm.constraint or slurm.nodelist or _NARROWING_FLAGS.intersection(slurm.flags))

    def _requeued_in_vain(self) -> int:
        """Return how often the job was requeued since ranks last started."""
        count = 0
        for event in select(read_jsonl(self.job.run.events), AttemptStarted, Requeued):
            count = count + 1 if isinstance(event, Requeued) else 0
        return count

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
        deadline = time.monotonic() + CHECK_S
        while agents.liveness.never_heard(nodes) and time.monotonic() < deadline and not agents.over:
            time.sleep(_LOOK_S)
        self._unfit(nodes)

    def _unfit(self, nodes: Sequence[str]) -> dict[str, str]:
        """Check spares before they replace nodes; without agents nothing is known, and every node is fit."""
        return {} if self.agents is None else unfit_spares(self.job, self.agents, nodes)


def _with_root(outcome: AttemptOutcome, root: Fault | None) -> AttemptOutcome:
    """Return the outcome with the policy's root as its cause, unless it names that rank already."""
    cause = outcome.cause
    if root is None or (cause is not None and cause.rank is not None and cause.rank == root.rank):
        return outcome
    code = cause.exit_code if cause is not None else None
    return replace(outcome, cause=Cause(root.line, root.rank, root.node, code, root.step))
