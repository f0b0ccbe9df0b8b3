"""Test nodes with rails: each has a tree of files, below a directory that all of them see."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.fake_sysfs import FakeNode, mi300x_pollara
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster

NICS = tuple(f"ionic_{index}" for index in range(8))


class Trees:
    """A directory for each node: a link to one healthy tree of some 400 files, until a test changes it."""

    def __init__(self, directory: Path, names: Sequence[str], healthy: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory, self._healthy = directory, healthy
        for name in names:
            (directory / name).symlink_to(healthy)

    def copy(self, name: str) -> Path:
        """Give a node a separate tree; returns it."""
        place = self._directory / name
        place.unlink()
        subprocess.run(["cp", "-a", self._healthy, place], check=True)
        return place


class RailNodes:
    """Eight MI300X and eight Pollara NICs on every node of a test cluster."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        healthy = cluster.instance.directory / "healthy-rails"
        if not healthy.exists():
            mi300x_pollara(healthy)
        self.directory = directory
        self._trees = Trees(directory, cluster.node_names, healthy)
        self._changed: dict[str, FakeNode] = {}

    @property
    def sysroot(self) -> str:
        """For ZSLURM_SYSROOT."""
        return f"{self.directory}/%n"

    def __getitem__(self, name: str) -> FakeNode:
        if name not in self._changed:
            self._changed[name] = FakeNode(self._trees.copy(name))
        return self._changed[name]
