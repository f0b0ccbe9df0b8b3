"""Files of JSON lines: events and metrics that stay readable whatever happened to their writer."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zslurm.run.events import event_log
from zslurm.train.jsonl import JsonLinesTail, JsonLinesWriter, _decode, parse_line, read_jsonl


def write(path: Path, *records: dict[str, int]) -> None:
    with JsonLinesWriter(path) as lines:
        for record in records:
            lines.append(record)


def test_what_is_appended_is_read_in_order_over_several_writers(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    write(path, {"a": 1}, {"a": 2})
    write(path, {"a": 3})
    assert list(read_jsonl(path)) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n{"a":3}\n'


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_jsonl(tmp_path / "nowhere")) == []
    assert JsonLinesTail(tmp_path / "nowhere").new_records() == []


@pytest.mark.parametrize("torn", [b"{", b'{"a":', b'{"a":3}', b"\xff\xfe"])
def test_a_torn_last_line_is_skipped_and_closed_by_the_next_writer(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines"
    write(path, {"a": 1})
    with path.open("ab") as file:
        file.write(torn)
    assert list(read_jsonl(path)) == [{"a": 1}]
    write(path, {"a": 4})
    complete = [{"a": 3}] if torn == b'{"a":3}' else []
    assert list(read_jsonl(path)) == [{"a": 1}, *complete, {"a": 4}]


@pytest.mark.parametrize("line", [b"\n", b"nonsense\n", b"[1]\n", b"17\n", b'{"a":1}'])
def test_what_is_no_whole_object_is_no_record(line: bytes) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize("decode", [_decode, event_log._decode])
@pytest.mark.parametrize("value", [float("inf"), 2**70, 5e-324, "\ud800", "\u2028", {"deep": [None, True]}])
def test_each_value_that_json_can_write_is_read_as_it_was(
    tmp_path: Path, value: object, decode: Callable[[bytes], Any]
) -> None:
    path = tmp_path / "lines"
    with JsonLinesWriter(path) as lines:
        lines.append({"a": value, "loss": float("nan")})
    (record,) = JsonLinesTail(path, decode).new_records()
    assert record["a"] == value
    assert math.isnan(record["loss"])


def test_text_with_line_breaks_stays_on_one_line(tmp_path: Path) -> None:
    with JsonLinesWriter(tmp_path / "lines") as lines:
        lines.append({"text": "one\ntwo\u2028three é"})
    assert list(read_jsonl(tmp_path / "lines")) == [{"text": "one\ntwo\u2028three é"}]
    assert (tmp_path / "lines").read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_line_that_fits_in_part_is_removed_and_the_system_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    path, write, calls = tmp_path / "lines", os.write, 0
    lines = JsonLinesWriter(path)
    lines.append({"a": 1})

    def refuse_after_three_bytes(descriptor: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return write(descriptor, data[:3])
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "write", refuse_after_three_bytes)
    with pytest.raises(OSError, match=str(path)) as raised:
        lines.append({"a": 2})
    monkeypatch.setattr(os, "write", write)
    assert raised.value.errno == refusal
    lines.append({"a": 3})
    assert path.read_bytes() == b'{"a":1}\n{"a":3}\n'


def test_a_tail_gets_each_record_once_and_an_unfinished_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = JsonLinesTail(path)
    write(path, {"a": 1})
    assert tail.new_records() == [{"a": 1}]
    assert tail.new_records() == []
    with path.open("ab") as file:
        file.write(b'{"a":2}\n{"a"')
        file.flush()
        assert tail.new_records() == [{"a": 2}]
        assert tail.new_records() == []
        file.write(b":3}\n")
    assert tail.new_records() == [{"a": 3}]


def test_lines_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    """One writer is the rule; a second one that should not be there spoils no line."""
    program = """
import sys
from pathlib import Path
from zslurm.train.jsonl import JsonLinesWriter
with JsonLinesWriter(Path(sys.argv[1])) as lines:
    for number in range(300):
        lines.append({"who": sys.argv[2], "number": number, "padding": "x" * 200})
"""
    path = tmp_path / "lines"
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), who]) for who in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    records = list(read_jsonl(path))
    for who in "ab":
        assert [record["number"] for record in records if record["who"] == who] == list(range(300))


def test_a_line_that_does_not_fit_is_an_error_and_the_file_stays_readable(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the system writes a part of the line."""
    program = """
import resource, signal, sys
from pathlib import Path
from zslurm.train.jsonl import JsonLinesWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))
lines = JsonLinesWriter(Path(sys.argv[1]))
lines.append({"a": 1})
try:
    lines.append({"text": "x" * 100})
except OSError as error:
    print("refused")
"""
    path = tmp_path / "lines"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    assert path.read_text() == '{"a":1}\n', "the part of a line is taken back"
    write(path, {"a": 2})
    assert list(read_jsonl(path)) == [{"a": 1}, {"a": 2}]


def test_the_file_is_made_for_its_owner_and_whom_his_umask_lets_read(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write(tmp_path / "lines", {"a": 1})
    finally:
        os.umask(before)
    assert (tmp_path / "lines").stat().st_mode & 0o777 == 0o600


def test_a_tail_begins_with_the_newest_records(tmp_path: Path) -> None:
    """And continues behind them, with the record that was unfinished."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"a":{number}}}\n' for number in range(100)) + 'damaged\n{"a":')
    tail = JsonLinesTail(path)
    assert tail.newest_records(2) == [{"a": 98}, {"a": 99}]
    assert tail.new_records() == []
    with path.open("a") as file:
        file.write('100}\n{"a":101}\n')
    assert tail.new_records() == [{"a": 100}, {"a": 101}]
    assert JsonLinesTail(path).newest_records(0) == []
    path.write_bytes(b'{"a":1}\n{"a":2}\rdamaged\n{"a":3}\rtail')
    tail = JsonLinesTail(path)
    assert tail.newest_records(5) == [{"a": 1}], "a line ends only at a line feed"
    with path.open("a") as file:
        file.write('\n{"a":4}\n')
    assert tail.new_records() == [{"a": 4}]
    path.write_text("".join(f'{{"a":{number}}}\n' for number in range(102)))
    assert len(JsonLinesTail(path).newest_records(1000)) == 102
    assert JsonLinesTail(tmp_path / "nowhere").newest_records(3) == []
