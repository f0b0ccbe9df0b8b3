"""Another number of ranks in the same processes: what each rank owns comes from the copies in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.ranks import train_on
from tests.train.recovery.cluster import Cluster
from tests.train.recovery.test_recovery import all_output, losses, showing
from tests.train.runs import make_corpus, make_run

STEPS = 12
CURVE = 1e-7
"""Relative difference of losses in fp64 on any number of ranks."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.h5")


def run_of(path: Path, corpus: Path) -> Path:
    return make_run(
        path, corpus, steps=STEPS, checkpoint={"every_steps": 4, "background": True}, parallel={"dtype": "fp64"}
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
