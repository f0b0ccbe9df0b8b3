"""Build, describe and verify token bundles from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration
from zslurm.cli.options import Json, Slurm, run_locally_or_as_job
from zslurm.core.console import print_json, say
from zslurm.core.errors import CheckFailed, ConfigError, NotFound, ZslurmError
from zslurm.core.progress_bar import byte_bar
from zslurm.core.units import parse_size
from zslurm.train.data.build.build import BuildProgress, Report
from zslurm.train.data.build.build import build as build_bundles
from zslurm.train.data.build.encode import default_workers
from zslurm.train.data.build.inspect import Preview, previews, unigram_entropy
from zslurm.train.data.build.source_reader import MAX_DOCUMENT_BYTES, Fields
from zslurm.train.data.build.sources import MissingSource
from zslurm.train.data.build.writer import BUNDLE_BYTES
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.manifest import BuildManifest, BuildSummary
from zslurm.train.data.verify import verify as verify_bundles
from zslurm.train.errors import BuildFailed, DataError

app = typer.Typer(help="Token bundles: what runs are trained on.", no_args_is_help=True)

Bundles = Annotated[
    Path, typer.Argument(metavar="PATH", help="A bundle, or a directory of them.", show_default=False)
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, help="How many work side by side; default: 4 at most, in a Slurm job all cores."
    ),
]


@app.command()
def build(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Texts, .jsonl (also .gz, .zst) and .parquet files, or directories of them.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The directory to make.", show_default=False)],
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=512, help="Train a BPE tokenizer of this size on the text.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Use this tokenizer.json instead of training one.")
    ] = None,
    glob: Annotated[str, typer.Option("--glob", help="Which files of a directory.")] = "*",
    text_key: Annotated[str, typer.Option("--text-key", help="What holds the text of a .jsonl line.")] = "text",
    text_column: Annotated[
        str, typer.Option("--text-column", help="What holds the text of a .parquet row.")
    ] = "text",
    prompt_key: Annotated[
        str | None,
        typer.Option("--prompt-key", help="For fine-tuning: what holds the prompt, which is not learned."),
    ] = None,
    completion_key: Annotated[
        str | None, typer.Option("--completion-key", help="For fine-tuning: what holds the completion.")
    ] = None,
    end_token: Annotated[
        str | None,
        typer.Option("--end-token", help="The tokenizer's end-of-document token, where it is an unusual one."),
    ] = None,
    bundle_size: Annotated[
        str, typer.Option("--bundle-size", metavar="SIZE", help="Size of one bundle at most.")
    ] = "2GiB",
    max_document: Annotated[
        str, typer.Option("--max-document", metavar="SIZE", help="Refuse documents that are larger.")
    ] = "32MiB",
    workers: Workers = None,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Tokenize text into HDF5 bundles. After a kill, the same command continues where it was.

    Example: zslurm data build ~/texts --glob '*.txt' --vocab-size 32768 --out data/texts
    """
    run_locally_or_as_job(slurm)

    build_bundle(
        sources,
        out,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        glob=glob,
        fields=Fields(text_key, text_column, prompt_key, completion_key),
        end_token=end_token,
        bundle_bytes=parse_size(bundle_size),
        max_document_bytes=parse_size(max_document),
        workers=workers,
        as_json=json,
    )


@app.command()
def show(
    path: Bundles,
    sample: Annotated[int, typer.Option("--sample", min=0, help="Print so many documents, as text.")] = 0,
    json: Json = False,
) -> None:
    """Describe a bundle.

    Example: zslurm data show data/texts --sample 3
    """
    show_bundle(path, sample=sample, as_json=json)


@app.command()
def verify(path: Bundles, workers: Workers = None, slurm: Slurm = False, json: Json = False) -> None:
    """Read everything and compare it with its checksums; exit code 5 where something is damaged.

    Example: zslurm data verify data/texts
    """
    run_locally_or_as_job(slurm)

    verify_bundle(path, workers=workers, as_json=json)


ENTROPY_TOKENS = 1 << 26  # read to estimate the entropy
DAMAGES_SHOWN = 20

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
                say(f"{_STAGES[progress.stage]} ({show_bytes(progress.total)} of text)")

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


@contextmanager
def _as_user_errors() -> Iterator[None]:
    """Errors of the data, with the exit codes of the command line."""
    try:
        yield
    except MissingSource as error:
        raise NotFound(str(error)) from error
    except BuildFailed as error:
        raise ZslurmError(str(error)) from error
    except DataError as error:
        raise ConfigError(str(error)) from error


def make_bundle(
    sources: list[Path],
    out: Path,
    *,
    vocab_size: int | None,
    tokenizer: Path | None,
    glob: str,
    fields: Fields = Fields(),  # noqa: B008 (frozen)
    end_token: str | None = None,
    bundle_bytes: int = BUNDLE_BYTES,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    workers: int | None = None,
) -> BuildSummary:
    """Build a bundle with progress on stderr; the arguments are those of `zslurm.train.data.build.build.build`.

    Raises:
        NotFound: a source does not exist.
        ConfigError: bad sources, tokenizer or output directory.
    """
    with _as_user_errors(), _progress() as report:
        return build_bundles(
            sources,
            out,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            glob=glob,
            fields=fields,
            end_token=end_token,
            bundle_bytes=bundle_bytes,
            max_document_bytes=max_document_bytes,
            workers=workers or default_workers(),
            report=report,
            note=say,
        )


def describe_summary(summary: BuildSummary) -> str:
    """What a build made, in one line."""
    done = "was already there" if summary.reused else f"made in {show_duration(summary.seconds)}"
    parts = [
        f"{counted(summary.tokens, 'token', shown=show_count(summary.tokens))} of {summary.vocab_size}",
        counted(summary.documents, "document"),
        f"{show_bytes(summary.text_bytes)} of text",
    ]
    if summary.targets < summary.tokens:
        parts[0] += f" ({show_count(summary.targets)} count as targets)"
    if summary.skipped_files:
        parts.append(f"{counted(len(summary.skipped_files), 'file')} skipped (not UTF-8: see build.json)")
    return f"{summary.path}: {done}: {', '.join(parts)}"


def build_bundle(sources: list[Path], out: Path, *, as_json: bool, **options: Any) -> None:
    """`zslurm data build`; `options` as those of `make_bundle`."""
    summary = make_bundle(sources, out, **options)
    if as_json:
        print_json({**asdict(summary), "path": str(summary.path)})
    else:
        say(describe_summary(summary))


def show_bundle(path: Path, *, sample: int, as_json: bool) -> None:
    """`zslurm data show`."""
    _check_exists(path)
    with _as_user_errors():
        corpus = Corpus.open(path)
        facts = _facts(path, corpus)
        shown = previews(corpus, sample) if sample else []
    if as_json:
        print_json(facts | ({"sample": [asdict(preview) for preview in shown]} if sample else {}))
        return
    estimated = " (estimated)" if corpus.token_count > ENTROPY_TOKENS else ""
    facts["unigram_entropy"] = f"{facts['unigram_entropy']:.4f} nats per token{estimated}"
    facts["targets"] = "all tokens" if facts["targets"] == corpus.token_count else facts["targets"]
    facts["checksums"] = f"CRC32 of each {counted(facts['checksums']['block_tokens'], 'token')}, and of the index"
    files = facts.pop("files")
    facts["bytes"] = f"{show_bytes(sum(file['bytes'] for file in files))}"
    for name, value in facts.items():
        print(f"{name:<17} {value}")
    for preview in shown:
        _print_preview(preview, corpus.document_count)


def _facts(path: Path, corpus: Corpus) -> dict[str, Any]:
    """What can be said of a corpus without reading all of it."""
    header = corpus.header
    return {
        "path": str(path),
        "bundles": len(corpus.bundles),
        "tokens": corpus.token_count,
        "targets": _targets(path, corpus),
        "documents": corpus.document_count,
        "vocab_size": header.vocab_size,
        "unigram_entropy": unigram_entropy(corpus, ENTROPY_TOKENS),
        "tokenizer_sha256": header.tokenizer_sha256,
        "fingerprint": corpus.fingerprint,
        "checksums": {
            "block_tokens": corpus.bundles[0].block_tokens,
            "blocks": sum(len(bundle.checksums) for bundle in corpus.bundles),
        },
        "source": header.source,
        "files": [
            {
                "path": str(bundle.path),
                "tokens": bundle.token_count,
                "documents": bundle.document_count,
                "masked": bundle.masked,
                "bytes": bundle.path.stat().st_size,
            }
            for bundle in corpus.bundles
        ],
    }


def _targets(path: Path, corpus: Corpus) -> int | str:
    """How many tokens count as targets: build.json knows."""
    if not any(bundle.masked for bundle in corpus.bundles):
        return corpus.token_count
    try:
        return BuildManifest.read(path).targets
    except DataError:
        return "some tokens"


def _print_preview(preview: Preview, documents: int) -> None:
    """A document for people: what is not learned is marked."""
    print(f"\n--- document {preview.document} of {documents}: {counted(preview.tokens, 'token')}")
    if all(counts for counts, _ in preview.parts):
        print(preview.text)
    else:
        for counts, text in preview.parts:
            print(f"[{'learned' if counts else 'prompt, not learned'}]\n{text}")
    if not preview.complete:
        print("...")


def verify_bundle(path: Path, *, workers: int | None, as_json: bool) -> None:
    """`zslurm data verify`.

    Raises:
        CheckFailed: something is damaged; one line for each, up to a limit.
    """
    _check_exists(path)
    with _as_user_errors(), byte_bar(f"verifying {path.name}") as report:
        found = verify_bundles(path, workers or default_workers(), report)
    if as_json:
        damages = [{**asdict(damage), "path": str(damage.path)} for damage in found.damages]
        print_json({**asdict(found), "path": str(path), "intact": not damages, "damages": damages})
    if found.damages:
        lines = [damage.reason for damage in found.damages[:DAMAGES_SHOWN]]
        if more := len(found.damages) - len(lines):
            lines.append(f"... and {more} more (--json lists all)")
        raise CheckFailed("\n".join(lines))
    if not as_json:
        print(
            f"{path}: intact: {counted(found.tokens, 'token', shown=show_count(found.tokens))} "
            f"({show_bytes(found.bytes)}) read, bundles: {found.bundles}"
        )


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise NotFound(f"{path}: no such file or directory; `zslurm data build` makes bundles")
