"""Test nodes that can fall ill: each has its own sysfs and /proc, its own kernel log and its own amd-smi.

Runs find them through public settings alone: ZSLURM_SYSROOT, aegis.sensors.kernel_log, aegis.sensors.amd_smi.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.doctor import samples
from tests.fake_sysfs import RAILS, paths
from tests.on_slurm.cluster.rail_nodes import NICS, RailNodes
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster

# Answers with what lies in the node's own directory, by the first word: `metric`, `bad-pages`, ...
_AMD_SMI = """\
#!/bin/sh
exec cat "{directory}/$SLURMD_NODENAME/amd-smi/$1.json"
"""


def gpu_address(index: int) -> str:
    """PCI address of a GPU, the same on every node."""
    return paths("a switch each", index)[0][-1]


class FaultNodes:
    """The nodes of a test cluster, all healthy at first."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.directory = directory
        self.rails = RailNodes(cluster, directory)
        self.amd_smi = directory / "amd-smi"
        self.amd_smi.write_text(_AMD_SMI.format(directory=directory))
        self.amd_smi.chmod(0o755)
        for name in cluster.node_names:
            node = self.rails[name]
            node.write("proc/meminfo", "MemTotal: 1584000000 kB\nMemAvailable: 1500000000 kB")
            node.write("proc/loadavg", "1.00 1.00 1.00 1/1000 100")
            self.count_oom_kills(name, 0)
            (directory / name / "kmsg").write_text("[    1.000000] Linux version 6.8.0-51-generic\n")
            (directory / name / "amd-smi").mkdir()
            self.count_ecc(name)
            for question, answer in (
                ("version", '[{"tool": "AMDSMI Tool", "version": "25.4.2", "rocm_version": "6.4.1"}]'),
                ("bad-pages", samples.bad_pages(RAILS)),
                ("process", "[]"),
                ("list", json.dumps([{"gpu": index, "bdf": gpu_address(index)} for index in range(RAILS)])),
            ):
                (directory / name / "amd-smi" / f"{question}.json").write_text(answer)

    def settings(self) -> dict[str, Any]:
        """Sections of a run file that make its nodes these: `cluster`, and `sensors` of `aegis`."""
        return {
            "cluster": {"network": "pollara", "nics": NICS, "env": {"ZSLURM_SYSROOT": self.rails.sysroot}},
            "sensors": {"kernel_log": f"{self.directory}/%n/kmsg", "amd_smi": str(self.amd_smi)},
        }

    def kernel_says(self, node: str, line: str) -> None:
        """A line more in a node's kernel log."""
        with (self.directory / node / "kmsg").open("a") as log:
            log.write(f"[{time.monotonic():12.6f}] {line}\n")

    def count_oom_kills(self, node: str, kills: int) -> None:
        """What a node's kernel counts."""
        self.rails[node].write("proc/vmstat", f"oom_kill {kills}")

    def count_ecc(self, node: str, *, gpu: int = 0, **counts: int) -> None:
        """What amd-smi counts on one GPU of a node: `uncorrectable`, `correctable`, `deferred`."""
        rows = [samples.metric_row(index, **(counts if index == gpu else {})) for index in range(RAILS)]
        new = self.directory / node / "amd-smi" / "metric.json.new"
        new.write_text(samples.metric(rows))
        new.replace(new.with_name("metric.json"))
