"""A test cluster whose nodes have files of their own, a profile that fits them, and the ordinary user's doctor."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests import forked
from tests.doctor.nodes import CLUSTER, Node
from tests.fake_sysfs import FakeNode, mi300x_pollara
from tests.on_slurm.cluster.rail_nodes import Trees
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from zslurm.doctor.checks.transport import RANK_VARIABLE
from zslurm.slurm.environment import node_name

# Stands in for a rank with a GPU: meets the others of its group in the folder that they share, as they do, and
# prints what RCCL would on its node.
RANK = """\
#!/bin/sh
: >"$1.came-$2"
while [ "$(ls "$1".came-* | wc -l)" -lt "$3" ]; do sleep 0.1; done
echo "$SLURMD_NODENAME: rank $2 of $3" >>"{directory}/ranks"
exec "{directory}/trees/$SLURMD_NODENAME/rank"
"""

PROFILE = CLUSTER | {
    "interface": "eth0",
    "rocm_version": "6.4.1",
    "peermem": True,
    # What the steps of this machine really have is enough here, however busy it is.
    "doctor": {
        "memlock_gib": 0.001,
        "open_files": 256,
        "processes": 64,
        "tmp_gib": 0.1,
        "write_mib_s": 0.001,
        "fsync_s": 60,
        "clock_skew_s": 30,
        "canary_s": 60,
        "check_s": 120,
    },
}
HOSTS = "\n".join(f"10.0.2.{10 + index} node{index}" for index in range(8))


class _Nodes:
    """The nodes of a cluster, by their numbers; one that a test asks for gets a separate tree."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        healthy = cluster.instance.directory / "healthy"
        if not healthy.exists():
            _node(mi300x_pollara(healthy))
        self._names, self._changed = cluster.node_names, dict[int, Node]()
        self._trees = Trees(directory, self._names, healthy)

    def __getitem__(self, index: int) -> Node:
        if index not in self._changed:
            tree = self._trees.copy(self._names[index])
            (tree / "proc/self/limits").unlink()  # which `_node` has made a link
            self._changed[index] = _node(FakeNode(tree))
        return self._changed[index]


def _node(fake: FakeNode) -> Node:
    node = Node(fake.root, fake)
    fake.write("etc/hosts", HOSTS)
    limits = node.root / "proc/self/limits"
    limits.unlink()
    limits.symlink_to("/proc/self/limits")  # the step's own
    return node


class Site:
    """Nodes with their trees, the profile that fits them, and the ordinary user's doctor."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        self.profile_file = directory / "config/zslurm/clusters/mi.yaml"
        self.profile_file.parent.mkdir(parents=True)
        self.profile()
        self.rank = directory / "rank"
        self.rank.write_text(RANK.format(directory=directory))
        self.rank.chmod(0o755)
        self.nodes = _Nodes(cluster, directory / "trees")
        (directory / "trees" / node_name() / "tmp").mkdir(parents=True)  # this machine's, the login node

    def profile(self, **changes: Any) -> None:
        self.profile_file.write_text(json.dumps({"cluster": PROFILE | changes, "slurm": {"partition": "batch"}}))

    @property
    def environment(self) -> dict[str, str]:
        variables = {
            "XDG_CONFIG_HOME": str(self.directory / "config"),
            "ZSLURM_SYSROOT": str(self.directory / "trees/%n"),
            RANK_VARIABLE: str(self.rank),
        }
        return self.cluster.forking(forked.OTHERS, variables)

    def doctor(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        done = self.cluster.zslurm(
            "doctor",
            "--cluster",
            "mi",
            *arguments,
            cwd=self.directory,
            env=self.environment | (env or {}),
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done

    def json(self, *arguments: str, trees: bool = True) -> dict[str, Any]:
        env = {} if trees else {"ZSLURM_SYSROOT": "/"}
        return dict(json.loads(self.doctor(*arguments, "--json", env=env).stdout))
