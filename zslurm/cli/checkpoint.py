"""`zslurm checkpoint`: one function per command."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.checkpoint_convert import TokenizerChoice, export_weights, import_folder, list_them
from zslurm.cli.checkpoint_inspect import diff as diff_checkpoints
from zslurm.cli.checkpoint_inspect import export_state, import_state, is_dcp, prune_them, reshape_it, verify_it
from zslurm.cli.checkpoint_inspect import show as show_checkpoint
from zslurm.cli.options import Context, Json, NoTokenizer, RopeBase, Slurm, TokenizerFile, run_locally_or_as_job
from zslurm.train.hub import Overrides

app = typer.Typer(
    help="Checkpoints: list, look into, check, compare, reshape, publish, take in.", no_args_is_help=True
)

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CKPT", help="A checkpoint's directory, or a run (its newest checkpoint).", show_default=False
    ),
]
Workers = Annotated[int, typer.Option("--workers", metavar="N", min=1, help="Threads; login nodes are shared.")]
ShardSize = Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Size of one file at most.")]


class Format(StrEnum):
    """Formats that are exported."""

    HF = "hf"
    DCP = "dcp"


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
    list_them(run, as_json=json)


@app.command()
def show(
    checkpoint: Checkpoint,
    tensor: Annotated[
        list[str] | None,
        typer.Option("--tensor", metavar="NAME", help="Statistics of this tensor's values instead (repeatable)."),
    ] = None,
    json: Json = False,
) -> None:
    """Show the tensors of a checkpoint: shape, what is kept of each, and which ranks wrote it.

    Example: zslurm checkpoint show my-run --tensor embedding.weight
    """
    if tensor:  # reads their values
        run_locally_or_as_job(False)

    show_checkpoint(checkpoint, tensor or [], as_json=json)


@app.command()
def verify(checkpoint: Checkpoint, workers: Workers = 2, slurm: Slurm = False, json: Json = False) -> None:
    """Read every byte of a checkpoint and compare it with its checksum; exit code 5 if something is damaged.

    Example: zslurm checkpoint verify my-run
    """
    run_locally_or_as_job(slurm)

    verify_it(checkpoint, threads=workers, as_json=json)


@app.command()
def diff(
    first: Checkpoint,
    second: Annotated[
        str, typer.Argument(metavar="OTHER", help="Another one, or another run.", show_default=False)
    ],
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Say in what two checkpoints differ, whatever their numbers of ranks; exit code 5 if their values do.

    Example: zslurm checkpoint diff runs/a/checkpoints/step-00000400 runs/b/checkpoints/step-00000400
    """
    run_locally_or_as_job(slurm, workers_option=None)

    diff_checkpoints(first, second, as_json=json)


@app.command()
def reshape(
    checkpoint: Checkpoint,
    dp: Annotated[int, typer.Option("--dp", metavar="N", help="Data-parallel ranks to write it for.")],
    destination: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DST]", help="The directory to make; default: CKPT-dpN beside it.", show_default=False
        ),
    ] = None,
    workers: Workers = 4,
    max_memory: Annotated[
        str, typer.Option("--max-memory", metavar="SIZE", help="Memory for buffers at most.")
    ] = "256MiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Rewrite a checkpoint for another number of ranks, without a GPU; prints the new one's path.

    Resuming does not need it: a run loads a checkpoint of any number of ranks.

    Example: zslurm checkpoint reshape my-run --dp 768
    """
    run_locally_or_as_job(slurm)

    reshape_it(
        checkpoint,
        destination,
        dp,
        workers=workers,
        max_memory=max_memory,
        dry_run=dry_run,
        as_json=json,
    )


@app.command()
def prune(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run, or a directory of checkpoints.", show_default=False)
    ],
    keep_last: Annotated[int, typer.Option("--keep-last", metavar="K", min=1, help="The newest K stay.")] = 3,
    keep_every: Annotated[
        int, typer.Option("--keep-every", metavar="N", min=0, help="Multiples of N steps stay; 0: none.")
    ] = 0,
    keep_best: Annotated[
        bool, typer.Option("--keep-best/--drop-best", help="The best one on held-out text stays.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    json: Json = False,
) -> None:
    """Remove old checkpoints of a run that is not being trained; prints the paths of those that went.

    A running run does this itself: checkpoint.keep_last and the settings beside it.

    Example: zslurm checkpoint prune my-run --keep-last 2 --keep-every 1000 --dry-run
    """
    prune_them(run, keep_last, keep_every, keep_best=keep_best, dry_run=dry_run, as_json=json)


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.", show_default=False)],
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            help="hf: transformers' folder; dcp: torch.distributed.checkpoint, with all state.",
        ),
    ] = Format.HF,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Round to bf16, or keep fp32.")] = Dtype.BF16,
    max_shard_size: ShardSize = "5GB",
    tokenizer: TokenizerFile = None,
    no_tokenizer: NoTokenizer = False,
    rope_base: RopeBase = None,
    context: Context = None,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Write a checkpoint in a format of others: transformers' folder, or torch's distributed checkpoint.

    Example: zslurm checkpoint export my-run --to hf my-run-hf
    """
    run_locally_or_as_job(slurm, workers_option=None)

    if to is Format.DCP:
        export_state(checkpoint, out, as_json=json)
        return

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
            help="A folder in transformers' format or in that of ZAYA1's first release, or one of "
            "torch.distributed.checkpoint.",
            show_default=False,
        ),
    ],
    root: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT_ROOT", help="The directory of checkpoints to make it in.", show_default=False
        ),
    ],
    max_shard_size: ShardSize = "1GB",
    tokenizer: TokenizerFile = None,
    no_tokenizer: NoTokenizer = False,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", metavar="CKPT", help="Of dcp: a checkpoint of the same model, if another trainer wrote DIR."
        ),
    ] = None,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Make a checkpoint of a published model's weights, or of another trainer's state; prints its path.

    Example: zslurm checkpoint import ZAYA1-8B zaya1-8b
    """
    run_locally_or_as_job(slurm, workers_option=None)

    if is_dcp(folder):
        import_state(folder, root, like=like, as_json=json)
        return
    import_folder(
        folder,
        root,
        max_shard_size=max_shard_size,
        tokenizer=TokenizerChoice(tokenizer, no_tokenizer),
        as_json=json,
    )
