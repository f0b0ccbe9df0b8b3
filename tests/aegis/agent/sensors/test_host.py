"""The host: memory, kills for want of it, zombies; by the job's own cgroup if there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aegis.contexts import context
from tests.fake_sysfs import FakeNode
from tests.waiting import wait_for
from zslurm.aegis.agent.sensors.host import Host, cgroups_of_job, oom_kills, zombies
from zslurm.aegis.types import Fault

V2 = "0::/system.slice/slurmstepd.scope/job_17/step_1/user/task_0"
SLUID = "0::/system.slice/slurmstepd.scope/sEKNKTV3WPV500/step_1/user/task_0"
V1 = "11:memory:/slurm/uid_1000/job_17/step_1/task_0\n4:cpuset:/slurm/uid_1000/job_17/step_1\n0::/"


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    fake = FakeNode(tmp_path / "root")
    memory(fake, 500)
    fake.write("proc/vmstat", "nr_free_pages 1\noom_kill 3")
    fake.write("proc/loadavg", "7.25 3.10 1.00 2/1234 99")
    return fake


def memory(node: FakeNode, available_gib: int) -> None:
    node.write("proc/meminfo", f"MemTotal: {1000 << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB")


def started(node: FakeNode) -> Host:
    host = Host(context(node.root))
    assert host.read().faults == ()
    return host


def told(faults: tuple[Fault, ...]) -> list[tuple[str, str, bool]]:
    return [(fault.kind, fault.role, fault.cleared) for fault in faults]


def test_what_is_measured(node: FakeNode) -> None:
    assert Host(context(node.root)).read().values == {
        "memory_free_gib": 500.0, "memory_gib": 1000.0, "oom_kills": 3, "load": 7.25,
    }  # fmt: skip


def test_low_memory_is_told_when_it_begins_and_ends(node: FakeNode) -> None:
    host = started(node)
    memory(node, 29)
    faults = host.read().faults
    assert told(faults) == [("memory_low", "advisory", False)]
    assert faults[0].line == "29.0 GiB of 1000 GiB of memory are free"
    assert host.read().faults == ()
    memory(node, 31)
    assert told(host.read().faults) == [("memory_low", "advisory", True)]


def test_a_kill_of_the_host_is_no_root_if_the_job_has_no_counter(node: FakeNode) -> None:
    host = started(node)
    node.write("proc/vmstat", "oom_kill 5")
    (fault,) = host.read().faults
    assert (fault.kind, fault.role, fault.scope, fault.node) == ("host_oom", "advisory", "node", "node0")
    assert fault.line == "the kernel killed 2 processes of the host: out of memory"
    assert host.read().faults == ()


@pytest.mark.parametrize(("own", "job"), [(V2, "job_17"), (SLUID, "sEKNKTV3WPV500")])
def test_a_kill_in_the_jobs_own_cgroup(node: FakeNode, own: str, job: str) -> None:
    node.write("proc/self/cgroup", own)
    events = f"sys/fs/cgroup/system.slice/slurmstepd.scope/{job}/memory.events"
    node.write(events, "low 0\nhigh 0\nmax 12\noom 1\noom_kill 0")
    host = started(node)
    node.write("proc/vmstat", "oom_kill 4")
    assert told(host.read().faults) == [("host_oom", "advisory", False)], "somebody else's process"
    node.write(events, "oom 2\noom_kill 1")
    node.write("proc/vmstat", "oom_kill 5")
    assert told(host.read().faults) == [("host_oom", "root", False)]


def test_cgroups_of_version_1_count_each_for_itself(node: FakeNode) -> None:
    node.write("proc/self/cgroup", V1)
    job = "sys/fs/cgroup/memory/slurm/uid_1000/job_17"
    for place_, count in (("", 0), ("/step_1", 1), ("/step_1/task_0", 2), ("/step_batch", 4)):
        node.write(f"{job}{place_}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}")
    assert oom_kills(node.root) == {"job": 7, "host": 3}
    host = started(node)
    node.write(f"{job}/step_2/task_5/memory.oom_control", "oom_kill 1")
    assert told(host.read().faults) == [("host_oom", "root", False)]


@pytest.mark.parametrize(
    ("text", "kind", "path"),
    [
        (V2, "v2", "sys/fs/cgroup/system.slice/slurmstepd.scope/job_17"),
        (SLUID, "v2", "sys/fs/cgroup/system.slice/slurmstepd.scope/sEKNKTV3WPV500"),
        (V1, "v1", "sys/fs/cgroup/memory/slurm/uid_1000/job_17"),
    ],
)
def test_where_the_job_is_counted(tmp_path: Path, text: str, kind: str, path: str) -> None:
    assert cgroups_of_job(tmp_path, text) == [(kind, tmp_path / path)]


@pytest.mark.parametrize(
    "text", ["", "0::/user.slice/session-1.scope", "garbage", ":::", "5:memory:/docker/job_x", "0::/system.slice"]
)
def test_outside_a_job(tmp_path: Path, text: str) -> None:
    assert cgroups_of_job(tmp_path, text) == []


@pytest.mark.parametrize(
    "meminfo", ["", "MemTotal: lots", "MemAvailable: 5 kB", "MemTotal: 0 kB\nMemAvailable: 0 kB"][:]
)
def test_what_cannot_be_read_is_unavailable(tmp_path: Path, meminfo: str) -> None:
    node = FakeNode(tmp_path / "root")
    node.write("proc/meminfo", meminfo)
    reading = Host(context(node.root)).read()
    assert (reading.ok, reading.faults) == (False, ())
    assert reading.why == f"{node.root}/proc/meminfo cannot be read"


def test_zombies_are_counted_where_there_are_many(node: FakeNode) -> None:
    def end(count: int) -> None:
        for pid in range(100, 200):
            node.write(f"proc/{pid}/stat", f"{pid} (a ) Z (b) {'Z' if pid < 100 + count else 'S'} 1 1 1")

    end(19)
    assert zombies(node.root / "proc", os.getuid()) == 19
    assert zombies(node.root / "proc", os.getuid() + 1) == 0
    host = Host(context(node.root))
    assert host.read().faults == ()
    end(20)
    said = [fault for _ in range(24) for fault in host.read().faults]
    assert told(tuple(said)) == [("zombies", "advisory", False)]


def test_a_real_zombie() -> None:
    before = zombies(Path("/proc"), os.getuid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    wait_for(lambda: zombies(Path("/proc"), os.getuid()) > before, "the zombie")
    child.wait()
