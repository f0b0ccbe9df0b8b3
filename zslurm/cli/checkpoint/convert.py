"""`zslurm checkpoint export|import`: transformers' folders, and torch.distributed.checkpoint, both ways."""

from __future__ import annotations

import json as json_text
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from zslurm import checkpoint_tools
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
from zslurm.run.checkpoints import find_checkpoint, find_weights

if TYPE_CHECKING:
    from zslurm.train.hub.dcp import Converted


class WeightsFormat(StrEnum):
    """Formats that are exported."""

    HF = "hf"
    DCP = "dcp"


class ExportDtype(StrEnum):
    """Number formats of exported weights."""

    BF16 = "bf16"
    FP32 = "fp32"


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, Argument(metavar="DIR", help="The folder to make.")],
    to: Annotated[
        WeightsFormat, Option(help="hf: transformers' folder; dcp: torch.distributed.checkpoint, with all state.")
    ] = WeightsFormat.HF,
    dtype: Annotated[ExportDtype, Option(help="Round to bf16, or keep fp32.")] = ExportDtype.BF16,
    max_shard_size: ShardSize = "5GB",
    tokenizer: TokenizerFile = None,
    no_tokenizer: NoTokenizer = False,
    rope_base: RopeBase = None,
    context: Context = None,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Write a checkpoint for transformers or torch's DCP.

    The formats are transformers' folder and torch's distributed checkpoint.

    Example: zslurm checkpoint export my-run --to hf my-run-hf
    """
    run_locally_or_as_job(slurm, workers_option=None)
    if to is WeightsFormat.DCP:
        _export_dcp(find_checkpoint(checkpoint), out, as_json=json)
        return
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
            help="A folder in transformers' format or in the format of ZAYA1's first release, or one of "
            "torch.distributed.checkpoint.",
        ),
    ],
    root: Annotated[Path, Argument(metavar="CKPT_ROOT", help="The directory of checkpoints to make it in.")],
    max_shard_size: ShardSize = "1GB",
    tokenizer: TokenizerFile = None,
    no_tokenizer: NoTokenizer = False,
    like: Annotated[
        str | None,
        Option(metavar="CKPT", help="Of dcp: a checkpoint of the same model, if another trainer wrote DIR."),
    ] = None,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Make a checkpoint of a published model or another trainer's. Prints the path of the checkpoint.

    Example: zslurm checkpoint import ZAYA1-8B zaya1-8b
    """
    run_locally_or_as_job(slurm, workers_option=None)
    if (folder / ".metadata").is_file():
        _import_dcp(folder, root, like, as_json=json)
        return
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


def _export_dcp(path: Path, out: Path, *, as_json: bool) -> None:
    with (
        as_user_errors(),
        checkpoint_tools.Checkpoint.open(path) as checkpoint,
        byte_bar(f"exporting {path.name}") as report,
    ):
        from zslurm.train.hub.dcp import export_dcp  # imports torch

        done = export_dcp(checkpoint, out, report=report)
    _show_converted("exported", path, done, as_json=as_json)


def _import_dcp(folder: Path, root: Path, like: str | None, *, as_json: bool) -> None:
    with as_user_errors(), byte_bar(f"importing {folder.name}") as report:
        from zslurm.train.hub.dcp import import_dcp  # imports torch

        manifest = None
        if like is not None:
            with checkpoint_tools.Checkpoint.open(find_checkpoint(like), check_files=False) as model:
                manifest = model.manifest
        done = import_dcp(folder, root, like=manifest, report=report)
    _show_converted("imported", folder, done, as_json=as_json)


def _show_converted(what: str, source: Path, done: Converted, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done) | {"path": str(done.path), "source": str(source)})
        return
    say(f"{what} {source}: {counted(done.tensors, 'tensor')}, {show_bytes(done.bytes)}")
    print(done.path)
