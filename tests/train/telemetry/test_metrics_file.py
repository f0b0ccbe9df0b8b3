"""Metrics of a run whose disk is full for a while."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from zslurm.train.jsonl import JsonLinesWriter, read_jsonl
from zslurm.train.telemetry.metrics_file import MetricsFile


def test_lines_wait_in_memory_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, append = MetricsFile(tmp_path / "metrics.jsonl", 1), JsonLinesWriter.append

    def full(writer: JsonLinesWriter, record: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "no space for a whole line")

    metrics.recorded("step", {"step": 1})
    monkeypatch.setattr(JsonLinesWriter, "append", full)
    metrics.recorded("step", {"step": 2})
    metrics.recorded("step", {"step": 3})
    monkeypatch.setattr(JsonLinesWriter, "append", append)
    metrics.recorded("step", {"step": 4})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_file_system_that_is_gone_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 1)

    def gone(writer: JsonLinesWriter, record: dict[str, Any]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(JsonLinesWriter, "append", gone)
    with pytest.raises(OSError, match="Input/output error"):
        metrics.recorded("step", {"step": 1})
