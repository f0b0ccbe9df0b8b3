"""Building a corpus: text files in, a directory of token bundles out, complete or not at all.

Memory is bounded by one batch of text and the largest file; the tokenizer is trained on about 64 MiB at most,
every k-th file. The result is deterministic: the same texts, settings and library versions give the same
bytes. build.json records a digest of the texts and the settings; building again into the same OUT reads the
sources once to compare, recognises the build and leaves OUT as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from train.data.bundle import Corpus
from train.data.record import BuildRecord, BuildSummary, Tally
from train.data.schema import TOKENIZER_FILE, VERSION, BundleHeader
from train.data.sources import (
    EXCLUDED_DIRECTORIES,
    Document,
    SourceFile,
    find_files,
    read_documents,
    sample_files,
)
from train.data.staging import staging_directory
from train.data.tokenizer import (
    encode,
    encoding_threads,
    end_token_id,
    file_sha256,
    load_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from train.data.writer import BundleSeries, fsync
from train.errors import DataError

BATCH_BYTES = 4 << 20
SAMPLE_BYTES = 64 << 20
TOKENS_PER_BUNDLE = 1 << 30


@dataclass(frozen=True)
class BuildProgress:
    """How far a build is: `done` of `total` bytes of source text in this stage."""

    stage: Literal["tokenizer", "tokens", "compare"]
    done: int
    total: int


Report = Callable[[BuildProgress], None]


@dataclass(frozen=True)
class _Plan:
    """One build's arguments, checked."""

    files: list[SourceFile]
    source: str
    vocab_size: int | None
    tokenizer: Path | None
    end_token: str | None
    max_tokens_per_bundle: int
    report: Report

    def settings(self) -> dict[str, Any]:
        """All that decides the result, beside the texts and the libraries."""
        return {
            "bundle_version": VERSION,
            "vocab_size": self.vocab_size,
            "sample_bytes": None if self.tokenizer else SAMPLE_BYTES,
            "tokenizer_sha256": file_sha256(self.tokenizer) if self.tokenizer else None,
            "end_token": self.end_token,
            "max_tokens_per_bundle": self.max_tokens_per_bundle,
        }

    def documents(self, stage: Literal["tokens", "compare"], tally: Tally) -> Iterator[Document]:
        """Every document, counted and reported."""
        total = sum(file.size for file in self.files)
        done = 0
        self.report(BuildProgress(stage, done, total))
        for document in read_documents(self.files):
            tally.add(document)
            yield document
            done += len(document.content)
            self.report(BuildProgress(stage, done, total))


def build(
    sources: Sequence[Path],
    out_dir: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    glob: str = "*",
    excluded: frozenset[str] = EXCLUDED_DIRECTORIES,
    end_token: str | None = None,
    max_tokens_per_bundle: int = TOKENS_PER_BUNDLE,
    threads: int | None = None,
    report: Report = lambda progress: None,
) -> BuildSummary:
    """Tokenize text files into the corpus directory `out_dir`.

    Args:
        sources: files and directories; each file is one document, in the order of `train/data/sources.py`.
        out_dir: appears complete or not at all; one that exists must be empty or hold this very build.
        vocab_size: train a byte-level BPE of this size on the texts.
        tokenizer: use this tokenizer.json, or the one in this directory, instead.
        glob: which files of a directory to take.
        excluded: names of directories that are not entered.
        end_token: the tokenizer's end-of-document token, where it is not one of the usual ones.
        max_tokens_per_bundle: a new bundle begins before it would exceed this; documents are not split.
        threads: that the tokenizer uses; default: the cores that this process may run on.
        report: gets the progress, in this thread, after each file; what it raises ends the build.

    Raises:
        DataError: bad sources or tokenizer, no usable text, or `out_dir` is taken or cannot be written.
    """
    started = time.monotonic()
    if (vocab_size is None) == (tokenizer is None):
        raise DataError("give either the size of a vocabulary to train or a tokenizer to use, not both")
    if max_tokens_per_bundle < 1:
        raise DataError(f"tokens per bundle must be at least 1, got {max_tokens_per_bundle}")
    if tokenizer is not None:
        tokenizer = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
        load_tokenizer(tokenizer)  # complains before the sources are read
    plan = _Plan(
        files=find_files(sources, glob, excluded),
        source=_describe(sources, glob),
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        end_token=end_token,
        max_tokens_per_bundle=max_tokens_per_bundle,
        report=report,
    )
    out = out_dir.absolute()
    try:
        if _is_taken(out):
            summary = _recognise(out, plan)
        else:
            with staging_directory(out) as staging, encoding_threads(threads):
                summary = _fill(staging, plan)
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error}") from error
    return replace(summary, path=out, seconds=time.monotonic() - started)


def _fill(staging: Path, plan: _Plan) -> BuildSummary:
    """Write tokenizer, bundles and record into an empty directory, durably."""
    tokenizer_path = staging / TOKENIZER_FILE
    if plan.tokenizer is not None:
        tokenizer_path.write_bytes(plan.tokenizer.read_bytes())
    elif plan.vocab_size is not None:
        train_tokenizer(_training_texts(plan), plan.vocab_size).save(str(tokenizer_path))
    fsync(tokenizer_path)
    tokenizer = load_tokenizer(tokenizer_path)
    header = BundleHeader(
        vocab_size=vocabulary_size(tokenizer),
        tokenizer_sha256=file_sha256(tokenizer_path),
        end_token=end_token_id(tokenizer, plan.end_token),
        source=plan.source,
    )
    tally = Tally()
    with BundleSeries(staging, header, plan.max_tokens_per_bundle) as series:
        for batch in _batches(plan.documents("tokens", tally)):
            for tokens in encode(tokenizer, batch):
                series.append(np.append(tokens, np.uint32(header.end_token)))
        if not series.documents:
            raise DataError(
                f"{plan.source}: no usable text: {tally.empty_files} files are empty, "
                f"{len(tally.skipped_files)} are not UTF-8"
            )
    corpus = Corpus.open(staging)
    record = BuildRecord(
        source=plan.source,
        settings=plan.settings(),
        source_sha256=tally.sha256,
        bundles=len(corpus.bundles),
        documents=corpus.document_count,
        tokens=corpus.token_count,
        vocab_size=header.vocab_size,
        tokenizer_sha256=header.tokenizer_sha256,
        fingerprint=corpus.fingerprint,
        text_bytes=tally.text_bytes,
        empty_files=tally.empty_files,
        skipped_files=tally.skipped_files,
    )
    record.write(staging)
    return record.summary(staging, reused=False)


def _training_texts(plan: _Plan) -> Iterator[str]:
    """The texts that the tokenizer is trained on."""
    sample = sample_files(plan.files, SAMPLE_BYTES)
    done, total = 0, sum(file.size for file in sample)
    plan.report(BuildProgress("tokenizer", done, total))
    for document in read_documents(sample):
        if document.text:
            yield document.text
        done += len(document.content)
        plan.report(BuildProgress("tokenizer", done, total))


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    """The non-empty texts, in batches of about BATCH_BYTES: enough for all threads, bounded in memory."""
    batch: list[str] = []
    size = 0
    for document in documents:
        if document.text:
            batch.append(document.text)
            size += len(document.content)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _describe(sources: Sequence[Path], glob: str) -> str:
    """The sources in a line, for people."""
    shown = ", ".join(map(str, sources[:3]))
    more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    return f"{shown}{more} ({glob})"


def _is_taken(out: Path) -> bool:
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def _recognise(out: Path, plan: _Plan) -> BuildSummary:
    """The summary of an OUT that holds this very build; its sources are read to find out.

    Raises:
        DataError: it holds something else, or is damaged.
    """
    record = BuildRecord.read(out)
    tally = Tally()
    if record.settings == plan.settings():
        for _ in plan.documents("compare", tally):
            pass
    if record.source_sha256 != tally.sha256:
        raise DataError(
            f"{out}: holds a corpus of other text or settings; name another directory, or remove this one"
        )
    if record.fingerprint != Corpus.open(out).fingerprint:
        raise DataError(f"{out}: its bundles are not those that it was built with; remove it and build again")
    return record.summary(out, reused=True)
