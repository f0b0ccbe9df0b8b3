"""`zslurm checkpoint ls|export|import`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.options import Context, Json, NoTokenizer, RopeBase, TokenizerFile

app = typer.Typer(help="Checkpoints: list them, publish them, take published ones in.", no_args_is_help=True)

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CKPT", help="A checkpoint's directory, or a run (its newest checkpoint).", show_default=False
    ),
]
ShardSize = Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Size of one file at most.")]


class Format(StrEnum):
    """Formats that are exported."""

    HF = "hf"


class Dtype(StrEnum):
    """Number formats of exported weights."""

    BF16 = "bf16"
    FP32 = "fp32"


@app.command("ls")
def list_(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run, or a directory of checkpoints.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """List a run's checkpoints: the whole ones, and what is wrong with the others.

    Example: zslurm checkpoint ls my-run
    """
    from zslurm.report.checkpoint import list_them

    list_them(run, as_json=json)


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.", show_default=False)],
    to: Annotated[Format, typer.Option("--to", help="Format: hf is transformers' (ZayaForCausalLM).")] = Format.HF,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Round to bf16, or keep fp32.")] = Dtype.BF16,
    max_shard_size: ShardSize = "5GB",
    tokenizer: TokenizerFile = None,
    no_tokenizer: NoTokenizer = False,
    rope_base: RopeBase = None,
    context: Context = None,
    json: Json = False,
) -> None:
    """Write a checkpoint as a folder that transformers loads.

    Example: zslurm checkpoint export my-run --to hf my-run-hf
    """
    from train.hub import Overrides
    from zslurm.report.checkpoint import TokenizerChoice, export_weights

    export_weights(
        checkpoint,
        out,
        dtype=dtype.value,
        max_shard_size=max_shard_size,
        tokenizer=TokenizerChoice(tokenizer, no_tokenizer),
        overrides=Overrides(rope_base, context),
        as_json=json,
    )


@app.command("import")
def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A folder in transformers' format, or in that of ZAYA1's first release.",
            show_default=False,
        ),
    ],
    root: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT_ROOT", help="The directory to make the checkpoint step-00000000 in.", show_default=False
        ),
    ],
    max_shard_size: ShardSize = "1GB",
    tokenizer: TokenizerFile = None,
    no_tokenizer: NoTokenizer = False,
    json: Json = False,
) -> None:
    """Make a checkpoint of a published model's weights; prints its path.

    Example: zslurm checkpoint import ZAYA1-8B zaya1-8b
    """
    from zslurm.report.checkpoint import TokenizerChoice, import_folder

    import_folder(
        folder,
        root,
        max_shard_size=max_shard_size,
        tokenizer=TokenizerChoice(tokenizer, no_tokenizer),
        as_json=json,
    )
