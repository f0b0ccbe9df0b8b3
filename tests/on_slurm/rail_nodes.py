"""Test nodes with rails: each has a tree of files of its own, below a directory that all of them see."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fake_sysfs import FakeNode, mi300x_pollara
from tests.on_slurm.slurm_cluster import SlurmCluster

NICS = tuple(f"ionic_{index}" for index in range(8))


class RailNodes:
    """Eight MI300X and eight Pollara NICs on every node of a test cluster."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.directory = directory
        self.nodes: dict[str, FakeNode] = {}
        first = cluster.node_names[0]
        self.nodes[first] = mi300x_pollara(directory / first)
        for name in cluster.node_names[1:]:
            shutil.copytree(directory / first, directory / name, symlinks=True)
            self.nodes[name] = FakeNode(directory / name)

    @property
    def sysroot(self) -> str:
        """For ZSLURM_SYSROOT."""
        return f"{self.directory}/%n"

    def __getitem__(self, name: str) -> FakeNode:
        return self.nodes[name]
