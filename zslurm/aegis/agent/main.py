"""`python -m zslurm.aegis.agent.main RUN_DIR`: what watches one node, and acts there, for the supervisor.

It reports on its standard output the progress of the node's ranks, and what its sensors find, and reads commands
from its standard input (zslurm.aegis.protocol). It lives as long as the start of the job, across attempts; the
supervisor's heartbeats name the attempt that runs.

Whatever may hang has a separate thread: a wedged driver or file system must not delay the report that ranks make
progress, nor the next command. It runs behind the ranks (nice), and does nothing between its looks.

When the supervisor sends no heartbeat for aegis.standby_s, or the pipe from it is closed, `on_missed_heartbeats`
is asked again and again what follows: the agent acts in the supervisor's place, or waits, or ends, because another
agent replaces it or it has done all there is to do.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from zslurm.aegis.agent.attempt_baselines import NodeMemory
from zslurm.aegis.agent.command_handlers import handle
from zslurm.aegis.agent.outbox import Outbox
from zslurm.aegis.agent.rank_processes import RankProcesses
from zslurm.aegis.agent.sensor import Make, NodeContext, Reading, all_sensors
from zslurm.aegis.agent.sensor_runner import SensorRunner
from zslurm.aegis.agent.sensors.progress import ranks_in
from zslurm.aegis.agent.standby import StandbySupervisor
from zslurm.aegis.fault_kinds import BASELINE_LOST
from zslurm.aegis.protocol import (
    AgentReport,
    Answer,
    Command,
    Heartbeat,
    ProgressReport,
    Report,
    SensorReport,
    Stamp,
    Unreadable,
    decode_command,
    encode_report,
)
from zslurm.checkpoint_tools.plain import reason_of
from zslurm.config.load import load_spec
from zslurm.core import log
from zslurm.core.errors import Exit, ZslurmError
from zslurm.core.pauses import PauseReader, Pauses
from zslurm.hardware.sysfs import sysroot
from zslurm.run.run_dir import open_run
from zslurm.slurm.environment import node_name
from zslurm.train.niceness import lower_process

_LOG = logging.getLogger("zslurm.aegis.agent")  # `python -m` calls this module `__main__`

OnMissedHeartbeats = Callable[[float, bool], bool]
"""Asked while the supervisor misses heartbeats, with the seconds since it was heard last and whether the pipe from
it is closed; true ends the agent."""

_TICK_S = 1.0
_UNHEARD_S = 4.0
"""Seconds without a heartbeat, of which one comes every second, after which this agent may not be heard either."""
_LONGEST_COMMAND = 1 << 16
_FLUSH_S = 2.0
# The agents stay as long as the ranks do, which save when they are asked to stop. SIGKILL and `quit` end them.
# They report what they got: where Slurm signals the steps and not the batch script, the supervisor hears of it so.
_REPORTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Agent:
    """One agent."""

    def __init__(
        self,
        context: NodeContext,
        *,
        on_missed_heartbeats: OnMissedHeartbeats,
        sensors: Mapping[str, Make] | None = None,
        commands: int = 0,
        reports: int = 1,
        generation: str = "",
        attempt: int = 0,
        signals: deque[int] | None = None,
    ) -> None:
        """Prepare; `run` does the work.

        Args:
            context: the node, and the run.
            on_missed_heartbeats: see OnMissedHeartbeats.
            sensors: by name; default: all of them.
            commands: file descriptor of the commands.
            reports: file descriptor of the reports.
            generation: of the supervisor that started it.
            attempt: that runs already, and that other agents have watched before this one; 0: none.
            signals: that this process got; a handler adds to them, and each is reported.
        """
        self.attempt = 0
        """Number of the present attempt by the supervisor's heartbeat; 0 before the first."""
        self._context, self._first_attempt, self._generation = context, attempt, generation
        self._memory = NodeMemory(context.run, context.environ, attempt)
        self._on_missed_heartbeats = on_missed_heartbeats
        self._commands, self._out = commands, Outbox(reports)
        self._signals = signals if signals is not None else deque()
        self._stop = threading.Event()
        makers = all_sensors() if sensors is None else sensors
        self._runners = [
            SensorRunner(
                name, make, context, self._sensed, self._stop, self._memory, lambda: self.attempt or attempt
            )
            for name, make in makers.items()
        ]
        self._heard_at = time.monotonic()
        self._pauses = Pauses(clock=time.monotonic)
        self._missed = self._hung_up = False
        self._seq = itertools.count(1)
        # After this long a sensor counts as hanging; the slowest thing that any of them waits for is amd-smi.
        self._patience_s = max(2 * context.settings.period_s, context.settings.amd_smi_timeout_s)

    @property
    def unheard_s(self) -> float:
        """Seconds since the supervisor was heard last, or since the start."""
        return time.monotonic() - self._heard_at

    def run(self) -> None:
        """Work until the command to quit comes, or until there is nothing left to do without a supervisor."""
        about = {"pid": os.getpid(), "generation": self._generation}
        self._send(AgentReport(self._stamp(), "started", about))
        if self._memory.problem:
            line = f"attempt {self._first_attempt}: {self._memory.problem}; sensors begin again"
            self._sensed("agent", Reading(faults=(self._context.fault(BASELINE_LOST, "agent", line),)))
        for runner in self._runners:
            runner.start()
        for work in (self._listen, self._report_progress):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        pauses = PauseReader(self._pauses)
        while not self._stop.wait(_TICK_S):
            # If this process itself was stopped, the supervisor missed no heartbeat meanwhile. One reading of the
            # clock serves a whole turn: wherever in it the process was stopped, the next turn notices.
            now, paused_s = time.monotonic(), pauses.new_s()
            self._heard_at = min(now, self._heard_at + paused_s)
            for runner in self._runners:
                runner.excuse(paused_s)
            while self._signals:
                name = signal.Signals(self._signals.popleft()).name
                self._send(AgentReport(self._stamp(), "signalled", {"signal": name}))
            for runner in self._runners:
                if (reading := runner.hanging_reading(self._patience_s)) is not None:
                    self._sensed(runner.name, reading)
            self._check_heartbeat(now - self._heard_at)
        self._send(AgentReport(self._stamp(), "ended"))
        self._out.flush(_FLUSH_S)
        for runner in self._runners:
            runner.close()

    # --- what it reports --------------------------------------------------------------------------------------

    def _stamp(self) -> Stamp:
        return Stamp(
            self._context.node, next(self._seq), round(self._context.now(), 3), round(time.monotonic(), 3)
        )

    def _send(self, report: Report) -> None:
        self._out.put(encode_report(report))

    def _sensed(self, sensor: str, reading: Reading) -> None:
        self._send(
            SensorReport(
                self._stamp(), sensor, reading.ok, reading.why, reading.faults, reading.values, first=reading.first
            )
        )

    def _report_progress(self) -> None:
        processes: RankProcesses | None = None
        while not self._stop.wait(self._context.settings.progress_s):
            attempt = self.attempt
            directory = self._context.run.attempt(attempt).progress(self._context.environ)
            if processes is None or processes.attempt.number != attempt:
                processes = RankProcesses(self._context.run.attempt(attempt), self._context.environ)
            self._pauses.tick()
            try:
                ranks = ranks_in(directory, None, self._pauses.since, processes.is_gone) if attempt else ()
                self._send(ProgressReport(self._stamp(), attempt, ranks))
            except Exception as error:  # whatever it is: a node that reports nothing any more is taken for dead
                why = f"the ranks' progress cannot be read: {reason_of(error)}"
                self._send(ProgressReport(self._stamp(), attempt, ok=False, why=why))

    # --- commands ------------------------------------------------------------

    def _listen(self) -> None:
        ignored: set[bool] = set()
        with open(self._commands, "rb", closefd=False) as lines:
            while line := lines.readline(_LONGEST_COMMAND):
                try:
                    command = decode_command(line)
                except Unreadable as error:
                    if not error.is_damaged:  # a supervisor of another version lives as well
                        self._heard_at = time.monotonic()
                    if line.strip() and error.is_damaged not in ignored:
                        ignored.add(error.is_damaged)
                        _LOG.warning("a message of the supervisor is ignored: %s", error)
                    continue
                if isinstance(command, Heartbeat):
                    began = command.attempt != self.attempt
                    self._heard_at, self.attempt = time.monotonic(), command.attempt
                    for runner in self._runners if began else ():  # what it begins with
                        runner.look_now()
                elif not command.nodes or self._context.node in command.nodes:
                    self._handle(command)
        self._hung_up = self._memory.frozen = True

    def _handle(self, command: Command) -> None:
        if command.do == "quit":
            if not command.nodes:  # all of them: the run is over in this job
                self._memory.forget()
            self._stop.set()
            return
        if command.do == "clean_up":  # the attempt is over; what ended it is needed for the decision
            for runner in self._runners:
                runner.look_now()
        name = f"{command.do}-{command.id}"
        threading.Thread(target=self._answer, args=(command,), name=name, daemon=True).start()

    def _answer(self, command: Command) -> None:
        ok, why, values = handle(self._context, command)
        self._send(Answer(self._stamp(), command.id, ok, why, values))

    def _check_heartbeat(self, unheard_s: float) -> None:
        self._memory.frozen = self._hung_up or unheard_s > _UNHEARD_S
        before, self._missed = self._missed, unheard_s >= self._context.aegis.standby_s
        if self._missed != before:
            event = "silent" if self._missed else "heard"
            self._send(AgentReport(self._stamp(), event, {"seconds": round(unheard_s, 1)}))
        if (self._missed or self._hung_up) and self._on_missed_heartbeats(unheard_s, self._hung_up):
            self._stop.set()


def main(argv: list[str] | None = None) -> int:
    """Run the agent of this node; returns its exit code."""
    parser = argparse.ArgumentParser(prog="zslurm.aegis.agent.main", description="Watches one node of a run.")
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--generation", default="", help="of the supervisor that starts it")
    parser.add_argument("--attempt", type=int, default=0, help="that other agents have watched; default: none")
    options = parser.parse_args(argv)
    log.set_up("agent: ")
    environ = dict(os.environ)
    signals: deque[int] = deque()
    for signum in _REPORTED:
        signal.signal(signum, lambda signum, _frame: signals.append(signum))
    lower_process()
    try:
        run = open_run(options.run)
        spec = load_spec(run.config)
    except ZslurmError as error:
        _LOG.error("%s", error)
        return Exit.USAGE
    standby = StandbySupervisor(run, environ, spec.aegis.standby_s, generation=options.generation)
    agent = Agent(
        NodeContext(node_name(environ), run, spec.aegis, spec.cluster, sysroot(environ), environ),
        on_missed_heartbeats=standby.on_missed_heartbeats, generation=options.generation,
        attempt=options.attempt, signals=signals,
    )  # fmt: skip
    standby.heard = lambda: agent.unheard_s < spec.aegis.standby_s
    agent.run()
    return Exit.DONE


if __name__ == "__main__":
    # Not by sys.exit: threads that hang in a driver would be waited for.
    code = main()
    sys.stderr.flush()
    os._exit(code)
