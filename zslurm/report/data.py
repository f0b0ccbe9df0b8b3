"""Build and describe token bundles from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from train.data.build import BuildProgress, Report, build
from train.data.bundle import Corpus
from train.data.record import BuildSummary
from train.data.statistics import unigram_entropy
from train.errors import DataError
from zslurm.cli.output import print_json, say
from zslurm.errors import ConfigError
from zslurm.report.values import show_count, show_duration

_STAGES = {
    "tokenizer": "training the tokenizer",
    "tokens": "tokenizing",
    "compare": "comparing with what is there",
}


@contextmanager
def _progress() -> Iterator[Report]:
    """A progress bar on a terminal, a line for each stage elsewhere."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(progress: BuildProgress) -> None:
            if progress.stage not in seen:
                seen.add(progress.stage)
                say(f"{_STAGES[progress.stage]} ({show_count(progress.total)}B of text)")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def bar(progress: BuildProgress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(_STAGES[progress.stage], total=progress.total)
            bars.update(tasks[progress.stage], completed=progress.done, total=progress.total)

        yield bar


def make_bundle(
    sources: list[Path], out: Path, *, vocab_size: int | None, tokenizer: Path | None, glob: str
) -> BuildSummary:
    """Build a bundle with progress on stderr.

    Raises:
        ConfigError: bad sources, tokenizer or output directory.
    """
    try:
        with _progress() as report:
            return build(sources, out, vocab_size=vocab_size, tokenizer=tokenizer, glob=glob, report=report)
    except DataError as error:
        raise ConfigError(str(error)) from error


def describe_summary(summary: BuildSummary) -> str:
    """What a build made, in one line."""
    done = "was already there" if summary.reused else f"made in {show_duration(summary.seconds)}"
    skipped = f", {len(summary.skipped_files)} files skipped (not UTF-8)" if summary.skipped_files else ""
    return (
        f"{summary.path}: {done}: {show_count(summary.tokens)} tokens of {summary.vocab_size}, "
        f"{summary.documents} documents, {show_count(summary.text_bytes)}B of text{skipped}"
    )


def build_bundle(
    sources: list[Path], out: Path, *, vocab_size: int | None, tokenizer: Path | None, glob: str, as_json: bool
) -> None:
    """`zslurm data build`."""
    summary = make_bundle(sources, out, vocab_size=vocab_size, tokenizer=tokenizer, glob=glob)
    if as_json:
        print_json({**asdict(summary), "path": str(summary.path)})
    else:
        say(describe_summary(summary))


def show_bundle(path: Path, *, as_json: bool) -> None:
    """`zslurm data show`."""
    try:
        corpus = Corpus.open(path)
        entropy = unigram_entropy(corpus)
    except DataError as error:
        raise ConfigError(str(error)) from error
    header = corpus.header
    facts = {
        "path": str(path),
        "bundles": len(corpus.bundles),
        "tokens": corpus.token_count,
        "documents": corpus.document_count,
        "vocab_size": header.vocab_size,
        "unigram_entropy": entropy,
        "tokenizer_sha256": header.tokenizer_sha256,
        "fingerprint": corpus.fingerprint,
        "source": header.source,
    }
    if as_json:
        print_json(facts)
        return
    facts["unigram_entropy"] = f"{entropy:.4f} nats per token"
    for name, value in facts.items():
        print(f"{name:<17} {value}")
