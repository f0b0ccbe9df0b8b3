"""`zslurm data build|show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.options import Json

app = typer.Typer(help="Token bundles: what runs are trained on.", no_args_is_help=True)


@app.command()
def build(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="SOURCE...", help="Text files, or directories of them.", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The directory to make.", show_default=False)],
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=512, help="Train a BPE tokenizer of this size on the text.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Use this tokenizer.json instead of training one.")
    ] = None,
    glob: Annotated[str, typer.Option("--glob", help="Which files of a directory.")] = "*",
    json: Json = False,
) -> None:
    """Tokenize text into an HDF5 bundle.

    Example: zslurm data build ~/texts --glob '*.txt' --vocab-size 32768 --out data/texts
    """
    from zslurm.report.data import build_bundle

    build_bundle(sources, out, vocab_size=vocab_size, tokenizer=tokenizer, glob=glob, as_json=json)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A bundle, or a directory of them.")],
    json: Json = False,
) -> None:
    """Describe a bundle.

    Example: zslurm data show data/texts
    """
    from zslurm.report.data import show_bundle

    show_bundle(path, as_json=json)
