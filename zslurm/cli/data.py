"""`zslurm data build|show|verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.heavy import Slurm, here_or_as_job
from zslurm.cli.options import Json

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
    """Tokenize text into HDF5 bundles. After a kill, the same command goes on where it was.

    Example: zslurm data build ~/texts --glob '*.txt' --vocab-size 32768 --out data/texts
    """
    here_or_as_job(slurm)
    from train.data.build.source_reader import Fields
    from zslurm.core.units import parse_size
    from zslurm.report.data import build_bundle

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
    from zslurm.report.data import show_bundle

    show_bundle(path, sample=sample, as_json=json)


@app.command()
def verify(path: Bundles, workers: Workers = None, slurm: Slurm = False, json: Json = False) -> None:
    """Read everything and compare it with its checksums; exit code 5 where something is damaged.

    Example: zslurm data verify data/texts
    """
    here_or_as_job(slurm)
    from zslurm.report.data import verify_bundle

    verify_bundle(path, workers=workers, as_json=json)
