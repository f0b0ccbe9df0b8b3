"""The supervisor: starts the ranks, watches them, and starts the run again when they fail.

It runs next to the ranks, never above them. They have their own step; all it knows is in files of the run
directory. So it may be killed at any moment: the batch script starts it again, and it takes over the running
step from its predecessor, or records how the step ended in between, or carries out what was decided.

    start the ranks -> monitor the attempt -> clean up -> decide -> start again, requeue the job, or stop

What follows an attempt is decided and done in recovery.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.policy.outcome import AttemptOutcome, Cause
from zslurm.aegis.core.starting import PendingDecision
from zslurm.aegis.notify.recorder import Recorder
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.attempt_monitor import AttemptMonitor
from zslurm.aegis.supervisor.attempt_starter import AttemptStarter, RunningAttempt
from zslurm.aegis.supervisor.fault_collector import FaultCollector
from zslurm.aegis.supervisor.helper_jobs import HelperJobs
from zslurm.aegis.supervisor.job import TIME_IS_UP, Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.aegis.supervisor.recovery import Recovery
from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.load import load_spec
from zslurm.core import log
from zslurm.core.errors import ConfigError, Exit, RunDirGone, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.core.processes import ProcessRecord
from zslurm.job.preparation.prepare import clear_up
from zslurm.job.successor import dismiss_successor, why_not_needed
from zslurm.run import supervisor_lease
from zslurm.run.events import (
    AttemptEnded,
    ConfigRestored,
    LeaseLost,
    QueueOverdue,
    RunEnded,
    StartPostponed,
    SuccessorEnded,
    SupervisorStarted,
)
from zslurm.run.events.event import Event, only_known
from zslurm.run.metrics.tail import newest_rows
from zslurm.run.queue_wait import read_waits, why_overdue
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import parse_line

# Signals that ask the run to save and stop: Slurm's warning before the time limit, and its termination.
STOP_SIGNALS = (*TIME_IS_UP, signal.SIGTERM, signal.SIGINT)
_LOG = logging.getLogger(__name__)
_SHOWN_LINES = 10
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


def _name_damaged_lines(events: Path) -> None:
    """Name the lines of the run's events that cannot be understood: the supervisor continues without them."""
    with contextlib.suppress(OSError), events.open("rb") as file:
        damaged = [number for number, line in enumerate(file, 1) if line.strip() and parse_line(line) is None]
        if damaged:
            shown = ", ".join(map(str, damaged[:_SHOWN_LINES])) + (", ..." if len(damaged) > _SHOWN_LINES else "")
            lines = counted(len(damaged), "damaged line is", "damaged lines are")
            word = "line" if len(damaged) == 1 else "lines"
            _LOG.warning("%s: %s left out: what they record is missing (%s %s)", events, lines, word, shown)


class Supervisor:
    """Watches one start of a run's job."""

    def __init__(self, run: RunDir, environ: dict[str, str]) -> None:
        """Prepare; nothing is started yet.

        Raises:
            ConfigError: config.json is missing or damaged, or this is not a job.
        """
        self.recorder = Recorder(run)
        self.job = Job.of(run, environ, self._record)
        self.settings = self.job.spec.aegis
        self.reported: set[tuple[str, bool]] = set()

    def supervise(self) -> int:
        """Watch until the run is over in this job; returns its exit code."""
        job = self.job
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_stop_signal)
        for signum in (signal.SIGCONT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        job.presence.lost()  # from here on the run directory is watched over
        me = ProcessRecord.of(os.getpid())
        reason = why_not_needed(job.run, job.environ)
        if reason is None:  # otherwise another job's supervisor may have the run, and keeps it
            _patiently(lambda: me.write(job.run.supervisor))
        with self.recorder:
            self.recorder.open(job.spec, job.job_id, job.environ)
            _name_damaged_lines(job.run.events)
            if reason is not None:
                self.recorder.record(SuccessorEnded(reason=reason))
                return self._end(Exit.DONE)
            self.nodes = Nodes(job.spec, job.environ)
            self.helpers = HelperJobs(job, self.nodes)
            self.starter = AttemptStarter(job, self.nodes, self.helpers.job_of, self.helpers.expected_wait_s)
            self.detector = Detector(self.settings)
            left_over = self.starter.left_over()
            adopted = left_over.attempt.number if isinstance(left_over, RunningAttempt) else 0
            with self._agents(adopted) as self.agents:
                self.helpers.use(self.agents)
                self.recovery = Recovery(job, self.nodes, self.agents, self.recorder, self.helpers)
                outcome = self.run_attempts(left_over)
                self.starter.warm.end()
                self.helpers.close()
            job.record(RunEnded(**outcome.fields()))
            clear_up(job.spec, job.job_id, self.nodes.usable(()), job.environ)
        if outcome.outcome in ("completed", "failed"):
            dismiss_successor(job.run, job.job_id)
        return self._end(outcome.exit_code)

    @contextlib.contextmanager
    def _agents(self, adopted: int) -> Iterator[Agents | None]:
        """Have an agent on each node that lives; none if Aegis is off.

        Args:
            adopted: number of the attempt that an earlier supervisor's agents have watched; 0: none.
        """
        if self.settings.mode == "off":
            yield None
            return
        agents = Agents(self.settings, self.job.record, pauses=self.job.pauses)
        agents.attempt = adopted
        agents.start(self.job.spec, self.job.run, self.job.job_id, self.nodes.usable(()), self.job.environ)
        try:
            yield agents
        finally:
            agents.stop()

    def _record(self, event: Event) -> None:
        """Record an event, unless another supervisor has the run by now: then end at once, without any action.

        Every action is recorded before it. Slurm starts a requeued job elsewhere while a batch host that it cannot
        reach still runs this process; the run directory is common to both.
        """
        with contextlib.suppress(OSError):  # the file system does not answer: nothing is known
            lease = supervisor_lease.read(self.job.run)
            if lease is not None and not lease.is_own:
                self.recorder.record(only_known(LeaseLost(generation=lease.generation)))
                os._exit(Exit.STOPPED)
        self.recorder.record(event)

    def _end(self, code: int) -> int:
        """Leave the exit code for the batch script: the run is over in this job.

        If the run directory is lost there is no file to write it into: the exit code of this process shows it.
        """
        if self.job.presence.lost() is not None:
            os._exit(Exit.STOPPED)
        _patiently(lambda: write_atomically(self.job.run.job_exit(self.job.job_id), f"{code}\n"))
        return code

    def _on_stop_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.job.stop.signum = signum

    # --- one attempt after the other ------------------------------------------------------------------------

    def run_attempts(self, found: RunningAttempt | PendingDecision | None) -> AttemptOutcome:
        """Run attempt after attempt, until one completes or the policy ends them in this job."""
        running = found if isinstance(found, RunningAttempt) else None
        nodes: tuple[str, ...] = ()
        adopted = None if running is None else running.attempt.number
        started = SupervisorStarted(pid=os.getpid(), host=socket.gethostname(), adopted=adopted)
        self.job.record(only_known(started))
        if found is None:
            self._record_wait()
        outcome: AttemptOutcome | None = None
        is_looked_at = running is not None
        if isinstance(found, PendingDecision):
            outcome, nodes = self.recovery.carry_out(found)
        while outcome is None:
            if running is None:
                if self.job.stop.asked:
                    return self.recovery.asked_between()
                outcome = self.recovery.leave_excluded(self.starter.candidates()) if not nodes else None
                outcome = outcome or self.starter.blocking_reason()
                if outcome is not None:
                    break
                if not (nodes or is_looked_at):
                    is_looked_at = True
                    if self.recovery.skip_unfit(self.starter.candidates()):
                        continue
                try:
                    running = self.start_attempt(nodes)
                except ZslurmError as error:
                    return AttemptOutcome("failed", error.exit_code, Cause(str(error)))
                if running is None:
                    continue
                if not nodes:
                    self.recovery.check_spares(self._spares(running))
            outcome, nodes = self.watch_attempt(running)
            running = None
        return outcome

    def _record_wait(self) -> None:
        """Record that the job has waited in the queue for too long, unless a command has recorded it meanwhile."""
        with contextlib.suppress(OSError):
            waits = read_waits(self.job.run)
            if why := why_overdue(waits, time.time(), set_s=self.settings.expected_wait_s):
                self.job.record(QueueOverdue(reason=why))

    def start_attempt(self, nodes: tuple[str, ...]) -> RunningAttempt | None:
        """Begin an attempt once Slurm answers and the run directory can be written; None if asked to stop.

        Raises:
            ZslurmError: for as long as a setup may take (aegis.hang.setup_s) no try could write the directory.
        """
        reported = ""
        failed_at: float | None = None
        while not self.job.stop.asked:
            if (lost := self.job.presence.lost()) is not None:
                raise RunDirGone(lost)
            why = self.nodes.slurm_is_away()
            if why is not None:
                failed_at = None
            else:
                try:
                    return self.starter.start(nodes or self.starter.first_nodes())
                except OSError as error:
                    why = f"{error.filename or self.job.run.path}: {error.strerror}"
                    failed_at = failed_at or time.monotonic()
                    if time.monotonic() - failed_at > self.settings.hang.setup_s:
                        raise ZslurmError(f"{why}: no attempt could be started") from error
            if why != reported:
                # Slurm comes back by itself, a disk has no more space before somebody frees some.
                self.job.record(StartPostponed(reason=why, needs_person=failed_at is not None))
                reported = why
            self.job.pause(_AGAIN_S)
        return None

    def _spares(self, running: RunningAttempt) -> list[str]:
        return [node for node in self.nodes.usable(self.job.excluded()) if node not in running.nodes]

    def _restore_config(self) -> None:
        """Write config.json again if the program has changed it: trainers save a file of that name."""
        run, spec = self.job.run, self.job.spec
        if spec.trainer is None or self.job.presence.lost() is not None:
            return
        try:
            changed = load_spec(run.config) != spec
        except ConfigError:
            changed = True
        if changed:
            with contextlib.suppress(OSError):
                write_atomically(run.config, spec.model_dump_json(indent=1) + "\n")
                self.job.record(ConfigRestored(output=str(run.output)))

    def watch_attempt(self, running: RunningAttempt) -> tuple[AttemptOutcome | None, tuple[str, ...]]:
        """Watch an attempt to its end and do what follows: end the run here, or return nodes to continue with."""
        number = running.attempt.number
        if self.agents is not None:
            self.agents.attempt = number
            ranks = [node for node in running.nodes for _ in range(self.job.spec.ranks_per_node)]
            step_times = recent_step_times(self.job.run, number) if running.adopted else ()
            self.detector.begin(number, ranks, time.monotonic(), adopted=running.adopted, step_times=step_times)
        spares = len(self._spares(running))
        collected = FaultCollector(
            self.job, running, self.agents, self.detector, self.reported, spares, self.helpers
        )
        monitor = AttemptMonitor(collected)
        outcome = monitor.until_end()
        self._restore_config()
        self.nodes.dead |= collected.state.dead_nodes
        if self.agents is not None:
            self.agents.liveness.forget(collected.state.dead_nodes)
        if self.settings.mode != "act":
            self.recovery.leave_to_slurm()
        if self.settings.mode == "off" or outcome.outcome == "completed" or self.job.presence.lost():
            self.job.record(AttemptEnded(attempt=number, **outcome.fields()))
            return outcome, ()
        return self.recovery.after(collected.state, outcome, overdue=monitor.overdue)


def recent_step_times(run: RunDir, attempt: int) -> tuple[float, ...]:
    """Return the times of the last steps before a supervisor adopted their attempt; empty if it finished none.

    Without them a rank that stopped before its attempt was adopted would have as long as a setup may take.
    """
    try:
        newest = newest_rows(run.metrics)
    except OSError:  # the file system does not answer
        return ()
    return tuple(newest.step_times) if newest.step.get("attempt") == attempt else ()


def supervise(run_dir: str) -> int:
    """Supervise the run's job and return the run's exit code: the one call that submitit pickles."""
    log.set_up("supervisor: ", "stdout")
    return Supervisor(RunDir(Path(run_dir)), dict(os.environ)).supervise()
