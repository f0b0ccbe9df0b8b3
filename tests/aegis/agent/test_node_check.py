"""A spare is looked at before it is used: GPUs, foreign memory, rails, memory, the checkpoint directory."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.aegis.contexts import context
from tests.doctor import samples
from tests.doctor.nodes import CLUSTER, Node
from tests.fake_sysfs import RAILS
from zslurm.aegis.agent.command_handlers import Handled, handle
from zslurm.aegis.agent.node_check import Health, check_node
from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.protocol import Command
from zslurm.hardware.facts import read_facts


@pytest.fixture
def node(tmp_path: Path) -> Node:
    spare = Node(tmp_path / "root")
    memory(spare, 900)
    return spare


def memory(node: Node, available_gib: int) -> None:
    node.fake.write("proc/meminfo", f"MemTotal: {1000 << 20} kB\nMemAvailable: {available_gib << 20} kB")


def at(node: Node, **settings: Any) -> NodeContext:
    wanted: dict[str, Any] = {"cluster": CLUSTER, "disk_free_gb": 0.0} | settings
    return context(node.root, **wanted)


def problems(node: Node, **settings: Any) -> tuple[str, ...]:
    return check_node(at(node, **settings)).problems


def test_a_healthy_spare(node: Node) -> None:
    assert check_node(at(node)) == Health(problems=(), notes=())


def test_a_gpu_is_missing(node: Node) -> None:
    address = read_facts(node.root).gpus[7].pci
    shutil.rmtree((node.root / "sys/bus/pci/devices" / str(address)).resolve())
    (node.root / "sys/bus/pci/devices" / str(address)).unlink()
    shutil.rmtree(node.root / "sys/class/kfd/kfd/topology/nodes/9")
    assert "gpu-count: 7 of 8 GPUs are there" in problems(node)


def test_memory_of_somebody_else_is_in_use(node: Node) -> None:
    node.process(4242, "python", SLURM_JOB_ID="99")
    node.fake.write("sys/class/kfd/kfd/proc/4242/vram_10003", str(100 << 30))
    assert problems(node) == ("gpu-idle: 1 process holds GPU memory: 4242",)


@pytest.mark.parametrize(
    ("held", "job", "answer"),
    [
        (100 << 30, "99", (False, "1 process holds GPU memory: 4242", {})),
        (100 << 30, "7", (True, "", {})),  # of this very job
        (0, "99", (True, "", {})),  # it has merely opened the driver
    ],
)
def test_a_former_job_s_process_that_holds_gpu_memory_is_found_before_the_start(
    node: Node, held: int, job: str, answer: Handled
) -> None:
    """Of a job that was cancelled, whose container is still there."""
    node.process(4242, "python", SLURM_JOB_ID=job)
    node.fake.write("sys/class/kfd/kfd/proc/4242/vram_10003", str(held))
    node.fake.write("sys/class/kfd/kfd/proc/4242/vram_51110", "0")
    here = at(node)
    own = replace(here, environ={**here.environ, "SLURM_JOB_ID": "7"})
    assert handle(own, Command("gpus_idle")) == answer


def test_memory_that_no_process_holds_is_in_use(node: Node) -> None:
    node.rows(gpu3={"used_mb": 150 << 10})
    assert problems(node) == ("gpu-idle: memory is in use and no process holds it: GPU 3: 150 GiB",)


def test_a_gpu_counts_errors(node: Node) -> None:
    node.rows(gpu3={"uncorrectable": 1})
    assert problems(node) == ("gpu-ecc: GPU 3: 1 uncorrectable error (UMC)",)


def test_a_rail_is_down(node: Node) -> None:
    node.fake.take_nic_down("ionic_5")
    (problem,) = problems(node)
    assert problem.startswith("nics: ") and "ionic_5" in problem


def test_a_rail_is_missing(node: Node) -> None:
    node.fake.remove_nic("ionic_5")
    assert any(problem.startswith("nics: ") and "ionic_5" in problem for problem in problems(node))


def test_host_memory_is_in_use(node: Node) -> None:
    memory(node, 10)
    assert problems(node) == ("memory: 10.0 GiB of 1000 GiB of memory are free",)


def test_the_checkpoint_directory_cannot_be_reached(node: Node) -> None:
    spare = at(node)
    spare.run.checkpoints.rmdir()
    assert check_node(spare).problems == (f"checkpoints: {spare.run.checkpoints}: No such file or directory",)


def test_a_full_file_system_is_no_fault_of_the_node(node: Node) -> None:
    health = check_node(at(node, disk_free_gb=1e9))
    assert health.problems == ()
    (note,) = health.notes
    assert note.startswith("checkpoints: ")


def test_a_shared_file_system_that_fails_is_no_fault_of_the_node(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare, real = at(node), os.statvfs

    def fails(path: Path) -> os.statvfs_result:
        if path == spare.run.checkpoints:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(os, "statvfs", fails)
    assert check_node(spare) == Health((), (f"checkpoints: {spare.run.checkpoints}: Input/output error",))


def test_what_cannot_be_found_out_is_a_note(node: Node) -> None:
    (node.root / "proc/meminfo").unlink()
    health = check_node(at(node))
    assert health == Health((), (f"memory: {node.root}/proc/meminfo cannot be read",))


def test_a_wedged_driver_is_a_problem(node: Node) -> None:
    node.program("amd-smi", "exec sleep 600")
    cluster = CLUSTER | {"doctor": {"canary_s": 0.2, "check_s": 60.0}}
    health = check_node(at(node, cluster=cluster))
    assert any("did not answer within 0.2 s" in words for words in (*health.problems, *health.notes))


def test_the_setting_of_amd_smi_is_heeded(node: Node, tmp_path: Path) -> None:
    node.rows(gpu3={"uncorrectable": 1})
    assert problems(node, amd_smi="off") == ()
    other = tmp_path / "amd-smi-of-node0"
    healthy = samples.metric([samples.metric_row(gpu) for gpu in range(RAILS)])
    other.write_text(f"#!/bin/sh\ncat <<'END'\n{healthy}\nEND\n")
    other.chmod(0o755)
    assert problems(node, amd_smi=str(tmp_path / "amd-smi-of-%n")) == ()


def test_a_machine_without_gpus_and_nics(tmp_path: Path) -> None:
    (tmp_path / "root/proc").mkdir(parents=True)
    health = check_node(context(tmp_path / "root", disk_free_gb=0.0))
    assert health.problems == ()


def test_zombies_of_a_user_are_no_reason_to_refuse_a_node(node: Node) -> None:
    for pid in range(5000, 5030):
        node.fake.write(f"proc/{pid}/stat", f"{pid} (python) Z 1 " + "0 " * 48)
    health = check_node(at(node))
    assert health.problems == ()
    assert any("30 zombies of this user" in note for note in health.notes), health
