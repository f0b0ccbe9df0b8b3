"""`zslurm data`: the group of its commands; all but `build` are here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count
from zslurm.cli.data_build import Workers, build
from zslurm.cli.errors import as_user_errors
from zslurm.cli.options import Json, Slurm, run_locally_or_as_job
from zslurm.core.console import print_json
from zslurm.core.errors import CheckFailed, NotFound
from zslurm.core.progress_bar import byte_bar
from zslurm.train.data import verify as checksums
from zslurm.train.data.build.encode import default_workers
from zslurm.train.data.build.inspect import Preview, previews, unigram_entropy
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.manifest import BuildManifest
from zslurm.train.errors import DataError

Bundles = Annotated[Path, Argument(metavar="PATH", help="A bundle, or a directory of them.")]

ENTROPY_TOKENS = 1 << 26  # read to estimate the entropy
DAMAGES_SHOWN = 20


def show(
    path: Bundles,
    sample: Annotated[int, Option(min=0, help="Print so many documents, as text.")] = 0,
    json: Json = False,
) -> None:
    """Describe a bundle.

    Example: zslurm data show data/texts --sample 3
    """
    check_exists(path)
    with as_user_errors():
        corpus = Corpus.open(path)
        facts = _facts(path, corpus)
        shown = previews(corpus, sample) if sample else []
    if json:
        print_json(facts | ({"sample": [asdict(preview) for preview in shown]} if sample else {}))
        return
    estimated = " (estimated)" if corpus.token_count > ENTROPY_TOKENS else ""
    facts["unigram_entropy"] = f"{facts['unigram_entropy']:.4f} nats per token{estimated}"
    facts["targets"] = "all tokens" if facts["targets"] == corpus.token_count else facts["targets"]
    facts["checksums"] = f"CRC32 of each {counted(facts['checksums']['block_tokens'], 'token')}, and of the index"
    facts["bytes"] = show_bytes(sum(file["bytes"] for file in facts.pop("files")))
    for name, value in facts.items():
        print(f"{name:<17} {value}")
    for preview in shown:
        _print_preview(preview, corpus.document_count)


def _facts(path: Path, corpus: Corpus) -> dict[str, Any]:
    """Return what is known of a corpus without reading all of it."""
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
    """Return how many tokens count as targets; of masked bundles build.json knows."""
    if not any(bundle.masked for bundle in corpus.bundles):
        return corpus.token_count
    try:
        return BuildManifest.read(path).targets
    except DataError:
        return "some tokens"


def _print_preview(preview: Preview, documents: int) -> None:
    """Print a document; what is not learned is marked."""
    print(f"\n--- document {preview.document} of {documents}: {counted(preview.tokens, 'token')}")
    if all(counts for counts, _ in preview.parts):
        print(preview.text)
    else:
        for counts, text in preview.parts:
            print(f"[{'learned' if counts else 'prompt, not learned'}]\n{text}")
    if not preview.complete:
        print("...")


def verify(path: Bundles, workers: Workers = None, slurm: Slurm = False, json: Json = False) -> None:
    """Read everything and compare it with its checksums. Exit code 5 if something is damaged.

    Example: zslurm data verify data/texts
    """
    run_locally_or_as_job(slurm)
    check_exists(path)
    with as_user_errors(), byte_bar(f"verifying {path.name}") as report:
        verification = checksums.verify(path, workers or default_workers(), report)
    if json:
        damages = [{**asdict(damage), "path": str(damage.path)} for damage in verification.damages]
        print_json({**asdict(verification), "path": str(path), "intact": not damages, "damages": damages})
    if verification.damages:
        lines = [damage.reason for damage in verification.damages[:DAMAGES_SHOWN]]
        if more := len(verification.damages) - len(lines):
            lines.append(f"... and {more} more (--json lists all)")
        raise CheckFailed("\n".join(lines))
    if not json:
        print(
            f"{path}: intact: {counted(verification.tokens, 'token', shown=show_count(verification.tokens))} "
            f"({show_bytes(verification.bytes)}) read, bundles: {verification.bundles}"
        )


def check_exists(path: Path) -> None:
    """Raise NotFound if there is no such file or directory."""
    if not path.exists():
        raise NotFound(f"{path}: no such file or directory; `zslurm data build` makes bundles")


app = typer.Typer(help="Token bundles: what runs are trained on.", no_args_is_help=True)
for command in (build, show, verify):
    app.command()(command)
