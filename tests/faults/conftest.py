"""What tests with faults share: nodes that can fall ill, the undisturbed run, and the table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.checks import curve, spread_of_twins
from tests.faults.harness import PARTITION, FaultRun
from tests.faults.kept_results import commit, place
from tests.faults.nodes import FaultNodes
from tests.faults.table import Table
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User
from tests.train.ranks import train_from_server


@pytest.fixture
def site(slurm_cluster: SlurmCluster, samples: bool) -> Iterator[tuple[User, FaultNodes]]:
    """A user with a profile, and healthy nodes; jobs end and nodes come back afterwards.

    Faults stop and look at the very processes of a run, which are forked only for the samples: they stop none.
    """
    directory, trees = slurm_cluster.user_dir("faults-test"), slurm_cluster.user_dir("faults-nodes")
    user = User(slurm_cluster, directory, forks=samples)
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
    """The run to which nothing happens: made once per session, when it is first asked for."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._curve: list[float] | None = None
        self._spread: float | None = None

    def curve(self, user: User, nodes: FaultNodes) -> list[float]:
        """Its losses."""
        if self._curve is None:
            run = FaultRun(user, nodes, "undisturbed")
            run.submit(pace_s=0)
            assert run.wait_until_over()["outcome"] == "completed", run.story()
            self._curve = curve(run.path)
            shutil.copytree(run.path, self._place / "undisturbed", ignore=shutil.ignore_patterns("checkpoints"))
            (self._place / "tokens.h5").write_bytes((user.directory / "tokens.h5").read_bytes())
        return self._curve

    def spread(self) -> float:
        """How far its twins of one rank end up; see `checks.spread_of_twins`."""
        if self._spread is None:
            self._spread = spread_of_twins(self._place / "undisturbed", self._place / "tokens.h5", self._place)
        return self._spread


class UndisturbedRanks:
    """Runs to which nothing happens, by nodes and ranks of each, without Slurm: ranks that were forked."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._curves: dict[tuple[int, int], list[float]] = {}
        self._spread: float | None = None

    def curve(self, run: FaultRun, ranks: tuple[int, int]) -> list[float]:
        """The losses of a run that is configured as `run`."""
        if ranks not in self._curves:
            place = self._of(ranks)
            place.mkdir()
            settings = json.loads((run.path / "config.json").read_text())
            (self._place / "tokens.h5").write_bytes((run.user.directory / "tokens.h5").read_bytes())
            settings["data"]["path"] = str(self._place / "tokens.h5")
            (place / "config.json").write_text(json.dumps(settings))
            ended = train_from_server(place, ranks[0] * ranks[1], local_size=ranks[1])
            assert ended.returncode == 0, ended.stdout + ended.stderr
            self._curves[ranks] = curve(place)
        return self._curves[ranks]

    def spread(self, ranks: tuple[int, int]) -> float:
        """How far twins of one rank end up; see `checks.spread_of_twins`. They differ with the ranks in no way."""
        if self._spread is None:
            self._spread = spread_of_twins(self._of(ranks), self._place / "tokens.h5", self._place)
        return self._spread

    def _of(self, ranks: tuple[int, int]) -> Path:
        return self._place / f"{ranks[0]}x{ranks[1]}"


@pytest.fixture(scope="session")
def samples(pytestconfig: pytest.Config) -> bool:
    """Whether only the samples of the matrix run, as in `make test`."""
    return "not faults" in pytestconfig.getoption("markexpr")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="session")
def undisturbed_ranks(tmp_path_factory: pytest.TempPathFactory) -> UndisturbedRanks:
    return UndisturbedRanks(tmp_path_factory.mktemp("undisturbed-ranks"))


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """Collects what was measured, and writes it down."""
    commit()  # before files change while the tests run
    rows = Table(place())
    yield rows
    rows.write()
