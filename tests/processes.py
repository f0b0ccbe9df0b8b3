"""Processes of tests that are forked from the one that has collected, and need neither import nor collect.

With pytest-xdist each process imports torch and collects some ten thousand tests for itself: 20 seconds of
processor time. These ones take the next group of tests out of a pipe when they are done with one, and send what
pytest reports about a test to the first process, which shows it. A process that dies costs the test that it ran:
another one goes on with the rest of its group.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import multiprocessing
import os
import signal
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests import forked

SHARED = pytest.StashKey[Path]()
"""In a process's configuration: the directory that all of them share."""

_NUMBER = struct.Struct("I")
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


class Processes:
    """What the first process knows of the others."""

    def __init__(self, session: pytest.Session, groups: Sequence[Sequence[int]]) -> None:
        """Prepare to run groups of tests, by their numbers in the session, in this order."""
        self.session, self.config, self.groups = session, session.config, groups
        self.stop = mmap.mmap(-1, 1)
        """Shared; not zero where no further test is to begin."""
        self.next_group, writer = os.pipe()
        os.write(writer, b"".join(map(_NUMBER.pack, range(len(groups)))))
        os.close(writer)
        self.config.stash[SHARED] = self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._terminal = self.config.pluginmanager.getplugin("terminalreporter")
        self._count = itertools.count()
        self._running: dict[Connection, _Process] = {}
        forked.place()

    def run(self, processes: int) -> None:
        """Run all groups in so many processes, and have each test reported here as if it had run here."""
        if self._terminal is not None:
            self._terminal.showfspath = False  # tests of several files at once
        try:
            for _ in range(min(processes, len(self.groups))):
                self._start([])
            while self._running:
                for connection in wait(list(self._running)):
                    assert isinstance(connection, Connection)
                    try:
                        kind, message = connection.recv()
                    except EOFError:
                        self._ended(connection)
                    else:
                        self._heard(self._running[connection], kind, message)
        finally:
            self.stop[0] = 1
            for process in self._running.values():
                process.join()

    def _start(self, tests: list[int]) -> None:
        here, there = multiprocessing.Pipe(duplex=False)
        process = _Process(self, there, next(self._count), tests)
        process.start()
        there.close()
        self._running[here] = process

    def _heard(self, process: _Process, kind: str, message: Any) -> None:
        hook = self.config.hook
        if kind == "taken":
            process.left.extend(message)
        elif kind == "done":
            process.left.remove(message)
        elif kind == "logreport":
            report = hook.pytest_report_from_serializable(config=self.config, data=message)
            self._report(report)
        elif kind == "logfinish":
            hook.pytest_runtest_logfinish(**message)
        elif self._terminal is not None:
            text, category, file, line, nodeid = message
            warning = warnings.WarningMessage(text, type(category, (Warning,), {}), file, line)
            self._terminal.pytest_warning_recorded(warning, nodeid)

    def _report(self, report: pytest.TestReport) -> None:
        self.config.hook.pytest_runtest_logreport(report=report)
        if self.session.shouldfail or self.session.shouldstop:
            self.stop[0] = 1

    def _ended(self, connection: Connection) -> None:
        """Where the process has died, report the test that took it along, and let another one do the rest."""
        process = self._running.pop(connection)
        connection.close()
        process.join()
        if process.exitcode == 0:
            return
        if not process.left:
            raise RuntimeError(f"a process of tests ended with exit code {process.exitcode}: see above")
        died, *rest = process.left
        item = self.session.items[died]
        why = f"the process that ran this test ended with exit code {process.exitcode}"
        self._report(pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call"))
        if not self.stop[0]:
            self._start(rest)


class _Process(_FORK.Process):  # type: ignore[name-defined, misc]
    """One process: what the first one knows of it, and what it does itself."""

    def __init__(self, processes: Processes, connection: Connection, number: int, tests: list[int]) -> None:
        super().__init__()
        self.processes, self.connection, self.number = processes, connection, number
        self.left = tests
        """The tests that it has taken and not finished, in the order in which it runs them."""

    def run(self) -> None:
        """Run tests until no group is left, with what a process of pytest has for itself."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        atexit._clear()  # what the first process has to do in the end
        session, config = self.processes.session, self.processes.config
        plugins = config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()  # into files of its own
        capture.suspend_global_capture()
        config.option.basetemp = str(config.stash[SHARED] / f"process-{self.number}")
        plugins.getplugin("tmpdir").pytest_configure(config)
        plugins.unregister(name="terminalreporter")
        plugins.register(_Forwarding(self.connection, config), "forwarding")
        try:
            tests = self._tests()
            test = next(tests, None)
            while test is not None and not (self.processes.stop[0] or session.shouldfail or session.shouldstop):
                following = next(tests, None)
                config.hook.pytest_runtest_protocol(
                    item=session.items[test], nextitem=None if following is None else session.items[following]
                )
                self.connection.send(("done", test))
                test = following
        except KeyboardInterrupt:
            sys.exit(1)
        finally:
            plugins.getplugin("runner").pytest_sessionfinish(session)
            atexit._run_exitfuncs()

    def _tests(self) -> Iterator[int]:
        """Yield those that it starts with, then those of one group after the other."""
        yield from list(self.left)
        while taken := os.read(self.processes.next_group, _NUMBER.size):
            tests = self.processes.groups[_NUMBER.unpack(taken)[0]]
            self.connection.send(("taken", tests))
            yield from tests


class _Forwarding:
    """A plugin that sends on what pytest would show; the lines of tests that begin would be torn by others."""

    def __init__(self, connection: Connection, config: pytest.Config) -> None:
        self.connection, self.config = connection, config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("logreport", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.connection.send(("logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        each = warning_message
        shown = (str(each.message), each.category.__name__, each.filename, each.lineno, nodeid)
        self.connection.send(("warning", shown))
