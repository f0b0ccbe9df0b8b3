"""Results on disk: row by row, whole at the end, readable after a kill; and the plan that fits into a time."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from zslurm.bench.measurement import MeasurementPlan, Point
from zslurm.bench.result import PARTIAL, BenchResult, MeasuredMachine, ResultWriter, read_result
from zslurm.bench.run.messages import FromRank, PointMeasured, Receiver, Sender
from zslurm.core.errors import ConfigError, NotFound

MACHINE = MeasuredMachine(
    cluster="local", nodes=["n0", "n1"], ranks_per_node=2, device="cpu", gpu=None, gpus_per_node=0,
    gpu_memory=1 << 30, cpu="x", cores=2,
)  # fmt: skip


def result() -> BenchResult:
    return BenchResult(
        benchmark="collectives", command=["zslurm"], machine=MACHINE, versions={"torch": "2"}, environment={},
        date="2026-11-23T00:00:00+00:00", options={},
    )  # fmt: skip


def test_a_finished_result_is_one_file_and_reads_back(tmp_path: Path) -> None:
    writer, written = ResultWriter(tmp_path / "new/r.json"), result()
    writer.begin(written)
    written.rows.append({"bytes": 4, "seconds": 1.0})
    writer.add(written.rows[0])
    written.complete = True
    writer.finish(written)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["r.json"]
    assert read_result(tmp_path / "new/r.json") == written


def test_a_killed_benchmark_leaves_its_rows_under_the_same_name(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path / "r.json")
    writer.begin(result())
    writer.add({"bytes": 4})
    writer.add({"bytes": 8})
    with writer.partial.open("a") as file:
        file.write('{"bytes": 1')  # cut in the middle of a row
    found = read_result(tmp_path / "r.json")
    assert (found.complete, found.rows) == (False, [{"bytes": 4}, {"bytes": 8}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a result"),
        ("[]", "not a result"),
        ("{}", "not a result"),
        ('{"schema_version": 99}', "of a newer"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_result(file)
    (tmp_path / f"s.json{PARTIAL}").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_result(tmp_path / "s.json")


def test_a_result_that_is_not_there_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        read_result(tmp_path / "none.json")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: .*--out"):
        ResultWriter(tmp_path / "file" / "r.json")


def test_a_limited_time_keeps_the_cheapest_points_in_their_order() -> None:
    plan = MeasurementPlan([Point({"n": index}, seconds) for index, seconds in enumerate((5.0, 1.0, 3.0, 2.0))])
    kept = plan.within(6.5)
    assert [point.values["n"] for point in kept.points] == [1, 2, 3]
    assert [skipped.point for skipped in kept.skipped] == [{"n": 0}]
    assert "more than the time that is left" in kept.skipped[0].reason
    assert plan.within(None) is plan


def test_long_messages_of_several_nodes_come_through_mixed_lines() -> None:
    streams = {f"n{index}": io.StringIO() for index in range(3)}
    rows = {name: [{"text": name * 900, "value": float("inf")}] for name in streams}
    sent = {
        name: FromRank(rank=0, start=1, message=PointMeasured(rows=each, index=2, seconds=0.5, expected=0.1))
        for name, each in rows.items()
    }
    for name, stream in streams.items():
        Sender({"SLURMD_NODENAME": name}, stream).send(sent[name])
    lines = [f"srun: {line}\n" for stream in streams.values() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) < 1024
    random.Random(1).shuffle(lines)
    receiver = Receiver()
    found = [message for line in ["a prolog's line\n", *lines] if (message := receiver.read(line))]
    assert dict(found) == sent
