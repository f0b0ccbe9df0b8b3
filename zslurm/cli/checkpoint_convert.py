"""`zslurm checkpoint ls|export|import`: find, convert, and say what was done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools import CheckpointError, Listing, Mismatch, NotACheckpoint
from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration
from zslurm.core.console import print_json, print_table, say
from zslurm.core.errors import ConfigError, NotFound, ZslurmError
from zslurm.core.progress_bar import byte_bar
from zslurm.core.units import parse_size
from zslurm.run.checkpoints import find_checkpoints, find_weights
from zslurm.train.errors import DataError, HubError, TrainError
from zslurm.train.hub import (
    FolderWeights,
    Overrides,
    TokenizerFiles,
    Weights,
    export,
    import_weights,
    open_weights,
)


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer goes with the weights: `file` instead of theirs, or none at all."""

    file: Path | None = None
    none: bool = False

    def of(self, weights: Weights) -> TokenizerFiles | None:
        """The tokenizer's files.

        Raises:
            ConfigError: two contradicting wishes.
            HubError: the file is no tokenizer, or the weights' own is not found.
        """
        if self.none and self.file is not None:
            raise ConfigError("give --tokenizer or --no-tokenizer, not both")
        if self.none:
            return None
        if self.file is None:
            return weights.tokenizer()
        files = TokenizerFiles(self.file / "tokenizer.json" if self.file.is_dir() else self.file)
        files.check()
        return files


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Errors of the trainer and of the checkpoint format, with the exit codes of the command line."""
    try:
        yield
    except NotACheckpoint as error:
        raise NotFound(str(error)) from error
    except (HubError, DataError, Mismatch) as error:
        raise ConfigError(str(error)) from error
    except (CheckpointError, TrainError) as error:
        raise ZslurmError(str(error)) from error


def list_them(reference: str, *, as_json: bool) -> None:
    """`zslurm checkpoint ls`."""
    root, found = find_checkpoints(reference)
    rows = [(listing, _size(listing.path), _age(listing.path)) for listing in found]
    if as_json:
        print_json([_as_json(*row) for row in rows])
    elif rows:
        print_table(["step", "tokens", "ranks", "size", "age", "state"], [_as_row(*row) for row in rows])
    else:
        say(f"no checkpoints in {root}")


def export_weights(
    reference: str,
    out: Path,
    *,
    dtype: str,
    max_shard_size: str,
    tokenizer: TokenizerChoice,
    overrides: Overrides,
    as_json: bool,
) -> None:
    """`zslurm checkpoint export`."""
    shard_bytes = parse_size(max_shard_size)
    path = find_weights(reference)
    started = time.monotonic()
    with as_user_errors(), open_weights(path, overrides) as weights:
        files = tokenizer.of(weights)
        with byte_bar(f"exporting {path.name}") as report:
            done = export(weights, out, dtype=dtype, max_shard_bytes=shard_bytes, tokenizer=files, report=report)
    if as_json:
        print_json(
            {
                "path": str(done.path),
                "source": str(path),
                "dtype": dtype,
                "bytes": done.bytes,
                "tensors": done.tensors,
                "files": list(done.files),
                "tokenizer": done.tokenizer,
                "note": done.note,
            }
        )
        return
    took = show_duration(time.monotonic() - started)
    without = "" if done.tokenizer else ", without a tokenizer"
    say(
        f"exported {path} in {took}: {counted(done.tensors, 'tensor')}, {show_bytes(done.bytes)} in "
        f"{dtype}{without}"
    )
    if done.note:
        say(f"note: {done.note}")
    print(done.path)


def import_folder(
    folder: Path, root: Path, *, max_shard_size: str, tokenizer: TokenizerChoice, as_json: bool
) -> None:
    """`zslurm checkpoint import`."""
    shard_bytes = parse_size(max_shard_size)
    if not folder.is_dir():
        raise NotFound(f"{folder}: no such folder")
    with as_user_errors(), FolderWeights(folder) as weights:
        settings, origin = weights.settings, weights.origin
        files = tokenizer.of(weights)
        with byte_bar(f"importing {folder.name}") as report:
            done = import_weights(weights, root, tokenizer=files, max_shard_bytes=shard_bytes, report=report)
    model = settings.model.model_dump(mode="json")
    if as_json:
        print_json(
            {
                "path": str(done.path),
                "source": str(folder),
                "layout": origin,
                "parameters": done.parameters,
                "bytes": done.bytes,
                "shards": done.shards,
                "tokenizer": done.tokenizer,
                "rope_base": settings.rope_base,
                "context": settings.context,
                "model": model,
            }
        )
        return
    without = "" if done.tokenizer else ", without a tokenizer"
    say(
        f"imported a {origin}: {counted(done.parameters, 'parameter', shown=show_count(done.parameters))}, "
        f"{show_bytes(done.bytes)}{without}"
    )
    say(f"start a run from it with `init: ckpt:{done.path}` and this model: {_yaml_flow(model)}")
    print(done.path)


def _yaml_flow(model: dict[str, Any]) -> str:
    import json

    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in model.items()) + "}"


def _size(path: Path) -> int:
    try:
        return sum(file.stat().st_size for file in path.iterdir())
    except OSError:
        return 0


def _age(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


def _as_row(listing: Listing, size: int, age: float) -> list[str]:
    return [
        str(listing.step),
        show_count(listing.tokens) if listing.tokens is not None else "-",
        str(listing.world_size or "-"),
        f"{show_bytes(size)}",
        show_duration(age),
        listing.reason or "complete",
    ]


def _as_json(listing: Listing, size: int, age: float) -> dict[str, Any]:
    return {
        "path": str(listing.path),
        "step": listing.step,
        "tokens": listing.tokens,
        "ranks": listing.world_size,
        "bytes": size,
        "age_s": age,
        "complete": listing.complete,
        "reason": listing.reason,
    }
