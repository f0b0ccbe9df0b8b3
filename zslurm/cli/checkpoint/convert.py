"""`zslurm checkpoint export|import`: transformers' folders, both ways."""

from __future__ import annotations

import json as json_text
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration
from zslurm.cli.checkpoint.checkpoint_options import (
    Checkpoint,
    Context,
    NoTokenizer,
    RopeBase,
    ShardSize,
    TokenizerFile,
    tokenizer_for,
)
from zslurm.cli.errors import as_user_errors
from zslurm.cli.options import Json, Slurm, run_locally_or_as_job
from zslurm.core.console import print_json, say
from zslurm.core.errors import NotFound
from zslurm.core.progress_bar import byte_bar
from zslurm.core.units import parse_size
from zslurm.run.checkpoints import find_weights


class ExportDtype(StrEnum):
    """Number formats of exported weights."""

    BF16 = "bf16"
    FP32 = "fp32"


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, Argument(metavar="DIR", help="The folder to make.")],
    dtype: Annotated[ExportDtype, Option(help="Round to bf16, or keep fp32.")] = ExportDtype.BF16,
    max_shard_size: ShardSize = "5GB",
    tokenizer: TokenizerFile = None,
    no_tokenizer: NoTokenizer = False,
    rope_base: RopeBase = None,
    context: Context = None,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Write a checkpoint for transformers.

    Example: zslurm checkpoint export my-run my-run-hf
    """
    run_locally_or_as_job(slurm, workers_option=None)
    shard_bytes = parse_size(max_shard_size)
    path = find_weights(checkpoint)
    started = time.monotonic()
    from zslurm.train import hub  # imports numpy and h5py, which `ls` and `--help` need not wait for

    with as_user_errors(), hub.open_weights(path, hub.Overrides(rope_base, context)) as weights:
        files = tokenizer_for(weights, tokenizer, none=no_tokenizer)
        with byte_bar(f"exporting {path.name}") as report:
            done = hub.export(
                weights, out, dtype=dtype.value, max_shard_bytes=shard_bytes, tokenizer=files, report=report
            )
    if json:
        print_json(asdict(done) | {"path": str(done.path), "source": str(path), "dtype": dtype})
        return
    say(
        f"exported {path} in {show_duration(time.monotonic() - started)}: {counted(done.tensors, 'tensor')}, "
        f"{show_bytes(done.bytes)} in {dtype}{'' if done.tokenizer else ', without a tokenizer'}"
    )
    if done.note:
        say(f"note: {done.note}")
    print(done.path)


def import_(
    folder: Annotated[
        Path,
        Argument(
            metavar="DIR",
            help="A folder in transformers' format or in the format of ZAYA1's first release.",
        ),
    ],
    root: Annotated[Path, Argument(metavar="CKPT_ROOT", help="The directory of checkpoints to make it in.")],
    max_shard_size: ShardSize = "1GB",
    tokenizer: TokenizerFile = None,
    no_tokenizer: NoTokenizer = False,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Make a checkpoint of a published model. Prints the path of the checkpoint.

    Example: zslurm checkpoint import ZAYA1-8B zaya1-8b
    """
    run_locally_or_as_job(slurm, workers_option=None)
    shard_bytes = parse_size(max_shard_size)
    if not folder.is_dir():
        raise NotFound(f"{folder}: no such folder")
    from zslurm.train import hub  # imports numpy and h5py, which `ls` and `--help` need not wait for

    with as_user_errors(), hub.FolderWeights(folder) as weights:
        settings, origin = weights.settings, weights.origin
        files = tokenizer_for(weights, tokenizer, none=no_tokenizer)
        with byte_bar(f"importing {folder.name}") as report:
            done = hub.import_weights(weights, root, tokenizer=files, max_shard_bytes=shard_bytes, report=report)
    model = settings.model.model_dump(mode="json")
    if json:
        more = {"layout": origin, "rope_base": settings.rope_base, "context": settings.context, "model": model}
        print_json(asdict(done) | {"path": str(done.path), "source": str(folder), **more})
        return
    say(
        f"imported a {origin}: {counted(done.parameters, 'parameter', shown=show_count(done.parameters))}, "
        f"{show_bytes(done.bytes)}{'' if done.tokenizer else ', without a tokenizer'}"
    )
    flow = ", ".join(f"{key}: {json_text.dumps(value)}" for key, value in model.items())
    say(f"start a run from it with `init: ckpt:{done.path}` and this model: {{{flow}}}")
    print(done.path)
