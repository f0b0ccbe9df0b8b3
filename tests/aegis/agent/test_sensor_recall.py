"""What breaks while an agent is replaced is found by the next one, whichever sensor it is that sees it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aegis.contexts import NOW, context
from tests.fake_sysfs import FakeNode, mi300x_pollara
from tests.waiting import wait_for
from zslurm.aegis.agent.kernel_source.journal import Journal
from zslurm.aegis.agent.kernel_source.kmsg import Kmsg
from zslurm.aegis.agent.kernel_source.log_file import LogFile
from zslurm.aegis.agent.sensor import NodeContext, Sensor
from zslurm.aegis.agent.sensors import clock, gpu, host, kernel_log, nic
from zslurm.aegis.agent.sensors.gpu import GpuState
from zslurm.aegis.agent.sensors.nic import NicState
from zslurm.hardware.facts import read_facts

NICS = [f"ionic_{index}" for index in range(8)]
ECC = "amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!"

EVENTS = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_17/memory.events"


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    fake = mi300x_pollara(tmp_path / "root")
    fake.write("proc/self/cgroup", "0::/system.slice/slurmstepd.scope/job_17/step_1/user/task_0")
    fake.write(EVENTS, "oom_kill 3")
    fake.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 900 kB")
    fake.write("proc/vmstat", "oom_kill 3")
    (tmp_path / "kmsg").write_text(f"[    1.0] {ECC}\n")
    return fake


@pytest.fixture
def at(node: FakeNode, tmp_path: Path) -> NodeContext:
    settings = {"amd_smi": "off", "kernel_log": str(tmp_path / "kmsg")}
    return context(node.root, cluster={"nics": NICS}, **settings)


def handed_on(sensor: Sensor) -> Any:
    """Its memory, as a file has it."""
    return json.loads(json.dumps(sensor.memory()))


def replaced(sensor: Sensor, make: Any, at: NodeContext) -> Sensor:
    """The sensor of the next agent."""
    memory = handed_on(sensor)
    sensor.close()
    following = make(at)
    assert following is not None
    following.recall(memory)
    return following  # type: ignore[no-any-return]


def told(sensor: Sensor) -> list[tuple[str, str, bool]]:
    return [(fault.kind, fault.role, fault.cleared) for fault in sensor.read().faults]


def count_ecc(node: FakeNode, errors: int) -> None:
    address = read_facts(node.root).gpus[3].pci
    node.write(f"sys/bus/pci/devices/{address}/ras/umc_err_count", f"ue: {errors}\nce: 0")


def break_kernel(node: FakeNode) -> None:
    with (node.root.parent / "kmsg").open("a") as log:
        log.write(f"[   99.0] {ECC}\n")


BREAKS = [
    pytest.param(nic.make, lambda node: node.take_nic_down("ionic_3"), "nic_link_down", id="nic down"),
    pytest.param(nic.make, lambda node: node.remove_nic("ionic_3"), "nic_link_down", id="nic gone"),
    pytest.param(gpu.make, lambda node: count_ecc(node, 5), "gpu_ras_uncorrectable", id="ecc"),
    pytest.param(host.make, lambda node: node.write(EVENTS, "oom_kill 4"), "host_oom", id="oom"),
    pytest.param(kernel_log.make, break_kernel, "gpu_ras_uncorrectable", id="kernel log"),
]


@pytest.mark.parametrize(("make", "breaks", "kind"), BREAKS)
@pytest.mark.parametrize("seen_by_the_one_before", [False, True])
def test_what_broke_since_the_attempt_began_is_a_root_whoever_looks(
    node: FakeNode, at: NodeContext, make: Any, breaks: Any, kind: str, *, seen_by_the_one_before: bool
) -> None:
    """Also if the agent before saw it: it may have died before anybody heard of it."""
    count_ecc(node, 2)
    first = make(at)
    assert told(first) == []
    first.begin_attempt()
    breaks(node)
    if seen_by_the_one_before:
        assert (kind, "root", False) in told(first)
    second = replaced(first, make, at)
    assert told(second) == [(kind, "root", False)]
    assert told(second) == [], "once"
    third = replaced(second, make, at)
    assert told(third) == [(kind, "root", False)]
    third.close()


@pytest.mark.parametrize(("make", "breaks", "kind"), BREAKS)
def test_what_a_new_attempt_begins_with_is_not_told_of_it(
    node: FakeNode, at: NodeContext, make: Any, breaks: Any, kind: str
) -> None:
    count_ecc(node, 2)
    first = make(at)
    first.read()
    breaks(node)
    assert (kind, "root", False) in told(first)
    first.begin_attempt()
    following = replaced(first, make, at)
    faults = told(following)
    down = kind == "nic_link_down"
    assert faults == ([(kind, "advisory", False)] if down else []), "a link that is down is still named"
    following.close()


def test_a_link_that_came_back_meanwhile(node: FakeNode, at: NodeContext) -> None:
    first = nic.make(at)
    assert first is not None
    first.read()
    node.take_nic_down("ionic_3")
    first.read()
    node.bring_nic_up("ionic_3")
    assert told(replaced(first, nic.make, at)) in (
        [],
        [("nic_link_down", "root", False), ("nic_link_down", "root", True)],
    )


def test_a_link_that_came_up_in_the_attempt_and_went_down_again_meanwhile(node: FakeNode, at: NodeContext) -> None:
    node.take_nic_down("ionic_3")
    first = nic.make(at)
    assert first is not None
    first.read()
    node.bring_nic_up("ionic_3")
    first.read()
    node.take_nic_down("ionic_3")
    assert told(replaced(first, nic.make, at)) == [("nic_link_down", "root", False)]


def test_a_clock_that_jumped_meanwhile(tmp_path: Path) -> None:
    at = context(tmp_path / "root")
    first = clock.make(replace(at, now=time.time))
    assert told(first) == []
    jumped = replace(at, now=lambda: time.time() + 5.0)
    assert told(replaced(first, clock.make, jumped)) == [("clock_jump", "advisory", False)]


@pytest.mark.parametrize("make", [nic.make, gpu.make, host.make, clock.make, kernel_log.make])
@pytest.mark.parametrize(
    "memory",
    [7, "x", [], [1], {"a": 1}, {"ionic_0": {"downs": "x"}}, {"began": {"x": {}}, "seen": []}, {"job": "many"}],
)
def test_a_damaged_memory_is_refused_and_changes_nothing(at: NodeContext, make: Any, memory: Any) -> None:
    """What is refused raises nothing but ValueError; what happens to be readable must not break the next look."""
    sensor = make(at)
    assert sensor is not None
    try:
        sensor.recall(memory)
    except ValueError:
        assert told(sensor) == []
    else:
        sensor.read()
    sensor.close()


# --- the kernel log's position ----------------------------------------------------------------------------------


def test_a_log_that_was_rotated_meanwhile_is_read_to_its_end_and_then_the_next(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("old\n")
    source = LogFile(log)
    at = source.position()
    source.close()
    with log.open("a") as file:
        file.write("one\n")
    log.rename(tmp_path / "kern.log.1")
    log.write_text("two\n")
    again = LogFile(log, at)
    assert again.lines() == ["one", "two"]
    again.close()


def test_a_log_whose_rotated_part_is_gone_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("old\n")
    keeps = log.open()  # or the next file may get the same inode
    at = LogFile(log).position()
    log.unlink()
    log.write_text("two\n")
    assert LogFile(log, at).lines() == ["two"]
    keeps.close()


def test_a_log_that_was_not_there_yet_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    at = LogFile(log).position()
    log.write_text("one\n")
    assert LogFile(log, at).lines() == ["one"]


def test_half_a_line_is_read_again_as_a_whole(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("old\nha")
    source = LogFile(log, {"device": log.stat().st_dev, "inode": log.stat().st_ino, "offset": 0})
    assert source.lines() == ["old"]
    with log.open("a") as file:
        file.write("lf\n")
    assert LogFile(log, source.position()).lines() == ["half"]


@pytest.mark.parametrize("offset", [-1, 10**12, "x", None, 1.5])
def test_an_offset_that_cannot_be_is_the_beginning(tmp_path: Path, offset: Any) -> None:
    log = tmp_path / "kern.log"
    log.write_text("one\n")
    at = {"device": log.stat().st_dev, "inode": log.stat().st_ino, "offset": offset}
    assert LogFile(log, at).lines() == ["one"]


# --- drawn: agents are replaced at any time ---------------------------------------------------------------------

_NIC_STATES = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=12
).map(lambda steps: [NicState("port 1 is DOWN" if down else "", {"link_downed": sum(n for _, n in steps[: i + 1])})
                     for i, (down, _) in enumerate(steps)])  # fmt: skip


@given(_NIC_STATES, st.sets(st.integers(1, 11)))
def test_no_link_that_is_down_goes_unnoticed_however_often_agents_are_replaced(
    states: list[NicState], replacements: set[int]
) -> None:
    """The last word on a link is that of its present state, and a fault wherever it was up in this attempt."""
    began, last, down = states[0], states[0], False
    for index, now in enumerate(states[1:], start=1):
        before = began if index in replacements else last
        found = [change for change in nic.changes(before, now) if change.kind == "nic_link_down"]
        if index in replacements:
            down = False  # SensorFaults: what a first report does not name is over
        for change in found:
            down = not change.cleared
        last = now
        if began.trouble and not now.trouble:
            began = now  # as the sensor remembers it
        if not began.trouble:
            assert down == bool(now.trouble)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sets(st.integers(1, 11)))
def test_no_uncorrectable_error_goes_unnoticed_however_often_agents_are_replaced(
    grown: list[int], replacements: set[int]
) -> None:
    counts = [10 + sum(grown[: index + 1]) for index in range(len(grown))]
    began, last, seen = counts[0], counts[0], False
    for index, count in enumerate(counts[1:], start=1):
        before = began if index in replacements else last
        found = gpu.changes(GpuState(uncorrectable=before), GpuState(uncorrectable=count))
        seen = seen or bool(found)
        last = count
        assert seen == (count > began)


def test_the_time_of_a_fault_is_when_it_was_seen(node: FakeNode, at: NodeContext) -> None:
    first = nic.make(at)
    assert first is not None
    first.read()
    node.take_nic_down("ionic_3")
    (fault,) = replaced(first, nic.make, at).read().faults
    assert fault.time == NOW


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg may not be read here")
def test_the_real_kmsg_is_read_on_behind_a_record() -> None:
    source = Kmsg(Path("/dev/kmsg"))
    at = source.position()
    source.close()
    assert isinstance(at["record"], int)
    again = Kmsg(Path("/dev/kmsg"), {**at, "record": at["record"] - 3})
    assert again.lines() is not None
    now = again.position()["record"]
    assert isinstance(now, int)
    assert now >= at["record"]
    again.close()
    other_boot = Kmsg(Path("/dev/kmsg"), {"boot": "another", "record": 0})
    assert len(other_boot.lines()) < 50, "numbers of another boot mean nothing"
    other_boot.close()


_WHEN = 1_700_000_000.5


@pytest.mark.parametrize("at", [None, {}, {"since": "x"}, {"since": -1.0}, {"since": 4e9}, {"since": _WHEN}])
def test_the_journal_is_read_on_from_the_time_of_the_last_look(tmp_path: Path, at: dict[str, Any] | None) -> None:
    called, program = tmp_path / "called", tmp_path / "journalctl"
    old = "[ 1.0] node0 kernel: old"
    follow = f'echo "$*" > {called}; exec sleep 60'
    program.write_text(f'#!/bin/sh\ncase "$*" in *-f*) {follow};; *) echo "{old}";; esac\n')
    program.chmod(0o755)
    source = Journal(str(program), {"PATH": "/usr/bin:/bin"}, 30.0, at)
    wait_for(lambda: called.exists() and called.read_text(), "journalctl to be called")
    again = at == {"since": _WHEN}
    assert ("--no-tail --since=@1700000000" if again else "-n 0") in called.read_text()
    position = source.position()
    assert position == at if again else set(position) == {"since"}
    source.close()
