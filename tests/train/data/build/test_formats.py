"""JSON lines, compressed or not, and Parquet: the documents of text files, or one line with what is wrong."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from tests.train.data.corpora import texts_of, write_rows, write_texts
from zslurm.train.data.build import source_reader
from zslurm.train.data.build.build import BuildProgress, build
from zslurm.train.data.build.source_reader import Fields, SourceReader
from zslurm.train.data.build.sources import SourceFile, SourceKind, find_files
from zslurm.train.data.build.tokenizer import train_tokenizer
from zslurm.train.data.bundle import Corpus
from zslurm.train.errors import BuildFailed, DataError

TEXTS = ["first\nof all", "naïve 東京 🙂 <eos>", "third", "", 'a "fifth"\\', "and the sixth"]
FORMATS = ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.parquet"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["some words of text " * 20], 300).save(str(path))
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_the_same_documents(tmp_path: Path, tokenizer: Path, name: str) -> None:
    source = write_rows(tmp_path / name, [{"id": i, "text": text} for i, text in enumerate(TEXTS)])
    progress: list[BuildProgress] = []
    summary = build([source], tmp_path / "out", tokenizer=tokenizer, report=progress.append)
    assert texts_of(Corpus.open(tmp_path / "out")) == [text for text in TEXTS if text]
    assert (summary.documents, summary.empty_documents) == (5, 1)
    assert summary.text_bytes == len("".join(TEXTS).encode())
    assert progress[-1].done == progress[-1].total == source.stat().st_size


def test_a_directory_may_mix_them(tmp_path: Path, tokenizer: Path) -> None:
    for number, name in enumerate(["1.jsonl", "2.parquet", "sub/3.json.zst"]):
        write_rows(tmp_path / "mixed" / name, [{"body": f"{number} one"}, {"body": f"{number} two"}])
    write_texts(tmp_path / "mixed", a="plain")
    (tmp_path / "mixed" / "z.txt.gz").write_bytes(gzip.compress(b"packed"))
    fields = Fields(text_key="body", text_column="body")
    build([tmp_path / "mixed"], tmp_path / "out", tokenizer=tokenizer, fields=fields)
    assert texts_of(Corpus.open(tmp_path / "out")) == [
        "0 one", "0 two", "1 one", "1 two", "plain", "2 one", "2 two", "packed",
    ]  # fmt: skip


def test_the_name_says_the_kind() -> None:
    kinds = {
        "a.jsonl": SourceKind.JSON_LINES,
        "A.JSONL.GZ": SourceKind.JSON_LINES,
        "c4-train.00000.json.gz": SourceKind.JSON_LINES,
        "settings.json": SourceKind.TEXT,
        "a.txt.zst": SourceKind.TEXT,
        "README": SourceKind.TEXT,
        "a.gz": SourceKind.TEXT,
        "train-00000.parquet": SourceKind.PARQUET,
    }
    assert {name: SourceFile(Path(name), 0).kind for name in kinds} == kinds


def test_several_frames_and_members_are_read_on(tmp_path: Path, tokenizer: Path) -> None:
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in ("one", "two", "three")]
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"  # pzstd writes such frames
    (tmp_path / "a.jsonl.zst").write_bytes(skippable + b"".join(map(zstandard.compress, lines)))
    (tmp_path / "b.jsonl.gz").write_bytes(b"".join(map(gzip.compress, lines)))
    build([tmp_path / "a.jsonl.zst", tmp_path / "b.jsonl.gz"], tmp_path / "out", tokenizer=tokenizer)
    assert texts_of(Corpus.open(tmp_path / "out")) == ["one", "two", "three"] * 2


def test_line_ends_blank_lines_and_marks_do_not_matter(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}')
    build([path], tmp_path / "out", tokenizer=tokenizer)
    assert texts_of(Corpus.open(tmp_path / "out")) == ["one", "two"]


@pytest.mark.parametrize("name", FORMATS)
def test_reading_goes_on_at_any_cursor(tmp_path: Path, name: str) -> None:
    rows = [{"text": "x" * length} for length in (3, 1, 20, 7, 5)]
    files = find_files([write_rows(tmp_path / name, rows), write_rows(tmp_path / f"b{name}", rows)], "*")
    reader = SourceReader(files, Fields())
    whole = [raw for raw, *_ in reader.records()]
    assert len(whole) == 10
    for number, raw in enumerate(whole):
        assert [after for after, *_ in reader.records(raw.cursor)] == whole[number:]


def line(name: str, content: bytes | str) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        path = directory / name
        path.write_bytes(
            b'{"text": "good"}\n' + (content.encode() if isinstance(content, str) else content) + b"\n"
        )
        return path

    return write


def table(**columns: Any) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        parquet.write_table(pyarrow.table(columns), directory / "a.parquet")
        return directory / "a.parquet"

    return write


def raw(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        (directory / name).write_bytes(content)
        return directory / name

    return write


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (line("a.jsonl", '{"text": '), r"a\.jsonl:2: is not JSON: Expecting value at column 10"),
        (line("a.jsonl", "hello"), r"a\.jsonl:2: is not JSON: Expecting value at column 1"),
        (line("a.jsonl", "[1]"), r"a\.jsonl:2: is a list, not an object with 'text'"),
        (line("a.jsonl", '{"body": "x", "id": 3}'), r"a\.jsonl:2: has no 'text'; its keys: 'body', 'id' \(set"),
        (line("a.jsonl", "{}"), r"a\.jsonl:2: has no 'text'; its keys: none"),
        (line("a.jsonl", '{"text": 3}'), r"a\.jsonl:2: 'text' is a number, not a string"),
        (line("a.jsonl", '{"text": null}'), r"a\.jsonl:2: 'text' is null, not a string"),
        (line("a.jsonl", '{"text": ["x"]}'), r"a\.jsonl:2: 'text' is a list, not a string"),
        (line("a.jsonl", b'{"text": "\xff"}'), r"a\.jsonl:2: is not UTF-8: byte 0xff at offset 27 of the file"),
        (line("a.jsonl", '{"text": "\\ud800"}'), r"a\.jsonl:2: holds half of a surrogate pair \(\\ud800\)"),
        (line("a.jsonl", "[" * 5000), r"a\.jsonl:2: cannot be parsed: "),
        (line("a.jsonl", json.dumps({"text": "x" * 20000})), r"a\.jsonl:2: the line is longer than 9\.77 KiB"),
        (line("a.json.gz", "{}"), r"a\.json\.gz: is damaged: Not a gzipped file"),
        (line("a.jsonl.zst", "{}"), r"a\.jsonl\.zst: is damaged: .*Unknown frame descriptor"),
        (raw("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9]), r"a\.jsonl\.gz: is truncated"),
        (raw("a.jsonl.zst", zstandard.compress(b'{"text": "x"}')[:-3]), "the last frame is not complete"),
        (raw("a.jsonl", b""), "no usable text"),
        (raw("a.parquet", b"PAR1"), r"a\.parquet: cannot be read as Parquet: "),
        (raw("a.parquet", b""), r"a\.parquet: cannot be read as Parquet: "),
        (raw("a.txt", b"abc\xe9"), r"a\.txt: is not UTF-8: byte 0xe9 at offset 3; convert it"),
        (raw("a.txt", b"x" * 10001), r"a\.txt: holds .* in one document, more than the limit"),
        (raw("a.txt.gz", gzip.compress(b"x" * 10001)), r"a\.txt\.gz: holds .*, more than the limit"),
        (table(body=["x"], id=[1]), r"a\.parquet: has no column 'text'; its columns are body, id \(name one with"),
        (table(text=[1]), r"a\.parquet: column 'text' holds int64, not text"),
        (table(text=["x", None]), r"a\.parquet: row 1: 'text' is null, not a string"),
        (table(text=["x", "y" * 10001]), r"a\.parquet: row 1: holds .* more than the limit"),
        (
            table(text=pyarrow.array([b"x", b"\xff"]).cast(pyarrow.string(), safe=False)),
            r"a\.parquet: a text in rows 0 to 63 is not UTF-8: byte 0xff at offset 0",
        ),
    ],
)  # fmt: skip
def test_bad_records_are_named(
    tmp_path: Path, tokenizer: Path, write: Callable[[Path], Path], complaint: str
) -> None:
    source = write(tmp_path)
    with pytest.raises(DataError, match=complaint) as caught:
        build([source], tmp_path / "out", tokenizer=tokenizer, max_document_bytes=10_000)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source], "nothing is left"


def test_a_flipped_bit_in_parquet_is_found_where_its_writer_made_checksums(
    tmp_path: Path, tokenizer: Path
) -> None:
    path = tmp_path / "a.parquet"
    texts = pyarrow.table({"text": ["a text that is found again " * 9]})
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(texts, path, write_page_checksum=True, **plain)
    content = bytearray(path.read_bytes())
    content[content.index(b"found")] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet: .*[Cc][Rr][Cc]"):
        build([path], tmp_path / "out", tokenizer=tokenizer)


def test_the_first_fault_is_reported_on_any_number_of_workers(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file cannot be read, which is found out long before the first one's lines are parsed."""
    monkeypatch.setattr(source_reader, "BATCH_BYTES", 1)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' * 3 + b"bad\n")
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl:4: is not JSON"):
            build(
                [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"],
                tmp_path / "out",
                tokenizer=tokenizer,
                workers=workers,
            )


@pytest.mark.parametrize(("package", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet")])
def test_a_missing_library_is_named(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    source = write_rows(tmp_path / name, [{"text": "x"}])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"needs the package {package}: pip install 'zslurm-train\[data\]'"):
        build([source], tmp_path / "out", tokenizer=tokenizer)


def test_a_tokenizer_is_trained_on_records_too(tmp_path: Path) -> None:
    rows = [{"text": "the same words over and over"}] * 30
    source = write_rows(tmp_path / "a.jsonl.gz", rows)
    summary = build([source], tmp_path / "out", vocab_size=270)
    assert summary.tokens < 0.7 * summary.text_bytes


def test_a_killed_worker_is_one_line(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the kernel kills it for want of memory."""
    monkeypatch.setattr(source_reader, "BATCH_BYTES", 1)
    source = write_rows(tmp_path / "a.jsonl", [{"text": "x"}] * 100)

    def kill(progress: BuildProgress) -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # one that was killed already
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()

    with pytest.raises(BuildFailed, match="process was killed, perhaps for want of memory; run it again with"):
        build([source], tmp_path / "out", tokenizer=tokenizer, workers=2, report=kill)
    assert list(tmp_path.iterdir()) == [source]


READ = """
import resource, sys
from pathlib import Path
from zslurm.train.data.build.source_reader import Fields, SourceReader
from zslurm.train.data.build.sources import find_files
for path in sys.argv[1:]:
    reader = SourceReader(find_files([Path(path)], "*"), Fields())
    count = sum(len(batch.records) for batch in reader.batches())
    print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    """32 MB of text, in Parquet in one row group, are read in a fraction of that."""
    letters = random.Random(0).choices(string.ascii_letters, k=1 << 16)
    rows = [{"text": f"{number} " + "".join(letters)} for number in range(500)]
    small, large = tmp_path / "small" / name, tmp_path / "large" / name
    write_rows(small, rows[:50])
    write_rows(large, rows)
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), large, row_group_size=500, use_dictionary=False)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(small), str(large)], capture_output=True, text=True, check=True
    )
    (_, before), (count, after) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert count == 500
    assert after - before < 16 << 10  # KiB
