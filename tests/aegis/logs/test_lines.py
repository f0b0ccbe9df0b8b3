"""Logical lines: what is cut off in front of a writer's words, their times, and streams of any shape."""

from __future__ import annotations

import gzip
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zslurm.aegis.logs.lines import OVERLAP, Blocks, body_of, chunks_of, clean, time_of, without_labels

NOON = datetime(2026, 6, 15, 12, 0, 0, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x1b[31mERROR\x1b[0m: no", "ERROR: no"),
        (b"\x1b]0;title\x07words", "words"),
        (b"\xff\xfe words \x00 more\r\n", "�� words   more"),
        ("naïve café".encode(), "naïve café"),
        (b"", ""),
    ],
)
def test_clean(data: bytes, text: str) -> None:
    assert clean(data) == text


@pytest.mark.parametrize(
    "line",
    [
        "5995: RuntimeError: x",
        "[rank5]: RuntimeError: x",
        "[rank5]:[E1019 01:04:03.357615073 ProcessGroupNCCL.cpp:1375] RuntimeError: x",
        "[default3]:[rank3]: RuntimeError: x",
        "12: [rank12]: RuntimeError: x",
        " 41%|████ | 366/903 [5:15:39<6:53:09, 46.16s/it]RuntimeError: x",
        "Epoch 3:  41%|████ | 366/903 [5:15:39<6:53:09, 46.16s/it, loss=2.1]RuntimeError: x",
        "[2026-02-02 12:15:56,123] RuntimeError: x",
        "2026-02-02T12:15:56.123456+01:00 RuntimeError: x",
        "Nov 17 13:16:56 superserver kernel: [11314.655315] RuntimeError: x",
        "kern  :err   : 2024-11-24T17:53:23,028841-06:00 RuntimeError: x",
        "[Sat Jan  7 14:25:56 2023] RuntimeError: x",
        "[19277.975655] RuntimeError: x",
        "(RayTrainWorker pid=4711, ip=10.0.0.7) RuntimeError: x",
        "[1,17]<stderr>:RuntimeError: x",
        "> RuntimeError: x",
        "  | RuntimeError: x",
        "ERROR: RuntimeError: x",
        "[    5.123456][ T1234] RuntimeError: x",
        "kern.err kernel: RuntimeError: x",
        "2026-02-02T12:00:00.123456789Z stderr F RuntimeError: x",
        "[pod/train-worker-0/pytorch] RuntimeError: x",
        '{"log":"RuntimeError: x\\n","stream":"stderr","time":"2026-02-02T12:00:00Z"}',
        '{"__REALTIME_TIMESTAMP":"1","PRIORITY":"3","MESSAGE":"RuntimeError: x"}',
        'time="2026-02-02T12:00:00Z" level=error msg="RuntimeError: x"',
        "2026-02-02 12:00:00.123 | ERROR    | __main__:main:12 - RuntimeError: x",
        "2026-02-02 12:00:00,123 - root - ERROR - RuntimeError: x",
        "[2026-02-02 12:00:00,123] [ERROR] [engine.py:12:step] RuntimeError: x",
        "[2026-02-02 12:00:00,123][train][ERROR] - RuntimeError: x",
        "ERROR:root:RuntimeError: x",
        "node7: RuntimeError: x",
        "worker-3: RuntimeError: x",
        "[node7:12345] RuntimeError: x",
    ],
)
def test_the_words_of_the_writer(line: str) -> None:
    assert body_of(line) == "RuntimeError: x"


def test_labels_leave_the_indentation() -> None:
    assert without_labels("17:     raise ValueError") == "    raise ValueError"


@pytest.mark.parametrize(
    ("line", "when"),
    [
        ("2026-02-02T12:15:56.500+00:00 x", datetime(2026, 2, 2, 12, 15, 56, 500_000, UTC)),
        ("kern  :err   : 2024-11-24T17:53:23,028841-06:00 x", datetime(2024, 11, 24, 23, 53, 23, 28_841, UTC)),
        ("*** JOB 1 ON n CANCELLED AT 2024-04-20T09:09:37 ***", datetime(2024, 4, 20, 9, 9, 37)),
        ("[Sat Jan  7 14:25:56 2023] x", datetime(2023, 1, 7, 14, 25, 56)),
        ("Nov 17 13:16:56 host kernel: x", datetime(2025, 11, 17, 13, 16, 56)),  # not this year: it is June
        ("[rank1]:[E202 12:25:57.436 ProcessGroupNCCL.cpp:697] x", datetime(2026, 2, 2, 12, 25, 57, 436_000)),
        ("[rank7]:[E1019 01:04:03.357615073 P.cpp:1] x", datetime(2025, 10, 19, 1, 4, 3, 357_615)),
    ],
)
def test_times(line: str, when: datetime) -> None:
    assert time_of(line, NOON) == pytest.approx(when.timestamp())


@pytest.mark.parametrize(
    "line", ["[19277.975655] amdgpu", "step 12", "2026-99-99T99:99:99 x", "[E9999 12:00:00.1 x]"]
)
def test_no_time(line: str) -> None:
    assert time_of(line, NOON) is None


@given(st.text())
def test_any_text_has_a_body_and_perhaps_a_time(text: str) -> None:
    assert text.endswith(body_of(text))
    time_of(text)


@given(st.lists(st.binary(max_size=80) | st.sampled_from([b"\n", b"\r", b"line\n"])))
def test_blocks_lose_and_invent_nothing(chunks: list[bytes]) -> None:
    blocks = Blocks()
    found = [block for chunk in chunks for block in blocks.feed(chunk)] + list(blocks.close())
    assert b"".join(block.data for block in found) == b"".join(chunks)
    for n, block in enumerate(found):
        assert block.number == 1 + b"".join(before.data for before in found[:n]).count(b"\n")


def test_a_line_without_an_end_is_cut_into_overlapping_blocks() -> None:
    data = random.Random(0).randbytes(5 << 20).replace(b"\n", b" ").replace(b"\r", b" ")
    blocks = Blocks()
    found = [*blocks.feed(data), *blocks.close()]
    assert len(found) > 2
    assert {block.number for block in found} == {1}
    assert found[0].data + b"".join(block.data[OVERLAP:] for block in found[1:]) == data


def test_packed_files(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"some words\n" * 1000))
    assert b"".join(chunks_of(path)) == b"some words\n" * 1000


def test_a_packed_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(random.Random(0).randbytes(4 << 20))[: 3 << 20])
    assert len(b"".join(chunks_of(path))) >= 1 << 20
    path.write_bytes(b"no gzip at all")
    assert list(chunks_of(path)) == []
