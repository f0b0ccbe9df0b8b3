"""Test nodes with rails: each has a tree of files of its own, below a directory that all of them see."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.fake_sysfs import FakeNode, mi300x_pollara
from tests.on_slurm.slurm_cluster import SlurmCluster

NICS = tuple(f"ionic_{index}" for index in range(8))


def trees(directory: Path, names: Sequence[str]) -> dict[str, FakeNode]:
    """The files of nodes of eight MI300X and eight Pollara NICs, alike; cp copies them in a tenth of the time."""
    first = mi300x_pollara(directory / names[0])
    for name in names[1:]:
        subprocess.run(["cp", "-a", first.root, directory / name], check=True)
    return {name: FakeNode(directory / name) for name in names}


class RailNodes:
    """Eight MI300X and eight Pollara NICs on every node of a test cluster."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.directory = directory
        self.nodes = trees(directory, cluster.node_names)

    @property
    def sysroot(self) -> str:
        """For ZSLURM_SYSROOT."""
        return f"{self.directory}/%n"

    def __getitem__(self, name: str) -> FakeNode:
        return self.nodes[name]
