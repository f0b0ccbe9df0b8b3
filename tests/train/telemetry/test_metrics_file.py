"""Metrics of a run whose disk is full for a while."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from zslurm.train.jsonl import JsonLinesWriter, read_jsonl
from zslurm.train.telemetry.metrics_file import MetricsFile


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT])
def test_lines_wait_in_memory_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    metrics, append = MetricsFile(tmp_path / "metrics.jsonl", 1), JsonLinesWriter.append

    def full(writer: JsonLinesWriter, record: dict[str, Any]) -> None:
        raise OSError(refusal, "no space for a whole line")

    metrics.recorded("step", {"step": 1})
    monkeypatch.setattr(JsonLinesWriter, "append", full)
    metrics.recorded("step", {"step": 2})
    metrics.recorded("step", {"step": 3})
    monkeypatch.setattr(JsonLinesWriter, "append", append)
    metrics.recorded("step", {"step": 4})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("refusal", [errno.EIO, errno.EFBIG])
def test_what_does_not_pass_by_itself_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 1)

    def refuse(writer: JsonLinesWriter, record: dict[str, Any]) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(JsonLinesWriter, "append", refuse)
    with pytest.raises(OSError, match=os.strerror(refusal)):
        metrics.recorded("step", {"step": 1})
