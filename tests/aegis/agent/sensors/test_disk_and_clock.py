"""Room for checkpoints, and clocks that jump."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.aegis.contexts import context
from zslurm.aegis.agent.sensor import NodeContext, Reading
from zslurm.aegis.agent.sensors.clock import Clock
from zslurm.aegis.agent.sensors.disk import Disk


def told(reading: Reading) -> list[tuple[str, str, str, bool]]:
    return [(fault.kind, fault.role, fault.scope, fault.cleared) for fault in reading.faults]


def disk(at: NodeContext) -> Disk:
    return Disk(at)


def test_enough_room(tmp_path: Path) -> None:
    reading = disk(context(tmp_path / "root", disk_free_gb=0.0)).read()
    assert reading.ok and not reading.faults
    assert reading.values["free_gb"] > 0


def test_low_room_is_told_when_it_begins_and_ends(tmp_path: Path) -> None:
    low, fine = (context(tmp_path / "root", disk_free_gb=wanted) for wanted in (1e9, 0.0))
    sensor = disk(low)
    assert told(sensor.read()) == [("disk_low", "advisory", "storage", False)]
    assert told(sensor.read()) == []
    sensor.context = fine
    assert told(sensor.read()) == [("disk_low", "advisory", "storage", True)]


def test_a_file_system_that_is_gone_and_comes_back(tmp_path: Path) -> None:
    at = context(tmp_path / "root", disk_free_gb=0.0)
    sensor = disk(at)
    at.run.checkpoints.rename(tmp_path / "away")
    reading = sensor.read()
    assert not reading.ok and reading.why == f"{at.run.checkpoints}: No such file or directory"
    assert told(reading) == [("storage_fault", "advisory", "storage", False)]
    assert told(sensor.read()) == []
    (tmp_path / "away").rename(at.run.checkpoints)
    assert told(sensor.read()) == [("storage_fault", "advisory", "storage", True)]


@pytest.mark.parametrize(("moved", "words"), [(-3600.0, "back by 3600.0 s"), (90.0, "forward by 90.0 s")])
def test_a_clock_that_jumps(tmp_path: Path, moved: float, words: str) -> None:
    offset = 0.0
    at = replace(context(tmp_path / "root"), now=lambda: time.monotonic() + 1e9 + offset)
    clock = Clock(at)
    assert clock.read().faults == ()
    assert clock.read().faults == ()
    offset = moved
    (fault,) = clock.read().faults
    assert (fault.kind, fault.role, fault.line) == ("clock_jump", "advisory", f"the clock jumped {words}")
    assert clock.read().faults == ()


def test_the_real_clock_does_not_jump(tmp_path: Path) -> None:
    clock = Clock(replace(context(tmp_path / "root"), now=time.time))
    assert [clock.read().faults for _ in range(3)] == [()] * 3
