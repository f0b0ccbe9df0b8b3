"""A build turns text files into a corpus: all of it, in order, the same every time, complete or not at all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.data.corpora import contents, texts_of, write_texts
from zslurm.train.data.build import source_reader
from zslurm.train.data.build.build import BuildProgress, build
from zslurm.train.data.build.documents import training_shares
from zslurm.train.data.build.inspect import unigram_entropy
from zslurm.train.data.build.source_reader import Fields
from zslurm.train.data.build.sources import DEMO_CORPUS_GLOB, SourceFile, demo_corpus_sources
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.schema import bundle_name
from zslurm.train.errors import DataError

WORDS = "the quick brown fox jumps over the lazy dog and runs away from it"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(
        tmp_path / "texts",
        b=f"second {WORDS}",
        a__z=f"first {WORDS}",
        c="",
        d=b"not \xff UTF-8",
        e=f"third <eos> {WORDS}\r\n",
    )


def test_the_corpus_holds_the_texts_in_sorted_order(texts: Path, tmp_path: Path) -> None:
    summary = build([texts], tmp_path / "out", vocab_size=300)
    corpus = Corpus.open(tmp_path / "out")
    assert texts_of(corpus) == [f"first {WORDS}", f"second {WORDS}", f"third <eos> {WORDS}\r\n"]
    assert (summary.documents, summary.tokens) == (3, corpus.token_count)
    assert summary.empty_documents == 1
    assert summary.skipped_files == (f"{texts / 'd.txt'}: is not UTF-8: byte 0xff at offset 4",)
    assert summary.text_bytes == sum(len(text.encode()) for text in texts_of(corpus))
    assert summary.vocab_size == corpus.header.vocab_size == 300
    assert summary.fingerprint == corpus.fingerprint
    assert corpus.header.source == f"{texts} (*)"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "build.json",
        "tokenizer.json",
        "tokens-00000-of-00001.h5",
    ]


def test_two_builds_are_the_same_bytes(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any number of processes."""
    monkeypatch.setattr(source_reader, "BATCH_BYTES", 1)
    first = build([texts], tmp_path / "one", vocab_size=300, bundle_bytes=150)
    second = build([texts], tmp_path / "two", vocab_size=300, bundle_bytes=150, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert first.fingerprint == second.fingerprint


def test_bundles_keep_to_their_size_and_documents_whole(texts: Path, tmp_path: Path) -> None:
    whole = build([texts], tmp_path / "whole", vocab_size=300)
    split = build([texts], tmp_path / "split", vocab_size=300, bundle_bytes=150)
    assert split.bundles > 1
    assert (tmp_path / "split" / bundle_name(split.bundles - 1, split.bundles)).is_file()
    one, several = (Corpus.open(summary.path).window(0, whole.tokens - 1) for summary in (whole, split))
    assert np.array_equal(one, several)
    assert texts_of(Corpus.open(split.path)) == texts_of(Corpus.open(whole.path))


def test_the_same_build_is_recognised_and_another_refused(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = build([texts], out, vocab_size=300)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = build([texts], out, vocab_size=300)
    assert replace(again, seconds=0, reused=False) == replace(first, seconds=0)
    assert again.reused
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(DataError, match=r"built with other settings \(end_token, vocab_size\); name another"):
        build([texts], out, vocab_size=301, end_token="<pad>")
    write_texts(texts, f="one more")
    with pytest.raises(DataError, match="holds a corpus of other text; name another directory"):
        build([texts], out, vocab_size=300)
    (texts / "f.txt").unlink()
    (out / "tokens-00000-of-00001.h5").unlink()
    with pytest.raises(DataError, match=r"holds no tokens-NNNNN-of-NNNNN\.h5"):
        build([texts], out, vocab_size=300)


def test_a_directory_of_something_else_is_left_alone(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exists and is not a finished corpus"):
        build([texts], texts, vocab_size=300)
    with pytest.raises(DataError, match="exists and is not a finished corpus"):
        build([texts], texts / "b.txt", vocab_size=300)
    (tmp_path / "empty").mkdir()
    assert build([texts], tmp_path / "empty", vocab_size=300).documents == 3


def test_a_given_tokenizer_is_used_and_copied(texts: Path, tmp_path: Path) -> None:
    first = build([texts], tmp_path / "first", vocab_size=300)
    for tokenizer in (first.path, first.path / "tokenizer.json"):
        out = tmp_path / f"from-{tokenizer.name}"
        second = build([texts / "b.txt"], out, tokenizer=tokenizer)
        assert second.tokenizer_sha256 == first.tokenizer_sha256
        assert texts_of(Corpus.open(out)) == [f"second {WORDS}"]


def test_sources_are_filtered_and_read_once(texts: Path, tmp_path: Path) -> None:
    for excluded in (texts / "a" / "__pycache__", texts / ".git"):
        write_texts(excluded, x="not meant")
    (texts / "notes.md").write_text("other kind")
    (texts / "link.txt").symlink_to(texts / "b.txt")
    (texts / "broken.txt").symlink_to(texts / "nowhere")
    build([texts / "e.txt", texts, texts / "a"], tmp_path / "out", vocab_size=300, glob="*.txt")
    firsts = [text.split()[0] for text in texts_of(Corpus.open(tmp_path / "out"))]
    assert firsts == ["third", "first", "second"]


def test_hidden_files_are_read_only_if_they_are_asked_for(texts: Path, tmp_path: Path) -> None:
    """They hold passwords and caches."""
    (texts / ".env").write_text("API_KEY=hunter2")
    (texts / "a.txt~").write_text("backup")
    write_texts(texts / ".cache", x="cached")

    def words(name: str, *sources: Path, glob: str = "*") -> str:
        build([*sources], tmp_path / name, vocab_size=300, glob=glob)
        return " ".join(texts_of(Corpus.open(tmp_path / name)))

    assert not any(word in words("all", texts) for word in ("hunter2", "backup", "cached"))
    assert "hunter2" in words("named", texts / ".env", texts)
    assert "hunter2" in words("asked", texts, glob=".env")
    assert "cached" in words("below", texts, glob=".cache/*")


def test_paths_that_are_not_utf8_work(texts: Path, tmp_path: Path) -> None:
    strange = texts.rename(tmp_path / os.fsdecode(b"caf\xe9"))
    first = build([strange], tmp_path / "out", vocab_size=300)
    assert build([strange], tmp_path / "out", vocab_size=300).skipped_files == first.skipped_files
    assert r"caf\udce9" in Corpus.open(tmp_path / "out").header.source


def test_a_tokenizers_sample_is_spread_over_the_files() -> None:
    files = [SourceFile(Path(f"{i}.txt"), 10) for i in range(100)]
    assert training_shares(files, 1000) == dict.fromkeys(range(100), 10)
    assert training_shares(files, 250) == dict.fromkeys(range(0, 100, 4), 10)
    files.insert(1, SourceFile(Path("many.jsonl"), 1000))
    assert training_shares(files, 500) == {1: 250} | dict.fromkeys([0, *range(5, 101, 4)], 10)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"vocab_size": 100}, "vocabulary of 100 is too small"),
        ({}, "give the size of a vocabulary to train, or a tokenizer"),
        ({"vocab_size": 300, "tokenizer": Path("x")}, "not both"),
        ({"tokenizer": Path("/nowhere/tokenizer.json")}, "/nowhere/tokenizer.json: no such file"),
        ({"vocab_size": 300, "glob": "*.rst"}, r"no file matches '\*\.rst'"),
        ({"vocab_size": 300, "end_token": "<end>"}, "no <end>"),
        ({"vocab_size": 300, "bundle_bytes": 0}, "at least 1"),
        ({"vocab_size": 300, "workers": 0}, "at least 1"),
        ({"vocab_size": 300, "fields": Fields(prompt_key="prompt")}, "the keys of both, or of neither"),
        (
            {"vocab_size": 300, "glob": "[cd].txt"},
            r"no usable text: 1 document is empty, 1 file is not UTF-8 \(.*d\.txt: .* 0xff at offset 4\)",
        ),
    ],
)
def test_bad_arguments_are_refused_and_leave_nothing(
    texts: Path, tmp_path: Path, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        build([texts], tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == [texts]


def test_bad_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such file"):
        build([tmp_path / "nowhere"], tmp_path / "out", vocab_size=300)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: is no regular file; sources are read more than once"):
        build([tmp_path / "pipe"], tmp_path / "out", vocab_size=300)
    with pytest.raises(DataError, match="list of sources"):
        build([], tmp_path / "out", vocab_size=300)


def test_an_unwritable_place_is_named(texts: Path) -> None:
    with pytest.raises(DataError, match="/proc/out: cannot be written"):
        build([texts], Path("/proc/out"), vocab_size=300)


@pytest.mark.parametrize("stage", ["tokenizer", "tokens"])
def test_an_interrupted_build_leaves_nothing(texts: Path, tmp_path: Path, stage: str) -> None:
    def interrupt(progress: BuildProgress) -> None:
        if progress.stage == stage and progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([texts], tmp_path / "out", vocab_size=300, report=interrupt)
    assert list(tmp_path.iterdir()) == [texts]


def test_an_out_that_appears_meanwhile_is_not_overwritten(texts: Path, tmp_path: Path) -> None:
    def intrude(progress: BuildProgress) -> None:
        if progress.stage == "tokens":
            write_texts(tmp_path / "out", mine="precious")

    with pytest.raises(DataError, match="another program wrote it meanwhile"):
        build([texts], tmp_path / "out", vocab_size=300, report=intrude)
    assert contents(tmp_path / "out") == {"mine.txt": b"precious"}


def test_the_standard_library_is_real_text(tmp_path: Path) -> None:
    """One package of it, for the time: tokenized, it compresses, and predicting it needs context."""
    source = demo_corpus_sources() / "json"
    progress: list[BuildProgress] = []
    summary = build([source], tmp_path / "out", vocab_size=1000, glob=DEMO_CORPUS_GLOB, report=progress.append)
    assert summary.documents == len([path for path in source.glob("*.py") if path.stat().st_size])
    assert summary.text_bytes / summary.tokens > 2
    assert 4 < unigram_entropy(Corpus.open(tmp_path / "out")) < np.log(1000)
    assert [p.stage for p in progress] == sorted((p.stage for p in progress), key=["tokenizer", "tokens"].index)
    assert progress[-1].done == progress[-1].total == sum(p.stat().st_size for p in source.glob("*.py"))


def test_a_python_without_sources_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no sources of its standard library; install them"):
        demo_corpus_sources()
