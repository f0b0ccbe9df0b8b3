"""The agent in a thread of the test: sensors that hang or fail, and a supervisor that is silent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.aegis.contexts import context
from tests.waiting import wait_for
from zslurm.aegis.agent.main import Agent, OnMissedHeartbeats
from zslurm.aegis.agent.sensor import Make, NodeContext, Reading, Sensor
from zslurm.aegis.fault_kinds import NIC_ERRORS
from zslurm.aegis.protocol import (
    AgentReport,
    Command,
    Heartbeat,
    ProgressReport,
    Report,
    ReportReader,
    SensorReport,
    Unreadable,
    encode_command,
)


def _unexpected(node: str, error: Unreadable) -> None:
    raise AssertionError(f"{node}: {error}")


class Broken(Sensor):
    """A sensor whose reading is a function's."""

    period_s = 0.01

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read

    def read(self) -> Reading:
        return self._read()


def fill(pipe: int) -> None:
    """Write into a pipe until it takes no more."""
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"zslurm-agent unread\n" * 100)
    os.set_blocking(pipe, True)


class Here:
    """An agent in a thread of the test, on a pair of pipes."""

    def __init__(
        self,
        at: NodeContext,
        sensors: dict[str, Make],
        missed: OnMissedHeartbeats = lambda seconds, hung_up: True,
        *,
        stuffed: bool = False,
    ) -> None:
        commands, self._in = os.pipe()
        self._out, reports = os.pipe()
        self._fds = (commands, self._in, self._out, reports)
        if stuffed:
            fill(reports)
        self.agent = Agent(at, on_missed_heartbeats=missed, sensors=sensors, commands=commands, reports=reports)
        self.reports: list[Report] = []
        self._thread = threading.Thread(target=self.agent.run)
        self._thread.start()

    def read_on(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with open(self._out, closefd=False) as lines:
            reader = ReportReader(_unexpected)
            for line in lines:
                if (report := reader.read(line.encode())) is not None:
                    self.reports.append(report)

    def send(self, command: Heartbeat | Command) -> None:
        os.write(self._in, encode_command(command).encode())

    def sensed(self, name: str) -> list[SensorReport]:
        return [r for r in list(self.reports) if isinstance(r, SensorReport) and r.sensor == name]

    def events(self) -> list[str]:
        return [report.event for report in list(self.reports) if isinstance(report, AgentReport)]

    def progress(self) -> list[ProgressReport]:
        return [report for report in list(self.reports) if isinstance(report, ProgressReport)]

    def quit(self) -> None:
        self.send(Command("quit"))
        self.join()

    def join(self) -> None:
        wait_for(lambda: not self._thread.is_alive(), "the agent's end")


def fast(tmp_path: Path, *, hangs_after_s: float = 3600.0, **aegis: Any) -> NodeContext:
    return context(
        tmp_path / "root",
        aegis=aegis,
        progress_s=0.01,
        period_s=0.01,
        amd_smi_timeout_s=hangs_after_s,
        kernel_log="off",
    )


def test_a_sensor_that_hangs_is_told_once_and_holds_up_nobody(tmp_path: Path) -> None:
    wedged = threading.Event()

    def read() -> Reading:
        wedged.wait()
        return Reading(values={"back": 1})

    at = fast(tmp_path, hangs_after_s=0.1)
    here = Here(at, {"wedged": lambda at: Broken(read), "fine": lambda at: Broken(Reading)})
    here.read_on()
    wait_for(lambda: here.sensed("wedged"), "a word on the sensor that hangs")
    seen = len(here.progress())
    wait_for(lambda: len(here.progress()) > seen + 150, "progress to be told on")
    (report,) = here.sensed("wedged")
    assert (report.ok, report.why) == (False, "nothing was read for 0.1 s: it hangs")
    wait_for(lambda: any(report.ok for report in here.sensed("fine")), "the other sensor")
    wedged.set()
    wait_for(lambda: here.sensed("wedged")[1:], "the sensor to come back")
    assert here.sensed("wedged")[1].values == {"back": 1}
    here.quit()


def test_a_sensor_that_hangs_while_it_is_made_does_not_stop_the_agent_from_ending(tmp_path: Path) -> None:
    wedged = threading.Event()

    def make(at: NodeContext) -> Sensor | None:
        wedged.wait()
        return None

    here = Here(fast(tmp_path, hangs_after_s=0.1), {"wedged": make})
    here.read_on()
    wait_for(lambda: here.sensed("wedged"), "a word on the sensor that hangs")
    here.quit()
    assert here.events() == ["started", "ended"]
    wedged.set()


def test_sensors_that_fail_say_so_once(tmp_path: Path) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such thing")

    here = Here(fast(tmp_path), {"unmade": fail, "failing": lambda at: Broken(fail), "none": lambda at: None})
    here.read_on()
    wait_for(lambda: len(here.progress()) > 20 and here.sensed("failing"), "progress")
    assert [r.why for r in here.sensed("unmade")] == ["it cannot be made: no such thing"]
    assert [r.why for r in here.sensed("failing")] == ["it failed: no such thing"]
    assert here.sensed("none") == []
    here.quit()


def test_progress_that_cannot_be_read_is_told_and_the_node_is_not_silent(tmp_path: Path) -> None:
    at = fast(tmp_path, standby_s=3600.0)
    directory = at.run.attempt(2).progress(at.environ)
    directory.touch()
    here = Here(at, {})
    here.read_on()
    here.send(Heartbeat(1.0, 2, "first"))
    wait_for(lambda: [r for r in here.progress() if not r.ok][20:], "words on the records")
    assert here.progress()[-1].why.endswith(f" cannot be read: {directory}: Not a directory")
    directory.unlink()
    wait_for(lambda: here.progress()[-1].ok, "the records to be read again")
    here.quit()


def test_readings_without_news_are_not_repeated(tmp_path: Path) -> None:
    at = fast(tmp_path)
    values = iter([{"n": 1}] * 50 + [{"n": 2}] * 10_000)
    fault = at.fault(NIC_ERRORS, "nic", "words")
    faults = iter([(), (), (fault,), (fault,), *[()] * 10_000])
    here = Here(
        at,
        {
            "steady": lambda at: Broken(lambda: Reading(values=next(values))),
            "faulty": lambda at: Broken(lambda: Reading(faults=next(faults))),
        },
    )
    here.read_on()
    wait_for(lambda: here.sensed("steady")[1:], "other values")
    assert [report.values for report in here.sensed("steady")] == [{"n": 1}, {"n": 2}]
    assert [len(report.faults) for report in here.sensed("faulty")] == [0, 1, 1, 0], "each fault is reported"
    here.quit()


def test_the_standby_is_asked_until_it_is_done_or_the_supervisor_is_back(
    tmp_path: Path,
) -> None:
    asked: list[float] = []

    def on_missed_heartbeats(seconds: float, hung_up: bool) -> bool:
        assert not hung_up
        asked.append(seconds)
        return len(asked) >= 3 and "heard" in here.events()

    here = Here(fast(tmp_path, standby_s=1.5), {}, on_missed_heartbeats)
    here.read_on()
    wait_for(lambda: len(asked) >= 2, "the standby to be asked")
    assert asked[1] > asked[0] >= 1.5
    here.send(Heartbeat(1.0, 7, "second"))
    wait_for(lambda: "heard" in here.events(), "the supervisor to be heard")
    assert here.agent.attempt == 7
    here.join()
    assert here.events() == ["started", "silent", "heard", "silent", "ended"]


def test_its_own_sleep_is_not_the_supervisors_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process is stopped, its clock runs on: here by far more than the agent waits for a heartbeat."""
    asleep_s = 0.0
    monkeypatch.setattr(
        "zslurm.aegis.agent.main.time", SimpleNamespace(monotonic=lambda: time.monotonic() + asleep_s)
    )
    here = Here(fast(tmp_path, standby_s=3600.0), {})
    here.read_on()
    for turns in (200, 400, 600):
        wait_for(lambda turns=turns: len(here.progress()) > turns, "progress")
        asleep_s += 1e6
    wait_for(lambda: len(here.progress()) > 800, "progress")
    here.quit()
    assert here.events() == ["started", "ended"]


def test_a_reader_that_does_not_read_holds_up_neither_commands_nor_the_standby(tmp_path: Path) -> None:
    here = Here(fast(tmp_path, standby_s=3600.0), {"fine": lambda at: Broken(Reading)}, stuffed=True)
    here.send(Command("clean_up", 1, attempt=1))
    here.quit()
