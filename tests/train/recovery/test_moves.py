"""Ranks that move to another process at a step's boundary, as planned: no step is lost, and none is made twice."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.train.ranks import train_on
from tests.train.recovery.cluster import Cluster
from tests.train.recovery.test_recovery import all_output, losses, showing, surviving, tiny_run
from tests.train.runs import make_corpus, steps_of
from tests.waiting import wait_for


def test_a_rank_moves_at_a_boundary_and_no_step_is_lost(tmp_path: Path) -> None:
    """Rank 0, which writes the metrics; the process it leaves, and one that waited next to it, end in order."""
    corpus = make_corpus(tmp_path / "corpus.h5")
    undisturbed = tiny_run(tmp_path / "undisturbed", corpus, steps=30)
    assert train_on(undisturbed, 2, local_size=1).returncode == 0
    run = tiny_run(tmp_path / "run", corpus, steps=30)
    cluster = Cluster(run, 2, warm=2, faults={"0": "optimizer:3:STOP"})
    with showing(cluster):
        cluster.wait_warm(2)
        stopped = psutil.Process(cluster.processes["0"].pid)
        wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, "rank 0 in its third step")
        (left,) = cluster.move([0], ["w0"])
        stopped.resume()
        outcome = cluster.outcome()
        assert (outcome["event"], outcome["rolled_back"]) == ("recovered", 0), outcome
        (boundary,) = [event for event in cluster.events if event["event"] == "boundary"]
        assert boundary["step"] == outcome["step"]
        for name in (left, "w1"):
            cluster.processes[name].join(300)
            assert cluster.processes[name].exitcode == 0, all_output(cluster)
        surviving(cluster, run, losses(undisturbed))
    assert [row["step"] for row in steps_of(run)] == list(range(1, 31)), "each step was made once"
