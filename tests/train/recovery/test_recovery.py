from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from tests.train.ranks import Ranks, train_on
from tests.train.recovery.cluster import Cluster
from tests.train.runs import make_corpus, make_run, steps_of
from tests.waiting import wait_for
from zslurm.train.errors import ConfigError
from zslurm.train.recovery.watcher import REPLACED

STEPS = 12
LONG_S = 7200
"""Limit of the test with 200 kills, which takes ten minutes and more beside others."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.h5")


def tiny_run(path: Path, corpus: Path, *, steps: int = STEPS) -> Path:
    return make_run(path, corpus, steps=steps, checkpoint={"every_steps": 4, "background": True})


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run on four ranks that nothing happens to, by step."""
    run = tiny_run(tmp_path_factory.mktemp("undisturbed") / "run", corpus)
    ended = train_on(run, 4, local_size=1)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return losses(run)


def losses(run: Path) -> dict[int, float]:
    """The loss of each step; of several lines the last counts."""
    return {row["step"]: row["loss"] for row in steps_of(run)}


def all_output(cluster: Cluster) -> str:
    return "\n".join(f"--- {name}\n{cluster.output(name)}" for name in cluster.processes)


def recover_once(cluster: Cluster, lost: int = 1) -> dict[str, Any]:
    """Replace whoever dies first by warm processes; the outcome."""
    cluster.wait_warm(lost)
    ranks = cluster.wait_lost(lost)
    cluster.replace(ranks, [f"w{number}" for number in range(len(ranks))])
    return cluster.outcome()


SAMPLE = [("reduce_scatter:20", "0")]
ALL = [
    ("forward:9", "0"),
    ("all_reduce:12", "3"),
    ("reduce_scatter:8", "2"),
    ("all_gather:8", "1"),
    ("optimizer:5", "2"),
    ("save:1", "3"),
    ("save:1", "0"),
]


def surviving(cluster: Cluster, run: Path, undisturbed: dict[int, float]) -> None:
    """The run ends in order, with the losses of one that nothing happened to."""
    codes = cluster.finish()
    assert set(codes.values()) == {0}, all_output(cluster)
    assert losses(run) == undisturbed


@contextmanager
def showing(cluster: Cluster) -> Iterator[None]:
    """End the processes, and show what they printed if the block fails."""
    try:
        yield
    except BaseException:
        cluster.show_stacks()
        cluster.stop()
        print(all_output(cluster))
        raise
    cluster.stop()


@pytest.mark.parametrize(
    ("fault", "rank"), [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.soak) for case in ALL)]
)
def test_a_rank_that_is_killed_is_replaced_and_no_bit_of_any_loss_changes(
    corpus: Path, tmp_path: Path, undisturbed: dict[int, float], fault: str, rank: str
) -> None:
    run = tiny_run(tmp_path / "run", corpus)
    cluster = Cluster(run, 4, faults={rank: f"{fault}:KILL"})
    with showing(cluster):
        outcome = recover_once(cluster)
        assert outcome["event"] == "recovered", outcome
        surviving(cluster, run, undisturbed)


@pytest.mark.soak
def test_two_ranks_that_do_not_keep_each_others_copies_are_replaced_together(corpus: Path, tmp_path: Path) -> None:
    expected = tiny_run(tmp_path / "undisturbed", corpus, steps=300)
    assert train_on(expected, 4, local_size=1).returncode == 0
    run = tiny_run(tmp_path / "run", corpus, steps=300)
    cluster = Cluster(run, 4, warm=2)
    with showing(cluster):
        cluster.wait_warm(2)
        wait_for(lambda: len(losses(run)) > 2, "steps", every_s=0.01)
        cluster.kill([0, 2])
        outcome = recover_once(cluster, lost=2)
        assert outcome["event"] == "recovered", outcome
        surviving(cluster, run, losses(expected))


@pytest.mark.soak
def test_collectives_in_two_levels_are_made_anew(corpus: Path, tmp_path: Path) -> None:
    def two_level(path: Path) -> Path:
        return make_run(
            path, corpus, steps=STEPS, checkpoint={"background": True}, parallel={"collectives": "two_level"}
        )

    expected = two_level(tmp_path / "undisturbed")
    assert train_on(expected, 4, local_size=2).returncode == 0
    run = two_level(tmp_path / "run")
    cluster = Cluster(run, 4, local_size=2, faults={"1": "forward:8:KILL"})
    with showing(cluster):
        outcome = recover_once(cluster)
        assert outcome["event"] == "recovered", outcome
        surviving(cluster, run, losses(expected))


def test_a_rank_and_its_buddy_cannot_both_be_lost_and_the_reason_names_them(corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", corpus, steps=300)
    cluster = Cluster(run, 4, warm=2)
    with showing(cluster):
        cluster.wait_warm(2)
        wait_for(lambda: len(losses(run)) > 2, "steps", every_s=0.01)
        cluster.kill([1, 2])
        outcome = recover_once(cluster, lost=2)
        assert outcome["event"] == "failed"
        assert "rank 1 and its buddy, rank 2, were both lost" in outcome["reason"]
        codes = cluster.finish()
        assert set(codes.values()) == {1}, "every rank ends, and the supervisor restarts the run"


@pytest.mark.soak
@pytest.mark.parametrize("point", ["regroup:1", "restore:1"])
def test_a_rank_that_is_lost_during_a_recovery_is_replaced_by_the_next_one(
    corpus: Path, tmp_path: Path, undisturbed: dict[int, float], point: str
) -> None:
    run = tiny_run(tmp_path / "run", corpus)
    faults = {"0": "forward:9:KILL", "2": f"{point}:KILL"}
    cluster = Cluster(run, 4, warm=2, faults=faults)
    with showing(cluster):
        cluster.wait_warm(2)
        lost = cluster.wait_lost()
        cluster.replace(lost, ["w0"])
        again = cluster.wait_lost()
        cluster.replace(again, ["w1"])
        outcome = cluster.outcome()
        assert outcome["event"] == "recovered", outcome
        surviving(cluster, run, undisturbed)


def test_a_rank_that_froze_touches_nothing_when_it_wakes_up_after_it_was_replaced(
    corpus: Path, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    run = tiny_run(tmp_path / "run", corpus)
    cluster = Cluster(run, 4, faults={"0": "optimizer:6:STOP"})
    with showing(cluster):
        cluster.wait_warm(1)
        frozen = cluster.processes["0"]
        wait_for(lambda: psutil.Process(frozen.pid).status() == psutil.STATUS_STOPPED, "rank 0 to freeze")
        cluster.replace([0], ["w0"])
        assert cluster.outcome()["event"] == "recovered"
        surviving(cluster, run, undisturbed)
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        os.kill(frozen.pid, signal.SIGCONT)
        frozen.join(60)
        assert frozen.exitcode == REPLACED
        after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        said = run / "output-0"
        assert "0 is no member of generation 1: another process has taken its place" in said.read_text()
        assert before | {said: b""} == after | {said: b""}


@pytest.mark.soak
@pytest.mark.timeout(LONG_S)
def test_two_hundred_kills_at_random_in_one_run(corpus: Path, tmp_path: Path) -> None:
    """A rank or two that are no pair, whenever and wherever it hits them; TEST_KILLS makes them fewer.

    All buddies have a whole copy again before the next one: before that a lost rank restarts the run.
    """
    kills = int(os.environ.get("TEST_KILLS", "200"))
    steps = kills * 6
    expected = tiny_run(tmp_path / "undisturbed", corpus, steps=steps)
    assert Ranks(expected, 4, local_size=1).wait(LONG_S).returncode == 0
    run = tiny_run(tmp_path / "run", corpus, steps=steps)
    random, cluster = Random(7), Cluster(run, 4, warm=2)
    cluster.allow(1)

    def whole() -> bool:
        cluster.allow(len(losses(run)) + 1)  # a copy may take longer than a step
        return cluster.is_whole()

    with showing(cluster):
        warm = ["w0", "w1"]
        for _ in range(kills):
            cluster.wait_warm(cluster.warm_made)
            wait_for(whole, "copies that are whole", every_s=0.02)
            assert len(losses(run)) < steps - 3, "there are steps left for further kills"
            cluster.allow(len(losses(run)) + 3)
            time.sleep(random.uniform(0, 0.2))
            rank = random.randrange(4)
            lost = [rank, (rank + 2) % 4] if random.random() < 0.1 else [rank]
            cluster.kill(lost)
            lost = cluster.wait_lost(len(lost))
            cluster.replace(lost, [warm.pop(0) for _ in lost])
            warm += [cluster.add_warm() for _ in lost]
            outcome = cluster.outcome()
            assert outcome["event"] == "recovered", outcome
        cluster.allow(steps)
        surviving(cluster, run, losses(expected))


def test_one_rank_has_no_buddy_and_trains_on(corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", corpus, steps=2)
    cluster = Cluster(run, 1, warm=0)
    with showing(cluster):
        assert cluster.finish() == {"0": 0}
        assert "one rank has no buddy" in cluster.output("0")
    assert list(losses(run)) == [1, 2]


def test_copies_that_do_not_fit_are_refused_with_what_they_take(corpus: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=2, recovery={"memory_gb": 1e-5})
    cluster = Cluster(run, 1, warm=0)
    with showing(cluster):
        assert cluster.finish() == {"0": ConfigError.exit_code}
        (line,) = [line for line in cluster.output("0").splitlines() if line.startswith("error: ")]
        assert "recovery.memory_gb: 1e-05 GiB, but copies of the state" in line
        assert "set aegis.recovery: restart" in line


def test_by_default_a_run_whose_copies_do_not_fit_trains_without_them(corpus: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=2, recovery={"memory_gb": 1e-5})
    cluster = Cluster(run, 1, warm=0, recovery="auto")
    with showing(cluster):
        assert cluster.finish() == {"0": 0}
        assert "recovery: off, faults restart the ranks: recovery.memory_gb: 1e-05 GiB" in cluster.output("0")
    assert list(losses(run)) == [1, 2]
