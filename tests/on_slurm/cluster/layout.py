"""Where a test cluster keeps its files: one directory under /tmp, named here and nowhere else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.checkout import ROOT

PARENT = Path("/tmp")
"""Not TMPDIR: the path of munge's socket must be short, and `down` must find what another shell started."""

PREFIX = "zslurm-cluster-"


@dataclass(frozen=True)
class Instance:
    """What another process has to know about a cluster in order to use it or to clean it up."""

    directory: Path
    nodes: int
    gpus_per_node: int
    accounting: bool
    owner_pid: int | None
    """The process that ends with the cluster (pytest); None for one that a person started with `up`."""
    owner_started: int | None
    """The owner's start in clock ticks since boot: process ids are used again."""
    checkout: str = ""
    """The checkout whose tests or whose `up` started it."""

    @classmethod
    def create(cls, *, nodes: int, gpus_per_node: int, accounting: bool, owner_pid: int | None) -> Instance:
        """Make a fresh directory and write the instance's file into it."""
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
        directory.chmod(0o755)
        started = None if owner_pid is None else started_at_tick(owner_pid)
        instance = cls(directory, nodes, gpus_per_node, accounting, owner_pid, started, str(ROOT))
        record = {name: value for name, value in asdict(instance).items() if name != "directory"}
        instance.file.write_text(json.dumps(record), encoding="utf-8")
        for name in ("etc", "spool", "log", "run", "dev", "munge", "user"):
            (directory / name).mkdir(mode=0o755)
        for name in ("state", "database"):
            (directory / name).mkdir(mode=0o700)
        return instance

    @classmethod
    def all(cls) -> list[Instance]:
        """Every instance on this machine, half-made ones included. Only root's directories are believed."""
        found = []
        for directory in sorted(PARENT.glob(f"{PREFIX}*")):
            if directory.is_symlink() or not directory.is_dir() or directory.stat().st_uid != 0:
                continue
            try:
                record = json.loads((directory / "cluster.json").read_text(encoding="utf-8"))
                found.append(cls(directory=directory, **record))
            except (OSError, ValueError, TypeError):
                found.append(cls(directory, 0, 0, False, owner_pid=0, owner_started=0))
        return found

    @property
    def abandoned(self) -> bool:
        """Whether the process that the cluster was to end with is gone."""
        return self.owner_pid is not None and started_at_tick(self.owner_pid) != self.owner_started

    @property
    def id(self) -> str:
        """A word that names this cluster among all: it marks processes and lines of /etc/hosts."""
        return self.directory.name.removeprefix(PREFIX)

    @property
    def cluster_name(self) -> str:
        """Slurm's ClusterName; accounting wants lower case, and mkdtemp's random part has no other."""
        return f"z{self.id}"

    @property
    def node_names(self) -> list[str]:
        return [f"node{index}" for index in range(self.nodes)]

    @property
    def file(self) -> Path:
        return self.directory / "cluster.json"

    def claim_ports(self, ports: Sequence[int]) -> None:
        """Note which ports the daemons are going to use."""
        (self.directory / "ports").write_text(" ".join(map(str, ports)), encoding="ascii")

    def claimed_ports(self) -> list[int]:
        """The ports noted; none in a directory that is half made or half gone."""
        try:
            return [int(word) for word in (self.directory / "ports").read_text(encoding="ascii").split()]
        except OSError:
            return []

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    @property
    def impatient_conf(self) -> Path:
        """The same for commands that at once give up a controller that refuses connections, not after 4 s."""
        return self.directory / "etc" / "impatient.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.directory / "etc" / "slurmdbd.conf"

    @property
    def munge_socket(self) -> Path:
        return self.directory / "munge" / "socket"

    @property
    def database_socket(self) -> Path:
        return self.directory / "database" / "mysqld.sock"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def user(self) -> Path:
        """What belongs to the ordinary user: home, tmp and the directories of tests."""
        return self.directory / "user"


def started_at_tick(pid: int) -> int | None:
    """When a live process started, in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def this_process() -> int:
    """The owner that a cluster of this process gets."""
    return os.getpid()
