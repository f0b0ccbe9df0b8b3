"""Nodes to check: a tree of files each, with stand-ins of the GPUs' tools in /opt/rocm/bin."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from tests.doctor import rccl_logs, samples
from tests.fake_sysfs import RAILS, FakeNode, mi300x_pollara
from zslurm.config.spec import ClusterSection
from zslurm.doctor.check import CheckOutcome, chosen_checks
from zslurm.doctor.checks.transport import RANK_VARIABLE
from zslurm.doctor.node import run_checks
from zslurm.hardware.node_sources import NodeTask, Sources

CLUSTER: dict[str, Any] = {
    "name": "mi",
    "launcher": "slurm",
    "gpus_per_node": RAILS,
    "gpu_type": "mi300x",
    "network": "pollara",
    "rails_only": True,
    "traffic_class": 104,
    "nics": [f"ionic_{index}" for index in range(RAILS)],
}

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {processes:<20} unlimited            processes
Max open files            {files:<20} 1048576              files
Max locked memory         {memlock:<20} unlimited            bytes"""

RCCL_HEADER = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 22\n#define NCCL_PATCH 3"
ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0102000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
storage0\t0000140A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
net-ionic_3\t0000640A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0"""
"""10.20/16 over storage0, 10.100/16 over rail 3, all else over eth0; columns of net/ipv4/fib_trie.c."""


class Node:
    """A healthy node; methods break it."""

    def __init__(self, root: Path, fake: FakeNode | None = None) -> None:
        self.root = root
        self.fake = fake or mi300x_pollara(root)
        self.limits()
        self.fake.write("opt/rocm/include/rccl/rccl.h", RCCL_HEADER)
        self.fake.write("proc/self/mounts", "/dev/sda1 / ext4 rw 0 0\nnas:/home /shared nfs4 rw 0 0")
        self.fake.write("proc/net/route", ROUTES)
        self.meminfo(1024)
        self.fake.write("etc/hosts", "10.20.0.9 nas\n10.0.2.10 node0 # the first\n10.0.2.11 node1")
        for place in ("dev/shm", "tmp", "sys/class/kfd/kfd/proc", "proc/1"):
            (root / place).mkdir(parents=True, exist_ok=True)
        self.process(1, "init", state="S (sleeping)")
        self.smi(
            metric=samples.metric([samples.metric_row(gpu) for gpu in range(RAILS)]),
            **{"bad-pages": samples.bad_pages(RAILS)},
            process=json.dumps(
                [
                    {"gpu": gpu, "process_list": [{"process_info": "No running processes detected"}]}
                    for gpu in range(RAILS)
                ]
            ),
            list="[]",
            version="[]",
        )
        self.libraries([f"ionic_{index}" for index in range(RAILS)])
        self.rccl_log(rccl_logs.PLUGIN)
        self.products(*[2e-5] * RAILS)
        self.program("nicctl", f"printf '%s' {shlex.quote(samples.NICCTL_QOS)}")

    def products(self, *seconds: float) -> None:
        """What a small product takes on each GPU, by a stand-in for the Python that has torch."""
        self.program("torch-python", f"echo '{json.dumps(seconds)}'")

    def rccl_log(self, log: str) -> None:
        """What RCCL prints in the ranks that the doctor starts here, which a script stands in for."""
        self.fake.write("rccl.log", log.rstrip("\n"))
        self.rank_program(f"cat {shlex.quote(str(self.root / 'rccl.log'))}")

    def rank_program(self, script: str) -> Path:
        """A program that takes the part of the doctor's ranks."""
        place = self.fake.write("rank", f"#!/bin/sh\n{script}")
        place.chmod(0o755)
        return place

    def limits(self, *, memlock: str = "unlimited", files: str = "1048576", processes: str = "unlimited") -> None:
        self.fake.write("proc/self/limits", LIMITS.format(memlock=memlock, files=files, processes=processes))

    def meminfo(self, available_gib: int) -> None:
        self.fake.write("proc/meminfo", f"MemTotal: {2048 << 20} kB\nMemAvailable: {available_gib << 20} kB")

    def smi(self, **answers: str) -> None:
        """What amd-smi answers to its first argument; what is not named stays."""
        for question, text in answers.items():
            self.fake.write(f"smi/{question}", text)
        answer = shlex.quote(str(self.root / "smi"))
        self.program("amd-smi", f'cat {answer}/"$1"')

    def rows(self, **rows: dict[str, Any]) -> None:
        """Some GPUs' rows of the metric: `gpu3={...}` are counts of `metric_row`."""
        self.smi(
            metric=samples.metric([samples.metric_row(gpu, **rows.get(f"gpu{gpu}", {})) for gpu in range(RAILS)])
        )

    def program(self, name: str, script: str) -> None:
        """A program of this node."""
        place = self.fake.write(f"opt/rocm/bin/{name}", f"#!/bin/sh\n{script}")
        place.chmod(0o755)

    def libraries(self, devices: list[str], warning: str = "") -> None:
        """What libibverbs lists."""
        listed = "".join(f"    {device:<16}\t{index:016x}\n" for index, device in enumerate(devices, 0x1AE34))
        warn = f"echo {shlex.quote(warning)} >&2; " if warning else ""
        self.program("ibv_devices", f"{warn}printf '%s' {shlex.quote(samples.IBV_DEVICES + listed)}")

    def process(self, pid: int, name: str, *, uid: int = 0, state: str = "S (sleeping)", **environ: str) -> None:
        """A process of /proc."""
        self.fake.write(
            f"proc/{pid}/status", f"Name:\t{name}\nState:\t{state}\nPPid:\t1\nUid:\t{uid}\t{uid}\t{uid}\t{uid}"
        )
        joined = "\0".join(f"{key}={value}" for key, value in environ.items())
        (self.root / f"proc/{pid}/environ").write_text(joined)

    def sources(
        self, task: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **cluster: Any
    ) -> Sources:
        """This node as a check sees it; `cluster` changes the profile."""
        section = ClusterSection.model_validate({**CLUSTER, **cluster})
        more = {"jobs": (), "directory": "/shared/runs"} | (task or {})
        base = {"SLURMD_NODENAME": "node0", RANK_VARIABLE: str(self.root / "rank")}
        return Sources(NodeTask(cluster=section, **more), self.root, {**base, **(environ or {})})

    def check(self, check: str, **options: Any) -> CheckOutcome:
        """One check's outcome."""
        outcome = run_checks(chosen_checks([check], []), self.sources(**options))[check]
        assert outcome is not None
        return outcome
