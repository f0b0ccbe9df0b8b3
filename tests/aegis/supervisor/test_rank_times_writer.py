"""The file of step work times: what it holds, and when it is written."""

from __future__ import annotations

from pathlib import Path

from zslurm.aegis.protocol import ProgressReport, RankProgress, Stamp
from zslurm.aegis.supervisor.rank_times_writer import RankTimesWriter
from zslurm.run.metrics.rank_times import read_rank_times
from zslurm.run.run_dir import AttemptDir
from zslurm.train.progress import Phase

NODES = ("node0", "node1", "node1")


def report(stamp: Stamp, *rows: tuple[int, int, float], attempt: int = 1) -> ProgressReport:
    ranks = tuple(RankProgress(rank, 1, Phase.STEP, step, -1, 0.0, work_s=work) for rank, step, work in rows)
    return ProgressReport(stamp, attempt, ranks)


def test_times_are_those_of_the_steps_since_the_last_write(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "000001")
    attempt.path.mkdir()
    writer = RankTimesWriter(attempt, every_s=0.0)
    stamp = Stamp("node0", 1, 0.0, 0.0)
    writer.feed(report(stamp, (0, -1, 0.0)))
    assert not writer.write_if_due(NODES, 1e9), "no rank has made a step"
    writer.feed(report(stamp, (0, 9, 5.0), (1, 9, 10.0)))
    writer.feed(report(stamp, (2, 9, 10.0), attempt=7))
    assert writer.write_if_due(NODES, 1e9 + 1)
    found = read_rank_times(attempt)
    assert found is not None
    assert (found.nodes, found.seconds) == (NODES, (0.5, 1.0, None))
    writer.feed(report(stamp, (0, 19, 6.0), (1, 19, 20.0)))
    assert writer.write_if_due(NODES, 1e9 + 2)
    found = read_rank_times(attempt)
    assert found is not None
    assert found.seconds == (0.1, 1.0, None)
    assert not writer.write_if_due(NODES, 1e9 + 3), "nothing new"
    writer.feed(report(stamp, (0, 14, 2.0)))
    assert writer.write_if_due(NODES, 1e9 + 4), "it went back to a checkpoint"


def test_a_directory_that_is_gone_does_not_matter(tmp_path: Path) -> None:
    writer = RankTimesWriter(AttemptDir(tmp_path / "000001"), every_s=0.0)
    writer.feed(report(Stamp("node0", 1, 0.0, 0.0), (0, 9, 5.0)))
    writer.write_if_due(NODES, 1e9)


def test_it_is_not_written_before_it_is_due(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "000001")
    attempt.path.mkdir()
    writer = RankTimesWriter(attempt, every_s=1e9)
    writer.feed(report(Stamp("node0", 1, 0.0, 0.0), (0, 9, 5.0)))
    assert not writer.write_if_due(NODES, 0.0)
    assert not attempt.rank_times.exists()
