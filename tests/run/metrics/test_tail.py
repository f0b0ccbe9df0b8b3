"""The newest rows of a metrics file are what reading all of it would find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zslurm.run.metrics.tail import newest_rows
from zslurm.train import jsonl
from zslurm.train.jsonl import JsonLinesWriter


def step(number: int, seconds: float = 1.0) -> dict[str, object]:
    return {"kind": "step", "step": number, "loss": 4.0, "step_time_s": seconds}


def write(path: Path, *rows: dict[str, object]) -> None:
    with JsonLinesWriter(path) as lines:
        for row in rows:
            lines.append(row)


def test_the_last_row_of_each_kind_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"kind": "evaluation", "step": 1, "loss": 5.0}, *[step(n) for n in range(1, 31)])
    write(path, {"kind": "checkpoint", "step": 20, "state": "COMMITTED"})
    write(path, {"kind": "checkpoint", "step": 30, "state": "REQUESTED"}, *[step(n, 9.0) for n in (30, 31)])
    found = newest_rows(path)
    assert (found.step["step"], found.evaluation["step"], found.checkpoint["step"]) == (31, 1, 20)
    assert (len(found.step_times), found.step_time_s) == (10, 1.0), "two slow ones change nothing"


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_it_does_not_matter_how_the_file_is_cut_into_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK", block)
    path = tmp_path / "metrics.jsonl"
    write(path, *[step(n, n / 10) for n in range(1, 25)], {"kind": "evaluation", "step": 24, "loss": 3.0})
    with path.open("ab") as file:
        file.write(b'{"kind":"step","step":99')  # torn
    found = newest_rows(path)
    assert (found.step["step"], found.evaluation["loss"]) == (24, 3.0)
    assert found.step_times == pytest.approx([n / 10 for n in range(24, 14, -1)])


def test_a_long_file_is_read_only_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK", 4096)
    path = tmp_path / "metrics.jsonl"
    damaged = b"\x00" * (1 << 20)
    rows = [step(n) for n in range(20)] + [{"kind": "evaluation", "step": 19, "loss": 1.0}]
    rows.append({"kind": "checkpoint", "step": 19, "state": "COMMITTED"})
    path.write_bytes(damaged + b"\n" + b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    read: list[int] = []
    original = Path.open

    def counting(self: Path, *arguments: str) -> object:
        file = original(self, *arguments)
        inner = file.read
        file.read = lambda size: read.append(size) or inner(size)  # type: ignore[method-assign, func-returns-value]
        return file

    monkeypatch.setattr(Path, "open", counting)
    assert newest_rows(path).step["step"] == 19
    assert sum(read) <= 2 * 4096


def test_without_a_file_there_is_nothing(tmp_path: Path) -> None:
    found = newest_rows(tmp_path / "metrics.jsonl")
    assert (found.step, found.evaluation, found.checkpoint, found.step_time_s) == ({}, {}, {}, None)
    (tmp_path / "metrics.jsonl").touch()
    assert newest_rows(tmp_path / "metrics.jsonl").step == {}
