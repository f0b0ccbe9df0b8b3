"""nvidia-smi's CSV, and a node of H100s as checks see it."""

from __future__ import annotations

from pathlib import Path

from tests.doctor import samples
from tests.doctor.nodes import Node
from tests.fake_sysfs import h100_mlx5
from zslurm.doctor.check import Status
from zslurm.hardware.gpu_health import GpuProcess
from zslurm.hardware.nvidia_smi import parse

H100 = {"gpu_type": "h100", "gpu_family": "h100", "network": "infiniband", "nics": (), "rails_only": False}


def test_gpus_rows_and_processes_are_put_together() -> None:
    rows = "00000000:18:00.0, 0, 0, 0\n00000000:2A:00.0, 1, 1, 0"
    apps = "00000000:2A:00.0, 4242, 512, python, with a comma"
    idle, used = parse(samples.NVIDIA_IDLE, rows, apps)
    assert (idle.index, idle.pci, idle.uncorrectable, idle.vram_used) == (0, "0000:18:00.0", 0, 4 << 20)
    assert (idle.processes, idle.bad_pages) == ((), {"retired": 0, "pending": 0, "unreservable": 0})
    assert used.processes == (GpuProcess(4242, "python, with a comma", 512 << 20),)
    assert used.bad_pages == {"retired": 1, "pending": 1, "unreservable": 0}


def test_what_a_gpu_or_a_driver_does_not_have_is_none() -> None:
    (gpu,) = parse(samples.NVIDIA_NO_ECC, None, None)
    assert (gpu.uncorrectable, gpu.correctable, gpu.bad_pages, gpu.processes) == (None, None, None, None)


def test_a_node_of_h100s(tmp_path: Path) -> None:
    node = Node(tmp_path, h100_mlx5(tmp_path))
    answer = "\n".join(f"{index}, 00000000:{index:02X}:00.0, 4, {int(index == 6)}, 0" for index in range(8))
    node.program(
        "nvidia-smi",
        f'case "$1" in *query-gpu=*) echo "{answer}";; *remapped*) exit 2;; *) echo "";; esac',
    )
    ecc = node.check("gpu-ecc", **H100)
    assert (ecc.status, ecc.reason) == (Status.FAIL, "GPU 6: 1 uncorrectable error")
    assert node.check("gpu-driver", **H100).reason == "nvidia-smi answers"
    assert node.check("gpu-pages", **H100).status is Status.UNAVAILABLE
    assert node.check("gpu-idle", **H100).status is Status.PASS
