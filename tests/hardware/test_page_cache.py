"""The room of the page cache, by the machine and by control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_sysfs import FakeNode
from zslurm.hardware import page_cache

MIB = 1 << 20
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB"
UNLIMITED_V1 = "9223372036854771712"


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    node = FakeNode(tmp_path)
    node.write("proc/meminfo", MEMINFO)
    return node


def test_it_is_the_available_memory(node: FakeNode) -> None:
    assert page_cache.room(node.root) == 40 << 30


def test_a_control_group_above_bounds_it_less_the_pages_that_can_go(node: FakeNode) -> None:
    node.write("proc/self/cgroup", "0::/system.slice/job_7/step_0")
    job = "sys/fs/cgroup/system.slice/job_7"
    node.write(f"{job}/step_0/memory.max", "max")
    node.write(f"{job}/step_0/memory.current", "5")
    node.write(f"{job}/memory.max", str(1000 * MIB))
    node.write(f"{job}/memory.current", str(700 * MIB))
    node.write(f"{job}/memory.stat", f"anon 1\nfile 999\nactive_file {100 * MIB}\ninactive_file {200 * MIB}")
    assert page_cache.room(node.root) == 600 * MIB


def test_a_control_group_of_the_first_version_does_too(node: FakeNode) -> None:
    node.write("proc/self/cgroup", "9:cpuset:/x\n4:memory:/slurm/job_7\n0::/x")
    for group, limit in (("slurm", UNLIMITED_V1), ("slurm/job_7", str(1000 * MIB))):
        node.write(f"sys/fs/cgroup/memory/{group}/memory.limit_in_bytes", limit)
        node.write(f"sys/fs/cgroup/memory/{group}/memory.usage_in_bytes", str(1000 * MIB))
    node.write(
        "sys/fs/cgroup/memory/slurm/job_7/memory.stat",
        f"inactive_file 5\ntotal_active_file {10 * MIB}\ntotal_inactive_file {30 * MIB}",
    )
    assert page_cache.room(node.root) == 40 * MIB


def test_without_meminfo_it_is_not_known(tmp_path: Path) -> None:
    assert page_cache.room(tmp_path) is None
