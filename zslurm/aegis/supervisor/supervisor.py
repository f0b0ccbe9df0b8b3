"""The supervisor: starts the ranks, watches them, and brings the run back when they fail.

It stands beside the ranks, never above them. They live in a step of their own; all it knows lies in files of
the run directory. So it may be killed at any moment: the batch script starts it again, and it takes the running
step up where its predecessor left it, or records how the step ended meanwhile, or carries out what was decided.

    start the ranks -> watch -> end what is left of them -> decide -> start again, requeue the job, or stop

What a fault means and what to do about it is the policy's to say (aegis/policy/policy.py); here it is done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from zslurm.aegis.detection.detector import Detector
from zslurm.aegis.fault_kinds import CONFIG_ERROR, GPU_TEST_FAILED, NODE_DEAD
from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.notify.recorder import Recorder
from zslurm.aegis.policy.history import active_exclusions
from zslurm.aegis.policy.outcome import Cause, Verdict
from zslurm.aegis.policy.policy import decide
from zslurm.aegis.supervisor.actions import requeue_job
from zslurm.aegis.supervisor.agents import Agents
from zslurm.aegis.supervisor.attempt_monitor import Watch, committed_step
from zslurm.aegis.supervisor.attempt_starter import Decided, Running, Starts
from zslurm.aegis.supervisor.gpu_test import try_gpu
from zslurm.aegis.supervisor.job import TIME_IS_UP, Job
from zslurm.aegis.supervisor.nodes import Nodes
from zslurm.aegis.supervisor.spares import unfit
from zslurm.aegis.types import Decision, Fault, Resources, Situation
from zslurm.core.errors import Exit, RunDirLost, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.core.processes import ProcessRecord
from zslurm.job.prepare import clear_up
from zslurm.job.successor import dismiss_successor, why_not_needed
from zslurm.run.run_dir import RunDir
from zslurm.run.state_events import IN_PLACE
from zslurm.slurm.hostlist import compress, expand

# Signals that ask the run to save and stop: Slurm's warning before the time limit, and its termination.
STOP_SIGNALS = (*TIME_IS_UP, signal.SIGTERM, signal.SIGINT)
_AGAIN_S = 5.0
"""Between two looks whether ranks can be started now, or the disk takes a file."""
_FULL_S = 60.0
"""How long a file waits for a full disk. Then the supervisor ends, and the batch script starts it again."""


def _patiently(write: Callable[[], None]) -> None:
    """Write, as soon as the disk takes it.

    Raises:
        ZslurmError: it did not for a minute.
    """
    deadline = time.monotonic() + _FULL_S
    while True:
        try:
            return write()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ZslurmError(f"{error.filename or 'the run directory'}: {error.strerror}") from error
        time.sleep(_AGAIN_S)


class Supervisor:
    """Watches one start of a run's job."""

    def __init__(self, run: RunDir, environ: dict[str, str]) -> None:
        """Prepare; nothing is started yet.

        Args:
            run: the run.
            environ: environment of the job; the ranks inherit it.

        Raises:
            ConfigError: config.json is missing or damaged, or this is not a job.
        """
        self.recorder = Recorder(run)
        self.job = Job.of(run, environ, self.recorder.event)
        self.settings = self.job.spec.aegis
        self.told: set[tuple[str, bool]] = set()
        self.recovering: Verdict | None = None
        """The failed attempt from which the run recovers; None where the one before ended in order."""

    def supervise(self) -> int:
        """Watch until the run is over in this job; returns its exit code."""
        job = self.job
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_stop_signal)
        for signum in (signal.SIGCONT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        job.presence.lost()  # from here on the run directory is watched over
        me = ProcessRecord.of(os.getpid())
        _patiently(lambda: me.write(job.run.supervisor))
        with self.recorder:
            self.recorder.open(job.spec, job.job_id, job.environ)
            if (reason := why_not_needed(job.run, job.environ)) is not None:
                job.event("successor_ended", reason=reason)
                return self._end(Exit.DONE)
            self.nodes = Nodes(job.spec, job.environ)
            self.starts = Starts(job, self.nodes)
            self.signatures, self.detector = Signatures.load(), Detector(self.settings)
            found = self.starts.left_over()
            adopted = found.attempt.number if isinstance(found, Running) else 0
            with self._agents(adopted) as self.agents:
                verdict = self._attempts(found)
            job.event("run_ended", **verdict.fields())
            clear_up(job.spec, job.job_id, self.nodes.usable(()), job.environ)
        if verdict.outcome in ("completed", "failed"):
            dismiss_successor(job.run, job.job_id)
        return self._end(verdict.exit_code)

    @contextlib.contextmanager
    def _agents(self, adopted: int) -> Iterator[Agents | None]:
        """Somebody on each node that lives; nobody where Aegis is off.

        Args:
            adopted: number of the attempt that an earlier supervisor's agents have watched; 0: none.
        """
        if self.settings.mode == "off":
            yield None
            return
        agents = Agents(self.settings, self.job.event)
        agents.attempt = adopted
        agents.start(self.job.spec, self.job.run, self.job.job_id, self.nodes.usable(()), self.job.environ)
        try:
            yield agents
        finally:
            agents.stop()

    def _end(self, code: int) -> int:
        """Tell the batch script that the run is over in this job.

        Where the run directory is lost there is no file to write it into: the exit code of this process tells.
        """
        if self.job.presence.lost() is not None:
            os._exit(Exit.STOPPED)
        _patiently(lambda: write_atomically(self.job.run.job_exit(self.job.job_id), f"{code}\n"))
        return code

    def _on_stop_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.job.stop.signum = signum

    # --- one attempt after the other ------------------------------------------------------------------------

    def _attempts(self, found: Running | Decided | None) -> Verdict:
        """Attempt after attempt, until one completes or the policy ends them in this job.

        Args:
            found: where an earlier supervisor left off.
        """
        running = found if isinstance(found, Running) else None
        nodes: tuple[str, ...] = ()
        adopted = {"adopted": running.attempt.number} if running is not None else {}
        self.job.event("supervisor_started", pid=os.getpid(), host=socket.gethostname(), **adopted)
        verdict: Verdict | None = None
        if isinstance(found, Decided):
            verdict, nodes = self._carry_out(found.decision, found.verdict)
        while verdict is None:
            if running is None:
                if self.job.stop.asked:
                    return self._asked_between()
                verdict = self.starts.why_not()
                if verdict is not None:
                    break
                try:
                    running = self._start(nodes)
                except ZslurmError as error:
                    return Verdict("failed", error.exit_code, Cause(str(error)))
                if running is None:
                    continue
            verdict, nodes = self._one(running)
            running = None
        return verdict

    def _start(self, nodes: tuple[str, ...]) -> Running | None:
        """Begin an attempt once Slurm answers and the run directory can be written; None where asked to stop.

        Raises:
            ZslurmError: for as long as a setup may take (aegis.hang.setup_s) no try could write the directory.
        """
        told = ""
        failed_at: float | None = None
        while not self.job.stop.asked:
            if (lost := self.job.presence.lost()) is not None:
                raise RunDirLost(lost)
            why = self.nodes.slurm_is_away()
            if why is not None:
                failed_at = None
            else:
                try:
                    return self.starts.start(nodes or self.starts.first_nodes())
                except OSError as error:
                    why = f"{error.filename or self.job.run.path}: {error.strerror}"
                    failed_at = failed_at or time.monotonic()
                    if time.monotonic() - failed_at > self.settings.hang.setup_s:
                        raise ZslurmError(f"{why}: no attempt could be started") from error
            if why != told:
                self.job.event("start_postponed", reason=why)
                told = why
            self._pause(_AGAIN_S)
        return None

    def _one(self, running: Running) -> tuple[Verdict | None, tuple[str, ...]]:
        """Watch an attempt to its end and do what follows: how the run ends here, or the nodes to go on with."""
        number = running.attempt.number
        if self.agents is not None:
            self.agents.attempt = number
            ranks = [node for node in running.nodes for _ in range(self.job.spec.ranks_per_node)]
            self.detector.begin(number, ranks, time.monotonic(), adopted=running.adopted)
        exclusions = active_exclusions(self.job.history(), time.time(), self.settings).values()
        spares = len(set(self.nodes.usable(exclusions)) - set(running.nodes))
        watch = Watch(self.job, running, self.signatures, self.agents, self.detector, spares, self.told)
        verdict = watch.until_end()
        self._bury({fault.node for fault in watch.faults if fault.kind == NODE_DEAD and fault.node})
        if self.settings.mode != "act":
            self._leave_to_slurm()
        if self.settings.mode == "off" or verdict.outcome == "completed" or self.job.presence.lost():
            self.job.event("attempt_ended", attempt=running.attempt.number, **verdict.fields())
            return verdict, ()
        decision, resources = self._decide(watch, verdict, running)
        if not watch.overdue:
            verdict = _blame(verdict, decision.root)
        self.job.event("attempt_ended", attempt=running.attempt.number, **verdict.fields())
        self._record(decision, resources, watch.situation())
        return self._carry_out(decision, verdict)

    def _bury(self, dead: set[str]) -> None:
        self.nodes.died |= dead
        if self.agents is not None and dead:
            self.agents.forget(sorted(dead))

    def _decide(self, watch: Watch, verdict: Verdict, running: Running) -> tuple[Decision, Resources]:
        """What the policy says, once the nodes and GPUs that it names are looked at."""
        settings, acts = self.settings, self.settings.mode == "act"
        tested: set[tuple[str, str]] = set()
        while True:
            history = self.job.history()
            situation = watch.situation(verdict)
            exclusions = active_exclusions(history, situation.now, settings).values()
            blamed = any(fault.role == "root" and fault.scope != "user" for fault in situation.faults)
            # A job that excludes nodes must not ask for more than are left.
            look = blamed or bool(exclusions)
            resources = self.nodes.resources(exclusions, running.nodes, look_elsewhere=look)
            decision = decide(situation, history, resources, settings)
            if acts and decision.test_gpu is not None and decision.test_gpu not in tested:
                tested.add(decision.test_gpu)
                if self._gpu_fails(decision, watch):
                    continue
            fresh = [node for node in decision.nodes if node not in running.nodes]
            broken = unfit(fresh, self.agents, self.job.event) if acts else {}
            if not broken:
                return decision, resources
            for node, reason in broken.items():
                self._exclude([node], f"spare {node} is not fit: {reason}", running.attempt.number)

    def _gpu_fails(self, decision: Decision, watch: Watch) -> bool:
        """Test a GPU from which NaN came again and again; where it computes wrongly, that is one more fault."""
        assert decision.test_gpu is not None
        node, gpu = decision.test_gpu
        if decision.root is not None and decision.root.gpu is None:  # then it is the rank that is named
            gpu = str(int(gpu) % self.job.spec.ranks_per_node)
        tested = try_gpu(node, gpu, self.job.slurm_id, self.job.spec, self.job.environ)
        self.job.event("gpu_tested", node=node, gpu=gpu, ok=tested.ok, reason=tested.reason, device=tested.device)
        if tested.ok is not False:
            return False
        line = f"{tested.device or f'GPU {gpu}'}: {tested.reason or 'it computes wrongly'}"
        watch.note([Fault.of_kind(GPU_TEST_FAILED, time.time(), "gpu_test", line, node=node, gpu=gpu)])
        return True

    def _record(self, decision: Decision, resources: Resources, situation: Situation) -> None:
        self.job.event(
            "decision",
            attempt=situation.attempt,
            mode=self.settings.mode,
            committed_step=situation.committed_step,
            **decision.fields(),
            situation=situation.fields(),
            resources=resources.fields(),
        )
        if decision.exclude and self.settings.mode == "act":
            self._exclude(decision.exclude, decision.reason, situation.attempt)

    def _exclude(self, nodes: Sequence[str], reason: str, attempt: int) -> None:
        """Nodes that are not used from now on."""
        expires = time.time() + self.settings.exclude_for_s
        self.job.event("nodes_excluded", nodes=compress(nodes), reason=reason, expires=expires, attempt=attempt)

    def _carry_out(self, decision: Decision, verdict: Verdict) -> tuple[Verdict | None, tuple[str, ...]]:
        """Do it: how the run ends in this job, or the nodes on which to start again."""
        if decision.action == "finish" or self.settings.mode != "act":
            return verdict, ()
        stop = self.job.stop
        if stop.comes_back and decision.action in IN_PLACE:  # the request came after the decision to start again
            return self._asked_between(verdict), ()
        if decision.action == "stop":
            code = verdict.exit_code if _is_users_mistake(decision.root) else Exit.STOPPED
            return replace(verdict, outcome="failed", exit_code=code), ()
        if stop.asked and not (stop.comes_back and decision.action == "requeue"):
            return self._interrupted(verdict), ()  # a job that was cancelled must not come back
        if decision.action == "requeue":
            return self._requeue(decision, verdict), ()
        self.recovering = verdict
        self._pause(decision.wait_s or 0.0)
        return None, decision.nodes

    def _interrupted(self, failed: Verdict | None) -> Verdict:
        """The outcome of a run that is asked to stop while it recovers from a failure.

        Args:
            failed: of the attempt that failed; None where none did.
        """
        message = f"asked to stop ({self.job.stop.asked_by})"
        if failed is None or failed.outcome not in ("failed", "lost"):
            return Verdict("interrupted", Exit.INTERRUPTED, failed.cause if failed else None)
        why = f": {failed.cause.message}" if failed.cause else ""
        return Verdict("interrupted", Exit.INTERRUPTED, Cause(f"{message} while it recovered from a failure{why}"))

    def _asked_between(self, verdict: Verdict | None = None) -> Verdict:
        """How the run ends in this job where it is asked to stop while no ranks run.

        Args:
            verdict: on the attempt that has just ended; None where that is decided upon.
        """
        job, settings = self.job, self.settings
        if job.stop.name is not None:
            job.event("signal", signal=job.stop.name)
        job.look_for_preemption()
        verdict = self._interrupted(verdict or self.recovering)
        if settings.mode == "off":
            return verdict
        attempts, history, now = job.run.attempt_dirs(), job.history(), time.time()
        number, step = (attempts[-1].number if attempts else 0), committed_step(job.run)
        situation = Situation(
            now, number, "interrupted", (), step, job.stop.name, job.stop.requeued, preempted=job.stop.preempted
        )
        exclusions = active_exclusions(history, now, settings).values()
        resources = self.nodes.resources(exclusions, (), look_elsewhere=bool(exclusions))
        decision = decide(situation, history, resources, settings)
        if decision.action == "finish":
            return verdict
        self._record(decision, resources, situation)
        return self._carry_out(decision, verdict)[0] or verdict

    def _leave_to_slurm(self) -> None:
        """Where Aegis does not act: wait until Slurm itself requeues the job that it preempts.

        That is at the end of the grace time; a job that ended before would not come back.
        """
        stop = self.job.stop
        while stop.preempted == "requeue" and stop.signum is None and not stop.requeued:
            self._pause_unless_signalled(_AGAIN_S)
            self.job.look_for_preemption()

    def _pause_unless_signalled(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.job.stop.signum is None and time.monotonic() < until:
            time.sleep(min(self.settings.poll_s, seconds))

    def _pause(self, seconds: float) -> None:
        """Wait, unless the run is asked to stop."""
        until = time.monotonic() + seconds
        while not self.job.stop.asked and time.monotonic() < until:
            time.sleep(min(self.settings.poll_s, seconds))

    def _requeue(self, decision: Decision, verdict: Verdict) -> Verdict:
        """Put the job back into the queue. Slurm ends this process soon after."""
        history, now = self.job.history(), time.time()
        active = active_exclusions(history, now, self.settings)
        forgiven = {exclusion.node for exclusion in history.exclusions} - set(active)
        demanded = expand(self.job.spec.slurm.nodelist or "")
        self.recorder.flush()
        try:
            excluded = requeue_job(
                self.job,
                decision,
                excluded={*active, *decision.exclude}.difference(demanded),
                forgiven=forgiven,
                dead=self.nodes.died,
            )
        except ZslurmError as error:
            self.job.event("requeue_failed", excluded=compress(decision.exclude), reason=str(error))
            if self.job.stop.preempted == "requeue":
                self._leave_to_slurm()
                return Verdict("interrupted", Exit.INTERRUPTED, verdict.cause)
            message = verdict.cause.message if verdict.cause else decision.reason
            cause = replace(verdict.cause or Cause(""), message=f"{message}; the job cannot be requeued: {error}")
            return Verdict("failed", Exit.STOPPED, cause)
        if excluded is not None:
            self.job.event("requeued", excluded=excluded, reason=decision.reason)
        return Verdict("interrupted", Exit.INTERRUPTED, verdict.cause)


def _blame(verdict: Verdict, root: Fault | None) -> Verdict:
    """The verdict with the policy's root as its cause, unless it names that rank already."""
    cause = verdict.cause
    if root is None or (cause is not None and cause.rank is not None and cause.rank == root.rank):
        return verdict
    code = cause.exit_code if cause is not None else None
    return replace(verdict, cause=Cause(root.line, root.rank, root.node, code, root.step))


def _is_users_mistake(root: Fault | None) -> bool:
    """Whether the configuration is wrong, which has an exit code of its own."""
    return root is not None and root.kind == CONFIG_ERROR


def supervise(run_dir: str) -> int:
    """The one call that submitit pickles: supervise the run's job and return the run's exit code."""
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    return Supervisor(RunDir(Path(run_dir)), environ).supervise()
