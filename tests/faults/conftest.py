"""What tests with faults share: nodes that can fall ill, the undisturbed run, and the table."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.checks import curve, spread_of_twins
from tests.faults.harness import NODES, PARTITION, FaultRun, Trainer
from tests.faults.nodes import FaultNodes
from tests.faults.table import Table
from tests.on_slurm.slurm_cluster import SlurmCluster
from tests.on_slurm.test_runs import User


@pytest.fixture
def site(slurm_cluster: SlurmCluster) -> Iterator[tuple[User, FaultNodes]]:
    """A user with a profile, and healthy nodes; jobs end and nodes come back afterwards."""
    directory, trees = slurm_cluster.user_dir("faults-test"), slurm_cluster.user_dir("faults-nodes")
    user = User(slurm_cluster, directory)
    user.zslurm("init", "--yes")
    try:
        yield user, FaultNodes(slurm_cluster, trees)
    finally:
        slurm_cluster.restore()
        if PARTITION in slurm_cluster.run(["sinfo", "--noheader", "-o", "%R"]).stdout.split():
            slurm_cluster.run_as_root(["scontrol", "delete", f"PartitionName={PARTITION}"])
        for place in (directory, trees):
            shutil.rmtree(place, ignore_errors=True)


class Undisturbed:
    """The runs to which nothing happens: each made once per session, when it is first asked for."""

    def __init__(self, place: Path, trainer: Trainer) -> None:
        self._place, self._trainer = place, trainer
        self._curves: dict[tuple[int, int], list[float]] = {}
        self._spread: float | None = None

    def curve(self, user: User, nodes: FaultNodes, ranks: tuple[int, int] = (NODES, 1)) -> list[float]:
        """The losses of one on so many nodes, with so many ranks on each."""
        if ranks not in self._curves:
            run = FaultRun(user, nodes, "undisturbed", trainer=self._trainer)
            run.submit(pace_s=0, nodes=ranks[0], slurm={"ranks_per_node": ranks[1]})
            assert run.wait_until_over()["outcome"] == "completed", run.story()
            self._curves[ranks] = curve(run.path)
            if ranks == (NODES, 1):
                ignored = shutil.ignore_patterns("checkpoints")
                shutil.copytree(run.path, self._place / "undisturbed", ignore=ignored)
                (self._place / "tokens.h5").write_bytes((user.directory / "tokens.h5").read_bytes())
        return self._curves[ranks]

    def spread(self) -> float:
        """How far its twins of one rank end up; see `checks.spread_of_twins`."""
        if self._spread is None:
            self._spread = spread_of_twins(self._place / "undisturbed", self._place / "tokens.h5", self._place)
        return self._spread


@pytest.fixture(scope="session")
def trainer(pytestconfig: pytest.Config) -> Trainer:
    """The real trainer for the matrix; a stand-in for the samples of it that `make test` runs."""
    return "stand-in" if "not faults" in pytestconfig.getoption("markexpr") else "real"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, trainer: Trainer) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"), trainer)


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """Collects what was measured; a run of the whole matrix writes it down."""
    rows = Table()
    yield rows
    rows.write_what_is_whole()
