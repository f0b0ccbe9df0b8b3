"""A real agent as a child of the test: commands go in, reports come out."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tests import forked
from tests.forked import client
from tests.submit.specs import run_spec
from tests.waiting import DEADLINE_S, wait_for
from zslurm.aegis.protocol import (
    MARK,
    AgentReport,
    Answer,
    Command,
    Heartbeat,
    ProgressReport,
    Report,
    ReportReader,
    SensorReport,
    encode_command,
)
from zslurm.run.run_dir import RunDir

R = TypeVar("R", bound=Report)

QUIET: dict[str, Any] = {"kernel_log": "off", "amd_smi": "off", "progress_s": 0.05, "period_s": 0.05}


def make_run(directory: Path, *, sensors: dict[str, Any] | None = None, **sections: Any) -> RunDir:
    """A run with its configuration, as submit leaves it; `sections` are of the run file."""
    aegis = sections.pop("aegis", {}) | {"sensors": QUIET | (sensors or {})}
    spec = run_spec(directory, aegis=aegis, **sections)
    run = RunDir(directory / "runs" / "tiny")
    run.create(group_readable=False)
    run.config.write_text(spec.model_dump_json())
    return run


class ForkedAgent:
    """An agent that need not wait for its imports: as a Popen, but it is no child of this process."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        (stdin, mine), (output, stdout), (errors, stderr) = (os.pipe() for _ in range(3))
        self.stdin, self.stdout, self.stderr = os.fdopen(mine, "w"), os.fdopen(output), os.fdopen(errors)
        self._theirs = (stdin, stdout, stderr)
        self._began, self.pid = threading.Event(), -1
        self.returncode: int | None = None
        self._waiter = threading.Thread(target=self._run, args=(arguments, environ), daemon=True)
        self._waiter.start()
        assert self._began.wait(DEADLINE_S)

    def _run(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self.returncode = client.ask(
            str(forked.server().path), list(arguments), dict(environ), str(Path.cwd()), self._theirs,
            module="zslurm.aegis.agent.main", began=self._begin,
        )  # fmt: skip

    def _begin(self, pid: int) -> None:
        for descriptor in self._theirs:
            os.close(descriptor)
        self.pid = pid
        self._began.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int | None:
        self._waiter.join()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class AgentProcess:
    """One agent, or a step of them, and what was reported so far."""

    def __init__(self, process: subprocess.Popen[str] | ForkedAgent) -> None:
        """Read what it reports."""
        self.process = process
        self.reports: list[Report] = []
        self.other_lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._sending, self._hearts = threading.Lock(), list[threading.Event]()

    @classmethod
    def start(cls, command: Sequence[str | Path], environ: Mapping[str, str], **options: Any) -> AgentProcess:
        """A child of the test.

        Args:
            command: starts the agent, or a step of them.
            environ: its environment.
            options: of Popen.
        """
        pipe = subprocess.PIPE
        return cls(
            subprocess.Popen(command, env=environ, text=True, stdin=pipe, stdout=pipe, stderr=pipe, **options)
        )

    @classmethod
    def here(cls, run: RunDir, *options: str, **environ: str) -> AgentProcess:
        """The agent of node0."""
        return cls(ForkedAgent([str(run.path), *options], {**os.environ, "SLURMD_NODENAME": "node0", **environ}))

    def _read(self) -> None:
        assert self.process.stdout is not None
        reader = ReportReader(lambda _, error: self.other_lines.append(str(error)))
        for line in self.process.stdout:
            if (report := reader.read(line.encode())) is not None:
                self.reports.append(report)
            elif MARK not in line:
                self.other_lines.append(line)

    def send(self, *commands: Heartbeat | Command | str) -> None:
        """Commands, or lines that are none."""
        assert self.process.stdin is not None
        with self._sending:
            for command in commands:
                self.process.stdin.write(command if isinstance(command, str) else encode_command(command))
            self.process.stdin.flush()

    def beat(self, attempt: int = 0) -> None:
        self.send(Heartbeat(time.time(), attempt, "first"))

    def keep_beating(self, attempt: int = 0) -> None:
        """A heartbeat now and then, as a supervisor sends them, until the end of the agent or `stop_beating`."""
        over = threading.Event()
        self._hearts.append(over)

        def beat() -> None:
            with suppress(OSError, ValueError):  # it has ended
                self.beat(attempt)
                while not over.wait(0.2):
                    self.beat(attempt)

        threading.Thread(target=beat, daemon=True).start()

    def stop_beating(self) -> None:
        for over in self._hearts:
            over.set()

    def hang_up(self) -> None:
        """The end of its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def of(self, kind: type[R], wanted: Callable[[R], object] = lambda report: True) -> list[R]:
        """Reports of a kind."""
        return [report for report in list(self.reports) if isinstance(report, kind) and wanted(report)]

    def wait_for(self, kind: type[R], wanted: Callable[[R], object] = lambda report: True) -> R:
        """The first report of a kind of which something is true."""
        return wait_for(lambda: self.of(kind, wanted), f"a {kind.__name__}")[0]

    def answer(self, number: int, node: str = "node0") -> Answer:
        return self.wait_for(Answer, lambda answer: answer.id == number and answer.stamp.node == node)

    def sensed(self, sensor: str, wanted: Callable[[SensorReport], object] = lambda report: True) -> SensorReport:
        return self.wait_for(SensorReport, lambda report: report.sensor == sensor and wanted(report))

    def events(self) -> list[str]:
        return [report.event for report in self.of(AgentReport)]

    def fresh_progress(self, count: int = 2) -> ProgressReport:
        """A report of progress that was made after this call."""
        seen = len(self.of(ProgressReport))
        return wait_for(lambda: self.of(ProgressReport)[seen + count - 1 :], "a report of progress")[0]

    def wait(self) -> int:
        """Its exit code."""

        def code() -> tuple[int] | None:
            return None if (code := self.process.poll()) is None else (code,)

        (ended_with,) = wait_for(code, "its end")
        self._reader.join()
        return ended_with

    def close(self) -> None:
        self.stop_beating()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue
