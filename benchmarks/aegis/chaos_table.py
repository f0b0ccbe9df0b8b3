"""The table of `benchmarks/chaos` on the Slurm of the tests (needs root): every contender, every fault.

Peers are compared if PEERS names a directory with their packages for the Python of the tests:
`pip install --no-deps --target DIRECTORY torchft-nightly nvidia-resiliency-ext`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.chaos.contenders import CONTENDERS
from benchmarks.chaos.plans import FAULTS, named, pairs
from benchmarks.chaos.report import page
from benchmarks.chaos.site import Site
from benchmarks.chaos.table import measure
from benchmarks.common import RESULTS, write_result
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster

_NODES = 4
_NOTE = "All nodes of this Slurm are on one machine. Slurm notices a dead node after 10 to 20 s, sites have 300 s."


class SlurmOfTests(Site):
    """The Slurm of the tests: this process can end its daemons."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        super().__init__(
            directory,
            python=str(cluster.installation().python),
            environment={"PYTHONPATH": os.environ.get("PEERS", "")},
        )
        self.cluster = cluster

    def why_not(self, fault: str) -> str | None:
        """Return why a fault cannot be injected here; None if it can."""
        return "all nodes are on one machine and share its loopback device" if fault == "link_down" else None

    def run(
        self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the person who submits jobs."""
        return self.cluster.run(
            argv, cwd=cwd or self.directory, env={**self.environment, **(env or {})}, check=False
        )

    def prepare(self, directory: Path) -> None:
        """Make the directory of a trial: jobs write into it."""
        self.cluster.restore()
        directory.mkdir(mode=0o777)
        directory.chmod(0o777)

    def strike(self, fault: str, node: str, job: str) -> None:
        """Inject a fault."""
        match fault:
            case "node_killed":
                self.cluster.kill_node(node)
            case "controller_lost":
                self.cluster.stop_controller()
            case "preemption":
                self.cluster.run_as_root(["scontrol", "requeue", job])
            case _:
                super().strike(fault, node, job)

    def undo(self, fault: str, node: str) -> None:
        """Undo a fault."""
        match fault:
            case "node_killed":
                self.cluster.start_node(node)
            case "controller_lost":
                self.cluster.start_controller()


def run(turns: int = 1, minutes: float = 120.0, plans: Sequence[str] = (), names: Sequence[str] = ()) -> None:
    """Measure and write results/chaos_table.json and its page."""
    chosen = [named(name) for name in plans or (*FAULTS, *(plan.name for plan in pairs()))]
    contenders = [each for each in CONTENDERS if each.name in names or not names]
    with SlurmCluster(nodes=_NODES) as cluster:
        cluster.zslurm("init", "--yes")
        site = SlurmOfTests(cluster, cluster.user_dir("chaos"))
        table = measure(site, contenders, chosen, turns, minutes, _NOTE)
    write_result("chaos_table", table)
    (RESULTS / "chaos_table.html").write_text(page(table))
