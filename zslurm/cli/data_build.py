"""`zslurm data build`: make token bundles of text, with progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration
from zslurm.cli.errors import as_user_errors
from zslurm.cli.help import MORE
from zslurm.cli.options import Json, Slurm, run_locally_or_as_job
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, NotFound
from zslurm.core.progress_bar import byte_bar
from zslurm.core.units import parse_size
from zslurm.train.data.build import build as bundles
from zslurm.train.data.build.encode import default_workers
from zslurm.train.data.build.source_reader import Fields
from zslurm.train.data.build.sources import MissingSource
from zslurm.train.data.build.tokenized import import_tokens, is_tokenized
from zslurm.train.data.build.trim import Trimming
from zslurm.train.data.manifest import BuildSummary

Workers = Annotated[
    int | None,
    Option(
        min=1,
        help="How many work side by side; default: 4 at most, in a Slurm job all cores.",
        rich_help_panel=MORE,
    ),
]
_STAGES = {
    "tokenizer": "training the tokenizer",
    "tokens": "tokenizing",
    "compare": "comparing with what is there",
}


def build(
    sources: Annotated[
        list[Path],
        Argument(
            metavar="SOURCE...",
            help="Texts, .jsonl (also .gz, .zst) and .parquet files, or directories of them; or tokens: "
            "Megatron's .idx, directories of MDS.",
        ),
    ],
    out: Annotated[Path, Option("--out", "-o", help="The directory to make.")],
    vocab_size: Annotated[
        int | None, Option(min=512, max=1 << 24, help="Train a BPE tokenizer of this size on the text.")
    ] = None,
    tokenizer: Annotated[Path | None, Option(help="Use this tokenizer.json instead of training one.")] = None,
    glob: Annotated[
        str, Option(help="Which files of a directory; hidden ones only if it begins with a dot.")
    ] = "*",
    text_key: Annotated[str, Option(help="What holds the text of a .jsonl line.")] = "text",
    text_column: Annotated[
        str, Option(help="What holds the text of a .parquet row.", rich_help_panel=MORE)
    ] = "text",
    prompt_key: Annotated[
        str | None, Option(help="For fine-tuning: what holds the prompt, which is not learned.")
    ] = None,
    completion_key: Annotated[str | None, Option(help="For fine-tuning: what holds the completion.")] = None,
    chat_key: Annotated[
        str | None, Option(help="For chats: what holds the messages; what the assistant says is learned.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        Option(help="A jinja template of chats, instead of the one next to the tokenizer.", rich_help_panel=MORE),
    ] = None,
    trim_answers: Annotated[
        int | None,
        Option(
            min=2,
            metavar="CONTEXT",
            help="Take so much from the middle of the reasoning of longer examples that they fit this context.",
            rich_help_panel=MORE,
        ),
    ] = None,
    reasoning_tags: Annotated[
        tuple[str, str],
        Option(metavar="OPENING CLOSING", help="What the reasoning is between.", rich_help_panel=MORE),
    ] = ("<think>", "</think>"),
    end_token: Annotated[
        str | None,
        Option(help="The tokenizer's end-of-document token, if it is an unusual one.", rich_help_panel=MORE),
    ] = None,
    bundle_size: Annotated[
        str, Option(metavar="SIZE", help="Size of one bundle at most.", rich_help_panel=MORE)
    ] = "2GiB",
    max_document: Annotated[
        str, Option(metavar="SIZE", help="Refuse documents that are larger.", rich_help_panel=MORE)
    ] = "32MiB",
    mds_column: Annotated[
        str,
        Option(
            metavar="NAME[:TYPE]",
            help="MDS: the column of the tokens; its type if it has bytes.",
            rich_help_panel=MORE,
        ),
    ] = "tokens",
    workers: Workers = None,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Tokenize text into HDF5 bundles. After a kill, the same command continues from its last bundle.

    Example: zslurm data build ~/texts --glob '*.txt' --vocab-size 32768 --out data/texts
    """
    run_locally_or_as_job(slurm)
    if tokenized := [source for source in sources if is_tokenized(source)]:
        if len(tokenized) < len(sources) or tokenizer is None or vocab_size is not None:
            raise ConfigError(
                f"{tokenized[0]} has tokens: give --tokenizer, their own, and no texts or --vocab-size"
            )
        with as_user_errors():
            summary = import_tokens(
                sources, out, tokenizer, column=mds_column, end_token=end_token,
                bundle_bytes=parse_size(bundle_size), note=say,
            )  # fmt: skip
        _show(summary, json=json)
        return
    summary = make_bundle(
        sources,
        out,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        glob=glob,
        fields=Fields(text_key, text_column, prompt_key, completion_key, chat_key),
        chat_template=chat_template,
        trimming=None if trim_answers is None else Trimming(trim_answers, *reasoning_tags),
        end_token=end_token,
        bundle_bytes=parse_size(bundle_size),
        max_document_bytes=parse_size(max_document),
        workers=workers,
    )
    _show(summary, json=json)


def _show(summary: BuildSummary, *, json: bool) -> None:
    if json:
        print_json({**asdict(summary), "path": str(summary.path)})
    else:
        say(describe_summary(summary))


def make_bundle(sources: list[Path], out: Path, *, workers: int | None = None, **options: Any) -> BuildSummary:
    """Build a bundle with progress on stderr; `options` are keywords of `zslurm.train.data.build.build.build`.

    Raises:
        NotFound: a source does not exist.
        ConfigError: bad sources, tokenizer or output directory.
    """
    with as_user_errors(), _progress() as report:
        try:
            return bundles.build(
                sources, out, workers=workers or default_workers(), report=report, note=say, **options
            )
        except MissingSource as error:
            raise NotFound(str(error)) from error


@contextmanager
def _progress() -> Iterator[bundles.Report]:
    """Show a progress bar on a terminal, a line for each stage elsewhere."""
    seen: set[str] = set()
    with byte_bar("reading") as bar:

        def report(progress: bundles.BuildProgress) -> None:
            stage = _STAGES[progress.stage]
            if not sys.stderr.isatty() and stage not in seen:
                say(f"{stage} ({show_bytes(progress.total)} of text)")
            seen.add(stage)
            bar(progress.done, progress.total, stage)

        yield report


def describe_summary(summary: BuildSummary) -> str:
    """Describe in one line what a build made."""
    done = "was already there" if summary.reused else f"made in {show_duration(summary.seconds)}"
    targets = f" ({show_count(summary.targets)} count as targets)" if summary.targets < summary.tokens else ""
    parts = [
        f"{counted(summary.tokens, 'token', shown=show_count(summary.tokens))} of {summary.vocab_size}{targets}",
        counted(summary.documents, "document"),
        f"{show_bytes(summary.text_bytes)} of text",
    ]
    if summary.empty_documents:
        parts.append(f"{counted(summary.empty_documents, 'empty document')} left out")
    if summary.trimmed_documents:
        parts.append(
            f"{counted(summary.trimmed_documents, 'document')} trimmed by "
            f"{counted(summary.removed_tokens, 'token', shown=show_count(summary.removed_tokens))} of reasoning"
        )
    if summary.too_long_documents:
        parts.append(f"{counted(summary.too_long_documents, 'document')} left longer than the context")
    if summary.skipped_files:
        parts.append(f"{counted(len(summary.skipped_files), 'file')} skipped (not UTF-8: see build.json)")
    return f"{summary.path}: {done}: {', '.join(parts)}"
