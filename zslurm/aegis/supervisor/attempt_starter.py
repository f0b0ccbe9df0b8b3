"""How an attempt begins: what must be true first, the nodes, the step; or what another supervisor left running."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.aegis.core.adopted_memory import KINDS as MEMORY_KINDS
from zslurm.aegis.core.attempt import MemoryState
from zslurm.aegis.core.policy.outcome import AttemptOutcome, Cause
from zslurm.aegis.core.policy.shrinking import FewerNodes, Weighed, expected_wait_s, weigh, why_not_fewer
from zslurm.aegis.core.starting import (
    PendingDecision,
    died_by_attempt,
    nodes_to_start_on,
    pending_decision,
    prefer_others,
    why_lost,
)
from zslurm.aegis.supervisor.helper_jobs import HelperOf, HelperWait
from zslurm.aegis.supervisor.in_memory.memory_shell import MemoryShell
from zslurm.aegis.supervisor.in_memory.warm_pool import WarmPool
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.aegis.supervisor.rails_check import check_rails
from zslurm.aegis.supervisor.warm_programs import WarmPrograms
from zslurm.aegis.supervisor.work_left import committed_step, work_left
from zslurm.checkpoint_tools import CheckpointError, Holder, acquire, holder_of
from zslurm.core.errors import ZslurmError
from zslurm.core.files import read_json, write_atomically
from zslurm.core.processes import DetachedProcess
from zslurm.job.in_memory.store_client import StoreClient
from zslurm.job.in_memory.warm_step import outliving
from zslurm.job.own_address import rendezvous_host
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.preparation.prepare import prepare, prepared
from zslurm.job.step import in_order, local_step, slurm_step
from zslurm.run.events import (
    AttemptEnded,
    AttemptStarted,
    Decided,
    DeputyActed,
    ExcludedNodesUsed,
    LockTakenOver,
    RanksMoved,
    RecoveredInMemory,
    RecoveryUnavailable,
    RequeuedByUser,
)
from zslurm.run.events.event import Event, select
from zslurm.run.metrics.tail import last_step_at
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.topology import hostlist_in_order
from zslurm.train.jsonl import read_jsonl
from zslurm.train.schedule import check_ranks


@dataclass(frozen=True)
class RunningAttempt:
    """An attempt whose step was started.

    Attributes:
        attempt: its directory.
        process: srun, or the local launcher's.
        nodes: its ranks' nodes, in their order.
        adopted: another supervisor has started it.
        memory: its recovery in memory; None if it has none.
        broken: why it must be ended, though its ranks run; empty if they may train on.
    """

    attempt: AttemptDir
    process: DetachedProcess
    nodes: tuple[str, ...]
    adopted: bool = False
    memory: MemoryShell | None = None
    broken: str = ""


def _why_lost(job: Job, last: AttemptDir, events: Sequence[Event]) -> str:
    """Describe what ended an attempt of an earlier start of the job before its supervisor could record its end."""
    described = read_json(last.description) or {}
    by_users = list(select(read_jsonl(job.run.submissions), RequeuedByUser))
    stepped = last_step_at(job.run.metrics, last.number) is not None
    its_job = str(described.get("job_id", "?"))
    return why_lost(
        last.number, [*events, *by_users], its_job="" if its_job == job.job_id else its_job, stepped=stepped
    )


class AttemptStarter:
    """Starts attempts in one start of the job."""

    def __init__(
        self,
        job: Job,
        nodes: Nodes,
        helper_of: HelperOf = dict,
        helper_wait_s: HelperWait = lambda *_: None,
    ) -> None:
        """Prepare; no node was looked at yet. `helper_of` returns the helper job of each node that has one."""
        self._job, self._nodes, self._helper_of, self._helper_wait_s = job, nodes, helper_of, helper_wait_s
        self._python: Interpreter | None = None
        self._store: StoreClient | None = None  # of the last attempt
        self.warm = WarmPrograms(job)

    def blocking_reason(self) -> AttemptOutcome | None:
        """Return what keeps ranks from starting; None if nothing does, or the run is asked to stop.

        The nodes are looked at once.
        """
        job = self._job
        if self._python is not None:
            return None
        self._nodes.dead |= self._nodes.taken_back()
        nodes = self.candidates()
        if job.on_slurm and job.spec.cluster.nics:
            outcome = check_rails(job, nodes)
            if outcome is not None or job.stop.asked:
                return outcome
        try:
            self._python = prepare(job.spec, job.run, job.job_id, nodes, job.environ, job.record)
        except ZslurmError as error:
            return AttemptOutcome("failed", error.exit_code, Cause(str(error)))
        return None

    def first_nodes(self) -> tuple[str, ...]:
        """Return the nodes for the first attempt of a start of the job, spares left over.

        Excluded nodes of the job are used if there are no others, and the job could not start elsewhere
        (`Recovery.leave_excluded`).
        """
        nodes = self.candidates()
        if excluded := set(nodes) & self._job.excluded():
            self._job.record(ExcludedNodesUsed(nodes=compress(excluded)))
        return self._nodes.nearest(prefer_others(nodes, self._job.returned(), self._nodes.needed))

    def candidates(self) -> tuple[str, ...]:
        """Return the nodes on which ranks may be started: without excluded ones, unless too few would be left."""
        usable, every = self._nodes.usable(self._job.excluded()), self._nodes.usable(())
        return nodes_to_start_on(usable, every, self._nodes.needed, self._job.spec.aegis.fewest_nodes)

    def start(self, nodes: tuple[str, ...]) -> RunningAttempt:
        """Begin the next attempt on these nodes. Call `blocking_reason` first.

        Raises:
            OSError: the run directory cannot be written.
        """
        job = self._job
        assert self._python is not None
        attempts = job.run.attempt_dirs()
        attempt = job.run.attempt(attempts[-1].number + 1 if attempts else 1)
        attempt.path.parent.mkdir(exist_ok=True)
        attempt.path.mkdir()  # without parents: a run directory that was moved must not come back in part
        try:
            running = self._begin(attempt, nodes, self._python)
        except OSError:  # no rank runs
            shutil.rmtree(attempt.path, ignore_errors=True)  # the next try gets the same number
            raise
        hosts, world_size = hostlist_in_order(running.nodes), len(running.nodes) * job.spec.ranks_per_node
        job.record(AttemptStarted(attempt=attempt.number, nodes=hosts, world_size=world_size))
        return running

    def _record_start(self, number: int, described: Mapping[str, Any], events: Sequence[Event]) -> None:
        """Record the start of an attempt whose supervisor died before it could."""
        if not any(isinstance(event, AttemptStarted) and event.attempt == number for event in events):
            nodes, size = str(described.get("nodes", "")), int(described.get("world_size", 0))
            self._job.record(AttemptStarted(attempt=number, nodes=nodes, world_size=size))

    def _begin(self, attempt: AttemptDir, nodes: tuple[str, ...], python: Interpreter) -> RunningAttempt:
        """Describe the attempt, and start its step last.

        Raises:
            OSError: a file cannot be written; the step was not started.
        """
        job = self._job
        attempt.logs.mkdir()
        attempt.ranks.mkdir()
        attempt.flight.mkdir(mode=0o700)
        if not job.on_slurm:
            plan = local_step(job.spec, job.run, attempt, python)
        else:
            plan = slurm_step(job.spec, job.run, attempt, python, nodes)
            nodes = self._nodes.in_rank_order(nodes) if self._nodes.by_leaf else tuple(expand(compress(nodes)))
            if len(nodes) > 1:
                # The order in which srun fills nodes depends on the version and the topology. A fault of a rank
                # must be attributed to its node, so the order is always given.
                plan = in_order(plan, attempt, nodes, job.spec.ranks_per_node)
        memory = self._memory_recovery(attempt, nodes, python)
        if memory is not None:
            plan = outliving(plan, job.spec)
        body = {
            "attempt": attempt.number,
            "job_id": job.job_id,
            "restart": job.restart,
            "nodes": hostlist_in_order(nodes),
            "world_size": len(nodes) * job.spec.ranks_per_node,
            "command": plan.command,
        }
        write_atomically(attempt.description, json.dumps(body, indent=1) + "\n")
        if job.on_slurm and (dead := free_from_dead_job(job.run.checkpoints, job.job_id, SlurmClient())):
            job.record(LockTakenOver(holder=str(dead)))
        try:
            process = plan.start(attempt)
        except OSError:
            if memory is not None:
                memory.close()
            raise
        self.warm.start(python, self._nodes.usable(()))
        return RunningAttempt(attempt, process, nodes, memory=memory)

    def _memory_recovery(
        self, attempt: AttemptDir, nodes: tuple[str, ...], python: Interpreter
    ) -> MemoryShell | None:
        """Start the store server of an attempt; None if no recovery in memory is wanted, or possible."""
        job, aegis = self._job, self._job.spec.aegis
        if not self._wants_memory(len(nodes)):
            return None
        ranks = [node for node in nodes for _ in range(job.spec.ranks_per_node)]
        reason = ""
        if not aegis.recovers_in_memory:
            reason = f"aegis.mode is {aegis.mode}, and lost ranks are replaced only where it is act"
        elif aegis.recovery == "auto" and not job.spec.recovers_in_memory and len(ranks) > 1:
            reason = "it has not been tried on GPUs yet; aegis.recovery: memory allows it"
        elif len(ranks) == 1:
            reason = "a single rank has no other one that could continue"
        elif python.srun_options:
            reason = "the ranks run in a container of pyxis, and this node's Python cannot host their store"
        elif self._store is not None and self._store.never_listened:
            reason = "the store server of the last attempt ended before it listened"
        else:
            try:
                host = rendezvous_host(python.environ) if job.on_slurm else "127.0.0.1"
                self._store = store = StoreClient.start(
                    python.command, host=host, attempt=attempt, environ=python.environ, log=attempt.store_log
                )
            except (OSError, RuntimeError) as error:
                reason = f"the store server cannot be started: {error}"
        if reason:
            job.record(RecoveryUnavailable(attempt=attempt.number, reason=reason))
            return None
        spares = tuple(node for node in self._nodes.usable(job.excluded()) if node not in nodes)
        state = MemoryState.of_start(ranks, job.spec.ranks_per_node, spares)
        return MemoryShell(
            attempt, store, WarmPool(job, attempt, python, self._helper_of), state, ranks, self._why_not_fewer
        )

    def _wants_memory(self, nodes: int) -> bool:
        """Return whether recovery in memory is wanted on a number of nodes, or its absence is to be explained."""
        spec = self._job.spec
        can = spec.aegis.mode == "act" and nodes * spec.ranks_per_node > 1
        return spec.trainer is None and (
            spec.aegis.recovery == "memory" or (spec.aegis.recovery == "auto" and can)
        )

    def _why_not_fewer(self, count: int, in_use: int) -> FewerNodes:
        """Return why ranks on `in_use` nodes must not continue on `count` of them, or that they may."""
        job, spec = self._job, self._job.spec

        def check() -> None:
            check_ranks(spec.phases, count * spec.ranks_per_node, spec.ranks_per_node)

        def weighed() -> Weighed | None:
            needed, left_s = self._nodes.needed, self._nodes.job_left_s()
            helper_s = self._helper_wait_s(spec.slurm.nodes - count, left_s)
            if helper_s is None and not self._nodes.can_requeue:
                return None
            work = work_left(job.run, spec, committed_step(job.run, spec), left_s)
            assert work is not None  # recovery in memory is that of zslurm's own trainer
            wait_s = expected_wait_s(job.history(), spec.aegis) if self._nodes.can_requeue else None
            return weigh(work, count, needed, in_use, wait_s, helper_s)

        return why_not_fewer(count, spec.aegis, check, weighed)

    def left_over(self) -> RunningAttempt | PendingDecision | None:
        """Find the last state of an earlier supervisor of this start of the job; its dead nodes stay dead.

        Returns:
            The attempt that runs, or ended unseen; or what was decided after it, and perhaps not done; or None.
        """
        attempts = self._job.run.attempt_dirs()
        if not attempts:
            return None
        last = attempts[-1]
        kinds: set[type[Event]] = {AttemptStarted, AttemptEnded, Decided, DeputyActed, *MEMORY_KINDS}
        events: list[Event] = list(select(read_jsonl(self._job.run.events), *kinds))
        self._nodes.dead |= self._died(events)
        ended = [e for e in events if isinstance(e, AttemptEnded) and e.attempt == last.number]
        if (described := self._of_this_start(last)) is not None:
            decided = [e for e in events if isinstance(e, Decided) and e.attempt == last.number]
            if (pending := pending_decision(decided, ended, last.number)) is not None:
                return pending
            process = DetachedProcess.adopt(last.step_process, last.step_exit)
            if process is not None:
                self._record_start(last.number, described, events)
                replaced = [e for e in events if isinstance(e, RecoveredInMemory | RanksMoved)]
                moved = [e for e in replaced if e.attempt == last.number]
                nodes = moved[-1].nodes if moved and moved[-1].nodes else described.get("nodes", "")
                memory, broken = self._adopt_memory(last, expand(str(described.get("nodes", ""))), events)
                in_use = tuple(expand(str(nodes))) if memory is None else tuple(dict.fromkeys(memory.rank_nodes))
                return RunningAttempt(last, process, in_use, adopted=True, memory=memory, broken=broken)
        if not ended:
            cause = Cause(_why_lost(self._job, last, events))
            self._job.record(AttemptEnded(attempt=last.number, **AttemptOutcome("lost", 1, cause).fields()))
        return None

    def _adopt_memory(
        self, attempt: AttemptDir, nodes: Sequence[str], events: Sequence[Event]
    ) -> tuple[MemoryShell | None, str]:
        """Take the recovery in memory of an attempt over.

        Returns:
            It, or None if there is none; why the attempt must be ended, if its store is gone.
        """
        job = self._job
        without = (event.attempt for event in events if isinstance(event, RecoveryUnavailable))
        can = job.spec.aegis.recovers_in_memory and self._wants_memory(len(nodes))
        if not can or attempt.number in without:
            return None, ""
        python = prepared(job.spec, job.run, job.job_id, job.environ)
        try:
            usable, warm = self._nodes.usable(job.excluded()), WarmPool(job, attempt, python, self._helper_of)
            memory = MemoryShell.adopt(job, attempt, nodes, events, warm, usable, self._why_not_fewer)
        except ZslurmError as error:
            reason = f"the supervisor that started the attempt is gone, and {error}"
            job.record(RecoveryUnavailable(attempt=attempt.number, reason=reason))
            return None, f"{reason}; without it ranks can neither save nor be recovered in memory"
        self._store = memory.store
        return memory, ""

    def _died(self, events: Sequence[Event]) -> set[str]:
        """Return nodes that died in any attempt of this start of the job: Slurm does not give them back to it."""
        by_attempt = died_by_attempt(events).items()
        own_deaths = [nodes for number, nodes in by_attempt if self._of_this_start(self._job.run.attempt(number))]
        return set().union(*own_deaths)

    def _of_this_start(self, attempt: AttemptDir) -> dict[str, Any] | None:
        """Return the description of an attempt; None if it is not of this start of the job."""
        described = read_json(attempt.description) or {}
        is_own = (described.get("job_id"), described.get("restart")) == (self._job.job_id, self._job.restart)
        return described if is_own else None


def free_from_dead_job(checkpoints: Path, job_id: str, client: SlurmClient) -> Holder | None:
    """Remove a lock on a run's checkpoints whose job Slurm calls over, or does not know; return its holder.

    The trainer holds it (checkpoint_tools/lock.py) and knows its own node and its own job, `job_id`. Slurm knows
    whether the job of another node is still there. If it cannot be asked, the lock stays, and the trainer
    refuses with its holder's name.
    """
    try:
        holder = holder_of(checkpoints)
        if holder is None or not holder.job or holder.job == job_id:
            return None
        job = client.job(holder.job)
        if job is not None and not job.state.is_over:
            return None
        acquire(checkpoints, job=job_id, is_gone=lambda holder_now: holder_now == holder).release()
    except (CheckpointError, ZslurmError):  # the trainer meets the lock too, and reports it
        return None
    return holder
