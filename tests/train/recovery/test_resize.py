"""Another number of ranks in the same processes: what each rank owns comes from the copies in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.ranks import train_on
from tests.train.recovery.cluster import Cluster
from tests.train.recovery.test_recovery import all_output, losses, showing
from tests.train.runs import make_corpus, make_run
from tests.waiting import wait_for

STEPS = 12
CURVE = 1e-7
"""Relative difference of losses in fp64 on any number of ranks."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.h5")


def run_of(path: Path, corpus: Path, steps: int = STEPS) -> Path:
    return make_run(
        path, corpus, steps=steps, checkpoint={"every_steps": 4, "background": True}, parallel={"dtype": "fp64"}
    )


def test_without_a_spare_the_ranks_that_are_left_go_on_along_the_same_curve(corpus: Path, tmp_path: Path) -> None:
    expected = run_of(tmp_path / "undisturbed", corpus)
    assert train_on(expected, 4, local_size=1).returncode == 0
    run = run_of(tmp_path / "run", corpus)
    cluster = Cluster(run, 4, warm=0, faults={"1": "reduce_scatter:20:KILL"})
    with showing(cluster):
        lost = cluster.wait_lost()
        cluster.shrink(lost)
        outcome = cluster.outcome()
        assert outcome["event"] == "recovered", f"{outcome}\n{all_output(cluster)}"
        assert outcome["rolled_back"] <= 1
        assert cluster.finish() == {"0": 0, "2": 0, "3": 0}, all_output(cluster)
        assert losses(run) == pytest.approx(losses(expected), rel=CURVE)
        assert "on 3 ranks" in cluster.output("0")
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())
    assert checkpoints[-1] == f"step-{STEPS:08d}", "the ranks that are left save together"


def test_the_number_of_ranks_shrinks_and_grows_again_and_again_along_the_same_curve(
    corpus: Path, tmp_path: Path
) -> None:
    """Ranks that join get the state of the others, and can be lost like them."""
    steps, rounds = 36, 10
    expected = run_of(tmp_path / "undisturbed", corpus, steps)
    assert train_on(expected, 3, local_size=1).returncode == 0
    run = run_of(tmp_path / "run", corpus, steps)
    cluster = Cluster(run, 3, warm=1)
    cluster.allow(2)
    with showing(cluster):
        for number in range(1, rounds + 1):
            wait_for(cluster.is_whole, "a whole copy", every_s=0.01)
            lost = [(number * 2) % 3]  # rank 0 too
            cluster.kill(lost)
            cluster.shrink(lost)
            shrunk = cluster.outcome()
            assert shrunk["event"] == "recovered" and shrunk["rolled_back"] <= 1, (
                f"{shrunk}\n{all_output(cluster)}"
            )
            cluster.wait_warm(number)
            cluster.grow([f"w{number - 1}"])
            cluster.allow(3 * number + 3)
            grown = cluster.outcome()
            assert grown["event"] == "recovered", f"{grown}\n{all_output(cluster)}"
            assert grown["rolled_back"] == 0
            cluster.add_warm()
        cluster.allow(steps)
        assert set(cluster.finish().values()) == {0}, all_output(cluster)
    assert losses(run) == pytest.approx(losses(expected), rel=CURVE)


def test_the_ranks_train_on_without_a_process_that_is_lost_while_it_joins(corpus: Path, tmp_path: Path) -> None:
    expected = run_of(tmp_path / "undisturbed", corpus)
    assert train_on(expected, 2, local_size=1).returncode == 0
    run = run_of(tmp_path / "run", corpus)
    cluster = Cluster(run, 2, warm=1, faults={"w0": "regroup:1:KILL"})
    cluster.allow(4)
    with showing(cluster):
        cluster.wait_warm(1)
        wait_for(cluster.is_whole, "a whole copy", every_s=0.01)
        cluster.grow(["w0"])
        cluster.allow(8)
        assert cluster.wait_lost() == [2]
        cluster.stay(2)
        outcome = cluster.outcome()
        assert outcome["event"] == "recovered", f"{outcome}\n{all_output(cluster)}"
        assert outcome["rolled_back"] == 0
        cluster.allow(STEPS)
        assert cluster.finish() == {"0": 0, "1": 0}, all_output(cluster)
    assert losses(run) == losses(expected)
